"""The folders below patches/: which one is for an installed package or a tree, and where that tree is."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.patching.series import Files, PatchError, Series
from megatron_rl.shipped import shipped

_PACKAGE_INFO = Path("megatron/core/package_info.py")
_PIN = re.compile(r"(?P<requirement>(?P<name>[\w.-]+)==[\w.]+)")


def names(folder: Path) -> list[str]:
    """The series below ``folder``."""
    return sorted(path.parent.name for path in folder.glob("*/UPSTREAM"))


def of_installed_packages(folder: Path) -> list[Series]:
    """One series for each package: that for its installed version, else that for the version to install.

    `find_target` says of the latter what is wrong. A series for source trees alone (UPSTREAM: `Package: none`) is used
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


def to_install(series: Series) -> str:
    """The requirement of the series' package that requirements.txt pins, else the series' own.

    The series' own may not be released yet. Nothing but Python may be installed here, so that no package can read the
    file.
    """
    for line in shipped("requirements.txt").read_text().splitlines():
        if (pin := _PIN.match(line)) and pin["name"] == series.package:
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


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


LOCK = ".patches-lock"


@dataclasses.dataclass(frozen=True)
class Target:
    """`root` holds the folder that the patches' paths start with."""

    root: Path
    version: str | None
    """Version of the installed package; None for a checkout or an unpacked tree."""
    record_path: str | None = None
    """The installed package's list of files, by which pip removes them."""

    @property
    def kind(self) -> str:
        """The name of the tree's kind in messages."""
        if self.version is not None:
            return f"installed package {self.version}"
        version = version_of(self.root)
        kind = "git checkout" if (self.root / ".git").exists() else "unpacked tree"
        return f"{kind}, version {version}" if version else kind

    def record(self, pristine: Files, wanted: Files) -> tuple[Files, Files]:
        """The list of installed files, now and with those that the patches of ``wanted`` create.

        Otherwise pip would leave them behind when it removes or reinstalls the package.
        """
        if self.record_path is None:
            return {}, {}
        old = (self.root / self.record_path).read_bytes()
        may = {path.encode() for path in pristine if pristine[path] is None}
        created = sorted(path for path in may if wanted[path.decode()] is not None)
        lines = [line for line in old.splitlines(keepends=True) if line.split(b",")[0] not in may]
        return {self.record_path: old}, {self.record_path: b"".join(lines + [path + b",,\n" for path in created])}


def find_target(series: Series, tree: str | None, allow_global: bool) -> Target:
    """Return the tree at `tree`, or the package installed for this interpreter.

    A package outside of a virtual environment belongs to the machine or the user, not to this project: it is refused
    unless `allow_global` (a container image has no other environment).
    """
    top = series.pins["Root"]
    if tree is not None:
        root = Path(tree).resolve()
        if not (root / top).is_dir():
            raise PatchError(f"{root}: not a tree of {series.name}: there is no {top}/ in it")
        return Target(root, None)
    if series.needs_tree:
        raise PatchError(f"{series.name} is for a source tree ({series.pins['Source']}): name yours with --tree")
    package = series.package
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        raise PatchError(
            f"{package} is not installed for {sys.executable}: {_install(series)} first, "
            "or name a source tree with --tree"
        ) from None
    root = Path(str(distribution.locate_file(""))).resolve()
    environment = Path(sys.prefix).resolve()
    virtual = sys.prefix != sys.base_prefix and root.is_relative_to(environment)
    if not virtual and not allow_global:
        raise PatchError(
            f"{root} is not inside a virtual environment: run this with a virtual environment's interpreter "
            "(.venv/bin/python -m megatron_rl patch ...), or pass --allow-global if this machine is yours to change"
        )
    if not (root / top).is_dir():
        raise PatchError(
            f"{root}: {package} is installed, but there is no {top}/ beside it: name its source tree with --tree, "
            f"or reinstall it ({reinstall(package, distribution.version)})"
        )
    if not is_for(series, distribution.version):
        raise PatchError(_other_version(series, distribution.version))
    records = [str(file) for file in distribution.files or [] if file.name == "RECORD"]
    return Target(root, distribution.version, records[0] if records else None)


def _other_version(series: Series, version: str) -> str:
    """What to say if ``version`` is installed."""
    mismatch = f"{series.package} {version} is installed, {series.name} is for {series.pins['Version']}"
    for name, other in others(series).items():
        if line(other) == line(version):
            return f"{mismatch}: leave out the name, or name {name}"
    return f"{mismatch}, and no patches are for {version}: {_install(series)}, or name a source tree with --tree"


def _install(series: Series) -> str:
    """The advice to install the pinned release; a name of other patches would then be in the way."""
    requirement = to_install(series)
    how = " (pip install --no-deps --ignore-requires-python)" if sys.version_info < (3, 12) else ""  # it has no wheel
    fits = is_for(series, requirement.partition("==")[2])
    return f"install {requirement}{how}" + ("" if fits else f" and leave out the name {series.name}")


def reinstall(package: str, version: str) -> str:
    """The command that brings back the files of an installed package."""
    python = "" if sys.version_info >= (3, 12) else " --ignore-requires-python"  # its source builds
    return f"pip install --no-deps --force-reinstall{python} {package}=={version}"


@contextlib.contextmanager
def locked_tree(root: Path) -> Iterator[None]:
    """Hold the tree alone, waiting for another process. The lock dies with its holder; its file goes with it."""
    path = root / LOCK
    while True:
        # A separate file, open for writing: network file systems do not lock folders.
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(handle, fcntl.LOCK_EX)
        # The previous holder may have removed the file between opening and locking.
        if path.exists() and path.stat().st_ino == os.fstat(handle).st_ino:
            break
        os.close(handle)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)
