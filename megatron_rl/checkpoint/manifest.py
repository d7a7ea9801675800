"""Which checkpoints of a folder are whole: their names, their manifest of sizes and hashes, and what is kept.

A checkpoint is published by renaming: it is written as ``.partial-step_00000050``, its manifest last, and gets its name
when it is whole. Every step of publishing and deleting leaves a state that `recover` completes after a kill.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from megatron_rl.process.host import write_whole

TRAINER_FILE, MANIFEST_FILE = "trainer.json", "manifest.json"
FORMAT_VERSION = 1
_PARTIAL, _OLD, _DELETING = ".partial-", ".old-", ".deleting-"


def checkpoint_name(step: int) -> str:
    return f"step_{step:08d}"


def checkpoint_step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def partial_path(final: Path) -> Path:
    """Return the path of a checkpoint being written."""
    return final.with_name(_PARTIAL + final.name)


def all_checkpoints(folder: Path) -> list[Path]:
    """Everything that is named like a checkpoint, whole or not, oldest first."""
    return sorted(path for path in Path(folder).glob("step_*") if path.name.removeprefix("step_").isdigit())


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints (every file there, with its size), oldest first. Reads no contents."""
    return [path for path in all_checkpoints(folder) if incomplete(path) is None]


def newest_checkpoint(folder: Path, at_most: int) -> Path | None:
    """The newest complete checkpoint of a step up to ``at_most``; None where there is none."""
    early = [path for path in list_checkpoints(folder) if checkpoint_step(path) <= at_most]
    return early[-1] if early else None


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, int | str]]:
    """Name → size in bytes and SHA-256 of files of a checkpoint."""
    files: dict[str, dict[str, int | str]] = {}
    for name in names:
        with (folder / name).open("rb") as file:
            files[name] = {
                "size": os.fstat(file.fileno()).st_size,
                "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
            }
    return files


def write_manifest(folder: Path, files: dict[str, dict[str, int | str]]) -> None:
    """Write the last file of a checkpoint. A checkpoint that has it is whole."""
    text = json.dumps({"format_version": FORMAT_VERSION, "files": dict(sorted(files.items()))}, indent=1)
    write_whole(folder / MANIFEST_FILE, text, durable=True)


def read_manifest(path: Path, marker: str = TRAINER_FILE) -> dict[str, dict[str, int | str]]:
    """Name → size and hash. ValueError where the manifest is damaged, of a format that this version does not read, or
    does not list ``marker``; OSError where it is not there."""
    try:
        manifest = json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8"))
        version, files = manifest["format_version"], manifest["files"]
        valid = all(Path(name).name == name and {"size", "sha256"} <= about.keys() for name, about in files.items())
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST_FILE} cannot be read ({type(error).__name__})") from error
    if type(version) is not int or version != FORMAT_VERSION:  # true is no 1
        raise ValueError(f"{MANIFEST_FILE} has format_version {version!r}, this version reads {FORMAT_VERSION}")
    if not valid or marker not in files:
        raise ValueError(f"{MANIFEST_FILE} is not one")
    return files


def incomplete(path: Path, marker: str = TRAINER_FILE) -> str | None:
    """Why ``path`` is no complete checkpoint, judging by names and sizes alone; None where it is one.

    ``marker``: the file that its kind must have, `TRAINER_FILE` where a run wrote it.
    """
    try:
        files = read_manifest(path, marker)
    except ValueError as error:
        return str(error)
    except OSError:
        return f"no {MANIFEST_FILE}"
    for name, about in files.items():
        try:
            size = (path / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if size != about["size"]:
            return f"{name} has {size} of {about['size']} bytes"
    return None


def altered_files(path: Path, part: int = 0, parts: int = 1, marker: str = TRAINER_FILE) -> list[str]:
    """Files whose contents are not what was written. ``part`` of ``parts``: look only at this share of them."""
    files = read_manifest(path, marker)
    names = sorted(files, key=lambda name: (-int(files[name]["size"]), name))[part::parts]
    try:
        hashes = hash_files(path, names)
    except OSError as error:
        return [f"{Path(error.filename or '').name} cannot be read ({error.strerror})"]
    return [f"{name} has another SHA-256" for name in names if hashes[name]["sha256"] != files[name]["sha256"]]


def publish(partial: Path, final: Path) -> None:
    """Give a whole checkpoint its name. An existing checkpoint of that step is removed once this one is in place."""
    old = final.with_name(_OLD + final.name)
    _sync_folder(partial)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    _sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def delete(path: Path) -> None:
    """Remove a checkpoint. A kill in the middle leaves nothing that looks like a checkpoint."""
    doomed = path.with_name(_DELETING + path.name)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def recover(folder: Path) -> list[str]:
    """Finish what a killed process left half done, and return what was done. Only for the holder of the run's lock."""
    saved = []
    for prefix in (_PARTIAL, _OLD):
        for path in sorted(Path(folder).glob(f"{prefix}step_*")):
            final = path.with_name(path.name.removeprefix(prefix))
            if not final.exists() and incomplete(path) is None:
                path.rename(final)
                saved.append(f"{final.name} was complete but not yet in place; it is now")
            else:
                shutil.rmtree(path, ignore_errors=True)
    for path in Path(folder).glob(f"{_DELETING}step_*"):
        shutil.rmtree(path, ignore_errors=True)
    return saved


def set_aside(path: Path, why: str) -> Path:
    """Rename a checkpoint so that it no longer counts. Nothing is deleted. Returns the new path."""
    target, number = path.with_name(f"{why}_{path.name}"), 1
    while target.exists():
        number += 1
        target = path.with_name(f"{why}_{path.name}_{number}")
    path.rename(target)
    return target


def prune(folder: Path, keep_last: int, protected: Collection[int] = ()) -> None:
    """Delete all complete checkpoints but the newest ``keep_last`` (0: keep all) and those of ``protected`` steps."""
    if keep_last > 0:
        for path in list_checkpoints(folder)[:-keep_last]:
            if checkpoint_step(path) not in protected:
                delete(path)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
