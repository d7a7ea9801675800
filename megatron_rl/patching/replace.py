"""Files of a tree are replaced, each at once; its owner, its mode and links to it stay. Nothing else is touched."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from megatron_rl.patching.series import TEMPORARY_PREFIX, Files, PatchError, content_of


def replace_files(root: Path, old: Files, new: Files) -> list[str]:
    """Turn `old` into `new`; the paths that changed.

    Everything is written and synced before the first file changes. An error, Ctrl-C, or a file that another process
    has changed meanwhile restores `old`. A process that is killed leaves each file old or new.
    """
    # pip's list of files comes first: what it does not name, pip leaves behind.
    changed = sorted(
        (path for path in new if old[path] != new[path]), key=lambda path: (".dist-info/" not in path, path)
    )
    places = _places(root, changed)
    staged: dict[str, Path] = {}
    begun: list[str] = []
    try:
        for path in changed:
            if (content := new[path]) is not None:
                staged[path] = _stage(places[path], content)
        for path in changed:
            if content_of(places[path]) != old[path]:
                raise PatchError(f"{root / path}: another process has changed it meanwhile; nothing was changed")
            begun.append(path)
            _put(places[path], staged.get(path))
    except BaseException:
        for path in begun:
            content = old[path]
            if content_of(places[path]) == new[path]:
                _put(places[path], None if content is None else _stage(places[path], content))
        raise
    finally:
        remove_leftovers(root, changed)
    return changed


def remove_leftovers(root: Path, paths: Iterable[str]) -> None:
    """Remove what a command, killed or not, has written beside the files."""
    for path in paths:
        place = (root / path).resolve()
        place.with_name(TEMPORARY_PREFIX + place.name).unlink(missing_ok=True)


def _places(root: Path, paths: list[str]) -> dict[str, Path]:
    """Where the files stand. A link within the tree leads to its target; others may own what is outside of the tree."""
    places = {path: (root / path).resolve() for path in paths}
    for path, place in places.items():
        if not place.is_relative_to(root.resolve()):
            raise PatchError(
                f"{root / path}: a symbolic link leads to {place}, outside of the tree; nothing was changed. "
                "Put a copy in place of the link, and try again"
            )
    if len(set(places.values())) != len(places):
        twice = sorted(path for path, place in places.items() if list(places.values()).count(place) > 1)
        raise PatchError(f"{root}: {', '.join(twice)} are one file, by links; nothing was changed")
    return places


def _stage(place: Path, content: bytes) -> Path:
    """A synced file beside ``place`` with the owner and mode of what it replaces, or of its folder's owner."""
    staged = place.with_name(TEMPORARY_PREFIX + place.name)
    staged.unlink(missing_ok=True)
    model = os.stat(place if place.exists() else place.parent)
    with open(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
        stream.write(content)
        own = os.fstat(stream.fileno())
        if (own.st_uid, own.st_gid) != (model.st_uid, model.st_gid) and (place.exists() or os.geteuid() == 0):
            try:
                os.fchown(stream.fileno(), model.st_uid, model.st_gid)
            except PermissionError:
                owner = f"user {model.st_uid} and group {model.st_gid}"
                raise PatchError(f"{place}: is of {owner}; nothing was changed. Run this as that user") from None
        os.fchmod(stream.fileno(), stat.S_IMODE(model.st_mode) if place.exists() else 0o644)
        stream.flush()
        os.fsync(stream.fileno())
    return staged


def _put(place: Path, staged: Path | None) -> None:
    if staged is None:
        place.unlink(missing_ok=True)
    else:
        # A rename, not a write: pip and uv may share one file between environments by hard links.
        os.replace(staged, place)
    # Byte code is matched by size and second of change: too coarse for a file just replaced.
    for compiled in (place.parent / "__pycache__").glob(f"{place.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)
