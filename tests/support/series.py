"""The patches of each release, of the megatron-core that is installed, or of one that a test pretends to be.

MEGATRON_LM names a checkout that is tested beside the releases' wheels: a wheel has no command line.
"""

import importlib.metadata
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

from megatron_rl.patching import releases, upstream
from megatron_rl.patching.releases import Target
from megatron_rl.patching.series import Series
from tests.support.tiny import REPOSITORY

PATCHES = REPOSITORY / "patches"
RELEASES = {
    name: series
    for name in releases.names(PATCHES)
    if (series := Series.read(PATCHES / name)).purposes and series.archives
}
CHECKOUT = os.environ.get("MEGATRON_LM")
EVERY = [*RELEASES, *([CHECKOUT] if CHECKOUT else [])]


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


QUICK = (min(RELEASES), megatron_core().name)


def unpacked(name: str, folder: Path) -> tuple[Series, Target]:
    """The series of a release, and its wheel unpacked in ``folder``; or a copy of the checkout."""
    if name == CHECKOUT:
        shutil.copytree(Path(CHECKOUT, "megatron"), folder / "megatron")
        return releases.for_tree(PATCHES, folder), Target(folder, None)
    series = RELEASES[name]
    archive = upstream.fetch(series, REPOSITORY / ".cache" / "patches", None)
    return series, Target(upstream.unpack(archive, folder, series.pins["Root"]), None)
