"""Writes a run's checkpoints, at once or while training goes on, and finds the one that ``--resume`` continues from.

`Evidence` keeps what explains an alarm later (`recorder.evidence`): the batches before it, and a checkpoint from before
its onset.

A rule goes off some steps after what it tells of began. So the batches of the newest steps are on disk in every step,
and at the first alarm they stay, together with the newest checkpoint from before the rule's condition began to hold.
One alarm of a run gets this, or two where no checkpoint was there yet at the first: disk is bounded, and what goes off
later is often a consequence.

A file of its own counts how often a run went back (alarm action `rollback`): it outlives the steps that were undone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint import manifest
from megatron_rl.checkpoint.hf_folder import Sampling
from megatron_rl.checkpoint.manifest import checkpoint_name
from megatron_rl.checkpoint.save import PendingSave, SaveError, damage
from megatron_rl.config.monitor import RISKS
from megatron_rl.config.sections import CheckpointConfig, RecorderConfig
from megatron_rl.config.yaml12 import parse
from megatron_rl.errors import InputError
from megatron_rl.learner.learner import Learner
from megatron_rl.monitor import AlarmEvent, RunDirectory
from megatron_rl.monitor.alarms import BUILT_IN
from megatron_rl.process.host import write_whole
from megatron_rl.process.ranks import any_rank, broadcast_object, on_main_rank, world_rank
from megatron_rl.process.run_files import read_json
from megatron_rl.run.recorded_batches import batch_bytes, delete_batch, keep_batch, recorded_steps

EXIT_WAIT_S = 60.0  # for a thread that still writes when the run ends by an error


class Saving:
    """The saves of one run. All ranks call the same methods in the same order.

    ``folder``: of the checkpoints. ``say``: writes to the run's log.
    """

    def __init__(self, config: CheckpointConfig, folder: Path, learner: Learner, say: Callable[..., None]):
        self.owed = False  # the last save failed
        self.written: Path | None = None  # the newest checkpoint that this process published
        self.pinned: int | None = None  # step of a checkpoint that stays, whatever its age; on rank 0
        self._config, self._folder, self._learner, self._say = config, folder, learner, say
        self._pending: PendingSave | None = None

    def write(self, state: dict[str, Any]) -> Path:
        """Write a checkpoint of the learner's step and wait for it. ``state``: of the loop. Raises `SaveError` on every
        rank."""
        self.settle(wait=True)
        return self._published(self._begin(state, in_background=False))

    def begin(self, state: dict[str, Any]) -> None:
        """As `write`, but returns once the state is copied; `settle` publishes it. Waits for the save before it."""
        self.settle(wait=True)
        self._pending = self._begin(state, in_background=True)

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
        """Wait at the process's end for this rank's thread, which may still write after an error."""
        if self._pending is not None:
            self._pending.wait(EXIT_WAIT_S)

    def _begin(self, state: dict[str, Any], in_background: bool) -> PendingSave:
        protected = [] if self.pinned is None else [self.pinned]
        return self._learner.begin_save(self._folder, state, self._config.keep_last, protected, in_background)

    def _published(self, save: PendingSave) -> Path:
        path = save.finish()
        self.owed, self.written = False, path
        self._say(f"checkpoint: {path}")
        return path


def newest_checkpoint(path: Path) -> Path:
    """Return the newest complete checkpoint of a run directory; any other folder is returned as it is."""
    folder = RunDirectory(path).checkpoints
    if not folder.is_dir():
        return path
    if not (checkpoints := manifest.list_checkpoints(folder)):
        raise InputError(f"{path}: a run directory without a complete checkpoint in {folder.name}/")
    return checkpoints[-1]


def newest_before(folder: Path, step: int) -> Path | None:
    """The newest checkpoint of a step before ``step`` whose files are whole. Collective."""
    for path in reversed(broadcast_object(manifest.list_checkpoints(folder))):
        if manifest.checkpoint_step(path) < step and damage(path) is None:
            return path
    return None


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
        return path, notes + on_main_rank(lambda: abandon_newer(directory, path))
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


def abandon_newer(directory: RunDirectory, path: Path) -> list[str]:
    """Set newer checkpoints aside. After a return to ``path`` they belong to another history, which ``auto`` must not
    take up."""
    if path.resolve().parent != directory.checkpoints.resolve():
        return []
    newer = [later for later in manifest.all_checkpoints(directory.checkpoints) if later.name > path.name]
    return [
        f"checkpoint {later.name} is newer than {path.name}: set aside as {manifest.set_aside(later, 'abandoned').name}"
        for later in newer
    ]


GIB = 1 << 30
# One failed reward is no sign of an unstable run; a risk is none yet.
UNRELATED = RISKS | {rule.name for rule in BUILT_IN}


class Evidence:
    """The evidence of one run, which rank 0 keeps.

    ``batches``: the folder of the batches. ``saving``: of the checkpoints. ``say``: writes to the run's log.
    """

    def __init__(self, config: RecorderConfig, batches: Path, saving: Saving, say: Callable[..., None]):
        self.alarm: int | None = None  # step of the alarm whose evidence is kept
        self._config, self._batches, self._saving, self._say = config, batches, saving, say
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
        except (OSError, InputError) as error:
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
        newest = steps[-certain:]
        more = [] if evidence is None else steps[-evidence.batches : -certain]
        total = sum(batch_bytes(self._batches, recorded) for recorded in newest) if more else 0
        for recorded in reversed(more):
            total += batch_bytes(self._batches, recorded)
            if total > evidence.max_gib * GIB:
                break
            newest.insert(0, recorded)
        for recorded in sorted({*steps} - {*newest} - self._kept):
            try:
                is_gone = delete_batch(self._batches, recorded)
            except InputError as error:  # it is said once, and stays
                self._say(f"{error}; it stays")
                is_gone = False
            if not is_gone:
                self._kept.add(recorded)
        return newest

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


class Rollbacks:
    """The rollbacks of one run, at most ``most``. ``file``: rollbacks.json in the run directory. Collective."""

    def __init__(self, file: Path, most: int) -> None:
        self._file, self.most = file, most
        self._events: list[dict[str, Any]] = on_main_rank(self._read)
        self.count = len(self._events)  # and those of the run whose checkpoint this one began from

    @property
    def is_spent(self) -> bool:
        return self.count >= self.most

    def add(self, alarms: list[str], at: int, to: int) -> None:
        """Note that the run goes back from the end of step ``at`` to the checkpoint of step ``to``."""
        self.count += 1
        self._events.append({"alarms": alarms, "at": at, "to": to, "time": round(time.time(), 3)})
        on_main_rank(self._write)

    def halvings_due(self, before: int) -> int:
        """How often the rate of a checkpoint is still to be halved that was written after ``before`` rollbacks."""
        self.count = max(self.count, before)
        return self.count - before

    def _read(self) -> list[dict[str, Any]]:
        try:
            return read_json(self._file, [{}]) if self._file.is_file() else []
        except InputError as error:
            raise InputError(f"{self._file}: not the list of rollbacks of a run ({error})") from error

    def _write(self) -> None:
        write_whole(self._file, json.dumps(self._events, indent=2) + "\n")


def run_of_checkpoint(checkpoint: Path) -> RunDirectory | None:
    """The run that wrote ``checkpoint``, a folder step_…; None where it lies elsewhere."""
    directory = RunDirectory(checkpoint.parent.parent)
    return directory if checkpoint.parent == directory.checkpoints and directory.recipe.is_file() else None


def sampling_of(directory: RunDirectory) -> Sampling:
    """How the run ``directory`` made prompts and ended responses. Raises `InputError` where its template is gone."""
    recipe = parse(directory.recipe.read_text(encoding="utf-8"))[0]
    prompt = {"chat_template": "auto", **recipe["data"].get("prompt", {})}
    sampling = Sampling.of(prompt["chat_template"], recipe["rollout"].get("stop_token_ids"))
    if sampling.chat_template is not None and not sampling.chat_template.is_file():
        raise InputError(
            f"{directory.recipe}: data.prompt.chat_template: {sampling.chat_template} is gone, and the model would be "
            "served with other prompts than it was trained on; put the template back there"
        )
    return sampling
