"""Where a run continues from: ``--resume``, and what is done with checkpoints that cannot be trusted."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.checkpoint import manifest
from megatron_rl.checkpoint.load import damage
from megatron_rl.errors import InputError
from megatron_rl.monitor import RunDirectory
from megatron_rl.process.ranks import broadcast_object, on_main_rank

_REMEDY = "restore it, or start again under another name (--set name=…)"


def check_resume(directory: RunDirectory, resume: str) -> None:
    """Refuse what ``--resume`` (``auto``, ``never`` or a folder) says, as far as names and sizes show; quick."""
    if resume == "auto":
        return
    if resume == "never":
        if directory.metrics.exists():
            raise InputError(
                f"--resume never: {directory.root} already holds a run; use --resume auto to continue it, another name "
                "(--set name=…) to keep both, or delete the folder"
            )
        return
    if problem := manifest.incomplete(Path(resume)):
        near = [found.name for found in manifest.list_checkpoints(directory.checkpoints)]
        raise InputError(
            f"--resume {resume}: not a complete checkpoint ({problem}); this run has {', '.join(near) or 'none'}"
        )


def find_checkpoint(directory: RunDirectory, resume: str) -> tuple[Path | None, list[str]]:
    """The checkpoint to continue from, every file verified, and what to say of the search.

    Collective; for the holder of the run's lock, because it tidies: half-finished saves are completed or removed,
    damaged checkpoints that newer ones rest on are set aside (renamed, never deleted). Raises `InputError` where the
    named checkpoint is damaged, or all there are.
    """
    notes = on_main_rank(lambda: manifest.recover(directory.checkpoints))
    if resume == "never":
        return None, notes
    if resume != "auto":
        path = Path(resume)
        if problem := damage(path):
            raise InputError(f"--resume {path}: damaged: {problem}; {_REMEDY}")
        return path, notes + on_main_rank(lambda: _abandon_newer(directory, path))
    damaged: list[tuple[Path, str]] = []
    for path in reversed(broadcast_object(manifest.all_checkpoints(directory.checkpoints))):
        if (problem := damage(path)) is None:
            return path, notes + on_main_rank(lambda path=path: _set_aside(damaged, path))
        damaged.append((path, problem))
    if damaged:
        newest, problem = damaged[0]
        raise InputError(
            f"{directory.checkpoints}: none of {len(damaged)} checkpoints is whole; {newest.name}: {problem}; {_REMEDY}"
        )
    return None, notes


def _set_aside(damaged: list[tuple[Path, str]], instead: Path) -> list[str]:
    return [
        f"checkpoint {path.name} is damaged ({problem}): set aside as {manifest.set_aside(path, 'damaged').name}; "
        f"falling back to {instead.name}"
        for path, problem in damaged
    ]


def _abandon_newer(directory: RunDirectory, path: Path) -> list[str]:
    """Set newer checkpoints aside. After a return to ``path`` they belong to another history, which ``auto`` must not
    take up."""
    if path.resolve().parent != directory.checkpoints.resolve():
        return []
    newer = [found for found in manifest.all_checkpoints(directory.checkpoints) if found.name > path.name]
    return [
        f"checkpoint {found.name} is newer than {path.name}: set aside as {manifest.set_aside(found, 'abandoned').name}"
        for found in newer
    ]
