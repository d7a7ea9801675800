"""The tree that a series is applied to: find it, lock it, change it all or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib.metadata
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.patching.errors import PatchError
from megatron_rl.patching.series import Files, Series

TEMPORARY_PREFIX = ".patches-"


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
        """How to call it in messages."""
        if self.version is not None:
            return f"installed package {self.version}"
        return "git checkout" if (self.root / ".git").exists() else "unpacked tree"

    def record(self, pristine: Files, patched: Files, revert: bool) -> tuple[Files, Files]:
        """The list of installed files, now and with (`revert`: without) those that patches create.

        Otherwise pip would leave them behind when it removes or reinstalls the package.
        """
        if self.record_path is None:
            return {}, {}
        old = (self.root / self.record_path).read_bytes()
        created = {path.encode() for path in pristine if pristine[path] is None and patched[path] is not None}
        lines = [line for line in old.splitlines(keepends=True) if line.split(b",")[0] not in created]
        new = b"".join(lines + ([] if revert else [path + b",,\n" for path in sorted(created)]))
        return {self.record_path: old}, {self.record_path: new}


def is_installed(series: Series) -> bool:
    """Whether the running interpreter has the version of the package that `series` is for."""
    try:
        return importlib.metadata.version(series.package) == series.pins["Version"]
    except importlib.metadata.PackageNotFoundError:
        return False


def find(series: Series, tree: str | None, allow_global: bool) -> Target:
    """The tree at `tree`, or the package installed for the running interpreter.

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
            f"{package} is not installed for {sys.executable}: install {series.pins['Package']} first, or name a "
            "source tree with --tree"
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
            f"{root}: {package} is installed, but there is no {top}/ beside it; is it an editable install?"
        )
    if distribution.version != series.pins["Version"]:
        raise PatchError(
            f"{package} {distribution.version} is installed, the series is for {series.pins['Version']}: "
            f"pip install {series.pins['Package']}"
        )
    records = [str(file) for file in distribution.files or [] if file.name == "RECORD"]
    return Target(root, distribution.version, records[0] if records else None)


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the tree alone, waiting for another process. The lock dies with its holder; its file goes with it."""
    path = root / f"{TEMPORARY_PREFIX}lock"
    while True:
        # A file of its own, open for writing: network file systems do not lock folders.
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(handle, fcntl.LOCK_EX)
        # The former holder may have removed the file between our opening and our locking it.
        if path.exists() and path.stat().st_ino == os.fstat(handle).st_ino:
            break
        os.close(handle)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def replace_files(root: Path, old: Files, new: Files) -> list[str]:
    """Turn `old` into `new`; the paths that changed. Everything is written and synced before the first file changes.

    An error or an interrupt (Ctrl-C) in between restores `old`. If the process is killed in between, each file is
    either old or new, never half of one, and the next `apply` or `revert` finishes the job.
    """
    changed = [path for path in sorted(old) if old[path] != new[path]]
    _remove_leftovers(root, old)
    temporaries = {}
    touched: list[str] = []
    try:
        for path in changed:
            if new[path] is not None:
                temporaries[path] = _write_beside(root / path, new[path])
        for path in changed:
            touched.append(path)
            _put(root / path, temporaries.get(path))
    except BaseException:
        for path in touched:
            _put(root / path, None if old[path] is None else _write_beside(root / path, old[path]))
        raise
    finally:
        _remove_leftovers(root, old)
    for path in changed:
        _drop_bytecode(root / path)
    return changed


def _write_beside(path: Path, content: bytes) -> Path:
    """A synced file in the same folder (so that renaming is atomic) with the mode of the one it will replace."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=path.parent)
    with open(handle, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    # mkstemp makes files private; a new source file is as readable as its neighbours.
    os.chmod(name, path.stat().st_mode & 0o7777 if path.exists() else 0o644)
    return Path(name)


def _put(path: Path, temporary: Path | None) -> None:
    if temporary is None:
        path.unlink(missing_ok=True)
    else:
        # A rename, not a write: pip and uv may share one file between environments by hard links.
        os.replace(temporary, path)


def _remove_leftovers(root: Path, files: Files) -> None:
    """Remove temporary files of this run, or of one that was killed."""
    for folder in {(root / path).parent for path in files} - {root}:
        for leftover in folder.glob(TEMPORARY_PREFIX + "*"):
            leftover.unlink(missing_ok=True)


def _drop_bytecode(path: Path) -> None:
    """Byte code is matched by size and second of change: too coarse for a file just replaced."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)
