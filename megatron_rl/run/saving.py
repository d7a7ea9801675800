"""Writes a run's checkpoints, at once or while training goes on, and finds the one that ``--resume`` continues from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint import manifest
from megatron_rl.checkpoint.load import damage
from megatron_rl.checkpoint.save import PendingSave, SaveError
from megatron_rl.config.sections import CheckpointConfig
from megatron_rl.errors import InputError
from megatron_rl.learner.learner import Learner
from megatron_rl.monitor import RunDirectory
from megatron_rl.process.ranks import any_rank, broadcast_object, on_main_rank

EXIT_WAIT_S = 60.0  # for a thread that still writes when the run ends by an error


class Saving:
    """The saves of one run. All ranks call the same methods in the same order.

    ``folder``: of the checkpoints. ``say``: writes to the run's log.
    """

    def __init__(self, config: CheckpointConfig, folder: Path, learner: Learner, say: Callable[..., None]):
        self.owed = False  # the last save failed
        self.pinned: int | None = None  # step of a checkpoint that stays, whatever its age; on rank 0
        self._config, self._folder, self._learner, self._say = config, folder, learner, say
        self._pending: PendingSave | None = None

    def write(self, state: dict[str, Any], protected: list[int]) -> Path:
        """Write a checkpoint of the learner's step and wait for it. ``state``: of the loop. ``protected``: steps whose
        checkpoints stay. Raises `SaveError` on every rank."""
        self.settle(wait=True)
        return self._published(self._begin(state, protected, in_background=False))

    def begin(self, state: dict[str, Any], protected: list[int]) -> None:
        """As `write`, but returns once the state is copied; `settle` publishes it. Waits for the save before it."""
        self.settle(wait=True)
        self._pending = self._begin(state, protected, in_background=True)

    def pin(self, before: int) -> int | None:
        """See that a checkpoint stays: the newest of a step before ``before``, else the oldest. For rank 0.

        Returns its step; None where there is none, or where an earlier call's is still there.
        """
        steps = [manifest.checkpoint_step(path) for path in manifest.list_checkpoints(self._folder)]
        if self._pending is not None:
            steps.append(manifest.checkpoint_step(self._pending.path))
        if self.pinned in steps:
            return None
        earlier = [step for step in steps if step < before]
        self.pinned = max(earlier) if earlier else min(steps, default=None)
        if self._pending is not None and self.pinned is not None:
            self._pending.protected.add(self.pinned)
        return self.pinned

    def settle(self, wait: bool = False) -> Path | None:
        """Publish the save under way once every rank has written its share, and return its path. A failure is said, and
        the save is owed. ``wait``: for the ranks that still write."""
        if self._pending is None or not (wait or not any_rank(not self._pending.is_done())):
            return None
        pending, self._pending = self._pending, None
        try:
            return self._published(pending)
        except SaveError as error:
            self.failed(error)
            return None

    def failed(self, error: SaveError) -> None:
        self.owed = True
        self._say(f"{error}; the run goes on and tries again after the next step", style="bold red")

    def leave(self) -> None:
        """At the end of the process: wait for this rank's thread, which may still write where an error ends the run."""
        if self._pending is not None:
            self._pending.wait(EXIT_WAIT_S)

    def _begin(self, state: dict[str, Any], protected: list[int], in_background: bool) -> PendingSave:
        if self.pinned is not None:
            protected = [*protected, self.pinned]
        return self._learner.begin_save(self._folder, state, self._config.keep_last, protected, in_background)

    def _published(self, save: PendingSave) -> Path:
        path = save.finish()
        self.owed = False
        self._say(f"checkpoint: {path}")
        return path


_REMEDY = "restore it, or start again under another name (--set name=…)"


def check_resume(directory: RunDirectory, resume: str) -> None:
    """Refuse what ``--resume`` (``auto``, ``never`` or a folder) says, as far as names and sizes show; quick.

    Also a run directory in which something else has the name of a file or folder of a run.
    """
    directory.check()
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
        near = [path.name for path in manifest.list_checkpoints(directory.checkpoints)]
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
    newer = [later for later in manifest.all_checkpoints(directory.checkpoints) if later.name > path.name]
    return [
        f"checkpoint {later.name} is newer than {path.name}: set aside as {manifest.set_aside(later, 'abandoned').name}"
        for later in newer
    ]
