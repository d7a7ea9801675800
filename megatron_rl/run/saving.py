"""How a run writes its checkpoints: at once, or while training goes on; one save at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.save import PendingSave, SaveError
from megatron_rl.config.sections import CheckpointConfig
from megatron_rl.learner.learner import Learner
from megatron_rl.process.ranks import any_rank

EXIT_WAIT_S = 60.0  # for a thread that still writes when the run ends by an error


class Saving:
    """The saves of one run. All ranks call the same methods in the same order.

    ``folder``: of the checkpoints. ``say``: writes to the run's log.
    """

    def __init__(self, config: CheckpointConfig, folder: Path, learner: Learner, say: Callable[..., None]):
        self.owed = False  # the last save failed
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
        return self._learner.begin_save(self._folder, state, self._config.keep_last, protected, in_background)

    def _published(self, save: PendingSave) -> Path:
        path = save.finish()
        self.owed = False
        self._say(f"checkpoint: {path}")
        return path
