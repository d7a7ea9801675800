"""What explains an alarm later (`recorder.evidence`): the batches before it, and a checkpoint from before its onset.

A rule goes off some steps after what it tells of began. So the batches of the newest steps are on disk in every step,
and at the first alarm they stay, together with the newest checkpoint from before the rule's condition began to hold.
One alarm of a run gets this, or two where no checkpoint was there yet at the first: disk is bounded, and what goes off
later is often a consequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.manifest import checkpoint_name
from megatron_rl.config.sections import RecorderConfig
from megatron_rl.monitor import AlarmEvent
from megatron_rl.monitor.alarms import BUILT_IN
from megatron_rl.process.ranks import world_rank
from megatron_rl.run.recorded_batches import batch_bytes, delete_batch, keep_batch, recorded_steps
from megatron_rl.run.saving import Saving

GIB = 1 << 30
UNRELATED = frozenset(rule.name for rule in BUILT_IN)  # one failed reward is no sign of an unstable run


class Evidence:
    """The evidence of one run, which rank 0 keeps.

    ``batches``: the folder of the batches. ``saving``: of the checkpoints. ``say``: writes to the run's log.
    """

    def __init__(self, config: RecorderConfig, batches: Path, saving: Saving, say: Callable[..., None]):
        self.alarm: int | None = None  # step of the alarm whose evidence is kept
        self._config, self._batches, self._saving, self._say = config, batches, saving, say
        self._sizes: dict[int, int] = {}  # step → bytes of its batch
        self._kept: set[int] = set()  # steps whose batches were found to be kept

    def after_step(self, step: int, events: Sequence[AlarmEvent]) -> None:
        """Delete batches that became too old at ``step``; see that what explains the first alarm stays.

        The batch of ``step`` is on disk, and none of its checkpoints is deleted yet. A full disk does not end the run.
        """
        if world_rank() != 0:
            return
        try:
            newest = self._delete_older(step)
            alarms = [event for event in events if event.name not in UNRELATED]
            if alarms and self._config.evidence is not None:
                self._keep(step, alarms, newest)
        except OSError as error:
            self._say(f"recorder.evidence: step {step}: {error}", style="bold red")

    def state_dict(self) -> dict[str, Any]:
        """JSON values. That of rank 0 counts."""
        return {"alarm": self.alarm, "checkpoint": self._saving.pinned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`; {} where an earlier version wrote the checkpoint."""
        if self._config.evidence is not None:
            self.alarm, self._saving.pinned = state.get("alarm"), state.get("checkpoint")

    def _delete_older(self, step: int) -> list[int]:
        """Delete what is older than the newest batches up to ``step``, and return the steps of these."""
        config, evidence = self._config, self._config.evidence
        # Later steps are of an attempt that was killed. This attempt comes to them and replaces them.
        steps = [recorded for recorded in recorded_steps(self._batches) if recorded <= step]
        if not config.is_every_step:
            return []
        if config.record_batches == "all":
            return steps
        certain = config.keep if config.record_batches == "last_n" else 1
        most = max(certain, evidence.batches if evidence is not None else 0)
        newest: list[int] = []
        total = 0
        for recorded in reversed(steps[-most:]):
            total += self._size(recorded, is_new=recorded == step)
            if len(newest) >= certain and total > evidence.max_gib * GIB:
                break
            newest.insert(0, recorded)
        for recorded in sorted({*steps} - {*newest} - self._kept):
            if delete_batch(self._batches, recorded):
                self._sizes.pop(recorded, None)
            else:
                self._kept.add(recorded)
        return newest

    def _size(self, step: int, is_new: bool) -> int:
        if is_new or step not in self._sizes:
            self._sizes[step] = batch_bytes(self._batches, step)
        return self._sizes[step]

    def _keep(self, step: int, alarms: Sequence[AlarmEvent], batches: Sequence[int]) -> None:
        """Keep ``batches`` and a checkpoint for ``alarms`` of ``step``, unless an earlier alarm has both."""
        onset = min(event.onset for event in alarms)
        checkpoint = self._saving.pin(onset)
        if checkpoint is None and self.alarm is not None:
            return
        self.alarm = step
        for recorded in batches:
            keep_batch(self._batches, recorded)
        self._say(f"evidence of {', '.join(event.name for event in alarms)}: {_said(batches, checkpoint, onset)}")


def _said(batches: Sequence[int], checkpoint: int | None, onset: int) -> str:
    """What is kept, in words."""
    stored = f"batches of steps {batches[0]} to {batches[-1]} stay; " if batches else ""
    if checkpoint is None:
        return f"{stored}no checkpoint is there, so the weights before step {onset} are those of the start"
    age = "the newest" if checkpoint < onset else "the oldest there is, none is"
    return f"{stored}{checkpoint_name(checkpoint)} stays, {age} from before step {onset}"
