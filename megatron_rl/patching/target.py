"""The tree that a series is applied to: find it, lock it."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib.metadata
import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from megatron_rl.patching import releases
from megatron_rl.patching.series import Files, PatchError, Series

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
        commit, version = releases.commit_of(self.root), releases.version_of(self.root)
        kind = f"git checkout, commit {commit}" if commit else "unpacked tree"
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


def find(series: Series, tree: str | None, allow_global: bool) -> Target:
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
            f"{root}: {package} is installed, but there is no {top}/ beside it: {_elsewhere(distribution)}"
        )
    if not releases.is_for(series, distribution.version):
        raise PatchError(_other_version(series, distribution.version))
    records = [str(file) for file in distribution.files or [] if file.name == "RECORD"]
    return Target(root, distribution.version, records[0] if records else None)


def _other_version(series: Series, version: str) -> str:
    """What to say if ``version`` is installed."""
    mismatch = f"{series.package} {version} is installed, {series.name} is for {series.pins['Version']}"
    others = releases.others(series)
    for name, other in others.items():
        if releases.line(other) == releases.line(version):
            return f"{mismatch}: leave out the name, or name {name}"
    return f"{mismatch}, and no patches are for {version}: {_install(series)}, or name a source tree with --tree"


def _install(series: Series) -> str:
    """The advice to install the release of this Python; a name of other patches would then be in the way."""
    requirement = releases.to_install(series)
    fits = releases.is_for(series, requirement.partition("==")[2])
    return f"install {requirement}" + ("" if fits else f" and leave out the name {series.name}")


def _elsewhere(distribution: importlib.metadata.Distribution) -> str:
    """What to do about a package whose files are not where it is registered."""
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        path = shlex.quote(unquote(urlsplit(origin["url"]).path))
        return f"it is an editable install, so name its source tree: --tree {path}"
    name, version = distribution.metadata["Name"], distribution.version
    return (
        f"reinstall it (pip install --no-deps --force-reinstall {name}=={version}), or name a source tree with --tree"
    )


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
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
