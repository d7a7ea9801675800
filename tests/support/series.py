"""The patches of the megatron-core that is installed, or of one that a test pretends to be."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from types import SimpleNamespace

from megatron_rl.patching import releases
from megatron_rl.patching.series import Series
from tests.support.tiny import REPOSITORY


def megatron_core() -> Series:
    """The series for the installed version."""
    release = releases.of_installed_packages(REPOSITORY / "patches")
    return next(series for series in release if series.package == "megatron-core")


def install(monkeypatch, version: str | None, root: Path, origin: str | None = None) -> None:
    """Pretend that this version of megatron-core is installed below ``root``; None: none is."""

    def distribution(name: str) -> SimpleNamespace:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return SimpleNamespace(
            version=version,
            metadata={"Name": name},
            files=[],
            locate_file=lambda path: root,
            read_text=lambda file: origin,
        )

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: distribution(name).version)
