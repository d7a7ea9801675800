"""The patches of the megatron-core that is installed."""

from __future__ import annotations

from megatron_rl.patching import releases
from megatron_rl.patching.series import Series
from tests.support.tiny import REPOSITORY


def megatron_core() -> Series:
    """The series for the installed version."""
    found = releases.of_installed_packages(REPOSITORY / "patches")
    return next(series for series in found if series.package == "megatron-core")
