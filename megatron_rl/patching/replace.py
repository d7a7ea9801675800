"""Change files of a tree, all or none of them."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from pathlib import Path

from megatron_rl.patching.series import Files

TEMPORARY_PREFIX = ".patches-new-"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def replace_files(root: Path, old: Files, new: Files) -> list[str]:
    """Turn `old` into `new`; the paths that changed.

    A folder beside the old one gets the new files, and links to all others; then the two change places in one step.
    Whenever the process is killed, the tree has all changes or none. Where the file system cannot exchange folders,
    files are replaced one by one: a process killed in between leaves each file old or new, and the next `apply` or
    `revert` finishes the job.

    A file of another top folder (pip's list of files) is replaced first.
    """
    changed = [path for path in sorted(old) if old[path] != new[path]]
    _remove_leftovers(root, old)
    try:
        for top in sorted({path.split("/")[0] for path in changed}, key=lambda top: not top.endswith(".dist-info")):
            paths = [path for path in changed if path.split("/")[0] == top]
            folder = Path(os.path.commonpath([os.path.dirname(path) for path in paths]))
            if len(paths) == 1 or not _exchange(root, folder, {path: new[path] for path in paths}):
                _replace_one_by_one(root, {path: old[path] for path in paths}, new)
    finally:
        _remove_leftovers(root, old)
    for path in changed:
        _drop_bytecode(root / path)
    return changed


def _exchange(root: Path, folder: Path, new: Files) -> bool:
    """Put a copy of ``folder`` with the files ``new`` in its place; False: the file system cannot."""
    place = root / folder
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None or not place.is_dir() or place.is_symlink():
        return False
    copy = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=place.parent))
    try:
        byte_code = {(root / path).parent / "__pycache__" / Path(path).stem for path in new}
        _link(place, copy, {root / path for path in new}, byte_code)
        for path, content in new.items():
            if content is not None:
                target = copy / Path(path).relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                _put(target, _write_beside(target, content, (root / path)))
        return rename(_AT_FDCWD, os.fsencode(copy), _AT_FDCWD, os.fsencode(place), _RENAME_EXCHANGE) == 0
    except OSError:  # a device, a full disk: the tree is as it was
        return False
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _link(source: Path, copy: Path, but: set[Path], byte_code: set[Path]) -> None:
    """Fill the folder ``copy`` with links to what ``source`` holds."""
    shutil.copystat(source, copy)
    with os.scandir(source) as entries:
        for entry in entries:
            path = Path(entry.path)
            if entry.is_symlink():
                os.symlink(os.readlink(path), copy / entry.name)
            elif entry.is_dir():
                (copy / entry.name).mkdir()
                _link(path, copy / entry.name, but, byte_code)
            elif path not in but and path.parent / entry.name.split(".")[0] not in byte_code:
                os.link(path, copy / entry.name)


def _replace_one_by_one(root: Path, old: Files, new: Files) -> None:
    """Everything is written and synced before the first file changes; an error or Ctrl-C in between restores `old`."""
    temporaries = {}
    touched: list[str] = []
    try:
        for path in old:
            if (content := new[path]) is not None:
                temporaries[path] = _write_beside(root / path, content, root / path)
        for path in old:
            touched.append(path)
            _put(root / path, temporaries.get(path))
    except BaseException:
        for path in touched:
            content = old[path]
            _put(root / path, None if content is None else _write_beside(root / path, content, root / path))
        raise


def _write_beside(path: Path, content: bytes, model: Path) -> Path:
    """A synced file in the same folder (so that renaming is atomic) with the mode of ``model``, which it replaces."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=path.parent)
    with open(handle, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    # mkstemp makes files private; a new source file is as readable as its neighbours.
    os.chmod(name, model.stat().st_mode & 0o7777 if model.exists() else 0o644)
    return Path(name)


def _put(path: Path, temporary: Path | None) -> None:
    if temporary is None:
        path.unlink(missing_ok=True)
    else:
        # A rename, not a write: pip and uv may share one file between environments by hard links.
        os.replace(temporary, path)


def _remove_leftovers(root: Path, files: Files) -> None:
    """Remove temporary files and folders of this run, or of one that was killed."""
    for folder in {parent for path in files for parent in (root / path).parents if parent.is_relative_to(root)}:
        for leftover in folder.glob(TEMPORARY_PREFIX + "*"):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)


def _drop_bytecode(path: Path) -> None:
    """Byte code is matched by size and second of change: too coarse for a file just replaced."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)
