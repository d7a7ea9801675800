"""The folders below patches/: which one is for a package that is installed, or for a tree."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

from megatron_rl.patching.series import GitMissing, PatchError, Series, run_git
from megatron_rl.shipped import shipped

_PACKAGE_INFO = Path("megatron/core/package_info.py")
_PIN = re.compile(
    r'(?P<requirement>(?P<name>[\w.-]+)==[\w.]+)(?: *; *python_version *(?P<comparison><|>=) *"(?P<python>[\d.]+)")?'
)


def names(folder: Path) -> list[str]:
    """The series below ``folder``."""
    return sorted(path.parent.name for path in folder.glob("*/UPSTREAM"))


def of_installed_packages(folder: Path) -> list[Series]:
    """One series for each package: that for its installed version, else that for the version to install.

    `target.find` says of the latter what is wrong. A series for source trees alone (UPSTREAM: `Package: none`) is used
    only when it is named.
    """
    packages: dict[str, list[Series]] = {}
    for series in (Series.read(folder / name) for name in names(folder)):
        if not series.needs_tree:
            packages.setdefault(series.package, []).append(series)
    return [max(group, key=_nearness) for group in packages.values()]


def _nearness(series: Series) -> tuple[bool, bool]:
    wanted = to_install(series).partition("==")[2]
    return is_for(series, installed_version(series)), is_for(series, wanted)


def to_install(series: Series, python: tuple[int, ...] = sys.version_info[:2]) -> str:
    """The requirement of the series' package that requirements.txt pins for this Python, else the series' own.

    The series' own may have no wheel for this Python, or not be released yet. Nothing but Python may be installed here,
    so that no package can read the file.
    """
    for line in shipped("requirements.txt").read_text().splitlines():
        if (pin := _PIN.match(line)) and pin["name"] == series.package:
            than = _number(pin["python"] or "0")
            if python < than if pin["comparison"] == "<" else python >= than:
                return pin["requirement"]
    return series.pins["Package"]


def installed_version(series: Series) -> str | None:
    """The version of the series' package for the running interpreter; None: it is not installed."""
    try:
        return importlib.metadata.version(series.package)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_for(series: Series, version: str | None) -> bool:
    """Whether ``version`` is one of the release that the series is for: equal in its first two numbers."""
    return version is not None and line(version) == line(series.pins["Version"])


def line(version: str) -> str:
    """The release line: 0.17 of 0.17.2."""
    return ".".join(version.split(".")[:2])


def others(series: Series) -> dict[str, str]:
    """The series for other releases of the same package, each with its version."""
    folder = series.folder.parent
    all_others = (Series.read(folder / name) for name in names(folder) if name != series.name)
    return {other.name: other.pins["Version"] for other in all_others if other.package == series.package}


def for_tree(folder: Path, root: Path) -> Series:
    """The series for what is in the tree at ``root``: that of its release, else that of the nearest one before."""
    fitting = [Series.read(folder / name) for name in names(folder)]
    fitting = [series for series in fitting if (root / series.pins["Root"]).is_dir()]
    if not fitting:
        tops = sorted({Series.read(folder / name).pins["Root"] for name in names(folder)})
        raise PatchError(
            f"{root}: holds none of {', '.join(top + '/' for top in tops)}: name the root of a source tree"
        )
    if len(fitting) == 1:
        return fitting[0]
    version = version_of(root)
    if version is None or any(series.needs_tree for series in fitting):
        raise PatchError(f"{root}: name one upstream of {', '.join(series.name for series in fitting)}")
    ordered = sorted(fitting, key=lambda series: _number(series.pins["Version"]))
    before = [series for series in ordered if _number(line(series.pins["Version"])) <= _number(version)]
    return (before or ordered)[-1 if before else 0]


def version_of(root: Path) -> str | None:
    """The version of Megatron-Core that the tree says; None: it says none."""
    path = root / _PACKAGE_INFO
    if not path.is_file():
        return None
    parts = dict(re.findall(r"(?m)^(MAJOR|MINOR|PATCH|PRE_RELEASE) *= *['\"]?(\w*)", path.read_text()))
    number = ".".join(parts.get(key, "0") for key in ("MAJOR", "MINOR", "PATCH"))
    return number + parts.get("PRE_RELEASE", "")


def commit_of(root: Path) -> str | None:
    """The commit of a git checkout; None: it is none, or there is no git."""
    if not (root / ".git").exists():
        return None
    try:
        done = run_git(root, "rev-parse", "--short", "HEAD")
    except GitMissing:
        return None
    return done.stdout.decode().strip() if done.returncode == 0 else None


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
