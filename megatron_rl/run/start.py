"""Putting a run together: the parts of the loop, where they continue from, and how they end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.checkpoint.manifest import TRAINER_FILE, checkpoint_name, checkpoint_step
from megatron_rl.checkpoint.save import SaveError
from megatron_rl.config import Recipe
from megatron_rl.config.model_rules import confirm_contract, contract, first_step_alarms
from megatron_rl.config.monitor import level_rules
from megatron_rl.data import MixedSampler, PromptSampler, PromptSet, in_another_order, make_sampler
from megatron_rl.errors import Fault
from megatron_rl.exact.generator import ExactGenerator
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.process_groups import initialize, shutdown
from megatron_rl.monitor import AlarmEvent, Monitor, RunDirectory, write_environment
from megatron_rl.monitor.monitor import PhaseTimer
from megatron_rl.monitor.samples import share_repetition, share_samples
from megatron_rl.patching.states import installed_status
from megatron_rl.process.ranks import (
    broadcast_object,
    on_main_rank,
    world_rank,
)
from megatron_rl.process.run_files import settled
from megatron_rl.rewards import Rewarder
from megatron_rl.rewards.rewarder import Scores, refuse_too_many, score_shared
from megatron_rl.rollout import Generator
from megatron_rl.rollout.generator import AnnouncingGenerator, RolloutInterrupted
from megatron_rl.run.control import RunLock, StopRequest
from megatron_rl.run.engines import load_beside, make_learner, start_generator, start_teachers
from megatron_rl.run.identity import (
    Comparison,
    begin_step,
    compare,
    compare_origin,
    contents,
    is_complete,
    keep_recipe,
    refuse,
)
from megatron_rl.run.lookahead import Lookahead
from megatron_rl.run.prepare import Prepared, prepare
from megatron_rl.run.saving import (
    Evidence,
    Rollbacks,
    Saving,
    abandon_newer,
    check_resume,
    find_checkpoint,
    newest_before,
)
from megatron_rl.shipped import shipped
from megatron_rl.types import Group

if TYPE_CHECKING:
    from megatron_rl.rollout.scoring import Teachers


@dataclass
class Run:
    """Everything that the loop uses, ready to go. `start` makes one."""

    recipe: Recipe
    directory: RunDirectory
    learner: Learner
    generator: Generator
    rewarder: Rewarder
    prompts: PromptSampler | MixedSampler
    ahead: Lookahead
    validation: PromptSet
    monitor: Monitor
    stop: StopRequest
    saving: Saving
    evidence: Evidence
    rollbacks: Rollbacks
    train: PromptSet  # all prompts that ``prompts`` draws from
    teachers: Teachers | None = None  # those with engines of their own
    failures_said: set[tuple[str, str, str]] = field(default_factory=set)  # kinds of reward failures in the log

    def record(self, step: int, metrics: dict[str, float], groups: list[Group] | None = None) -> list[AlarmEvent]:
        """`Monitor.record`, with what the ranks know of ``groups``. Collective."""
        ratios = {}
        if groups:
            share_repetition(groups)
            ratios = share_samples(groups, self.monitor.samples_wanted(step, groups))
        return self.monitor.record(step, metrics, groups, ratios)

    def score(self, groups: list[Group], step: int) -> dict[str, float]:
        """Reward every rollout, on all ranks; `reward/*`. The log gets an example of each kind of failure, once.

        Raises `RewardFault` where more failed than `reward.max_error_frac` allows.
        """
        scores = self.reward(groups, step)
        self.refuse_failures(scores, step)
        return scores.metrics

    def reward(self, groups: list[Group], step: int) -> Scores:
        """`score` for a part of a step: whether too many failed is known when all of it is there."""
        with self.monitor.phase("reward"):
            scores = score_shared(self.rewarder, groups)
        for failure in scores.failures:
            if failure.key not in self.failures_said:
                self.failures_said.add(failure.key)
                self.monitor.log(f"step {step}: {failure.text}", style="bold red")
        return scores

    def refuse_failures(self, scores: Scores, step: int) -> None:
        """Raise `RewardFault` where more of ``scores`` failed than `reward.max_error_frac` or `on_error` allows."""
        reward = self.recipe.reward
        limit = reward.max_error_frac.later if step else reward.max_error_frac.first
        limit = 0.0 if reward.on_error == "end" else limit
        refuse_too_many(scores.num_failed, scores.num_scored, limit, scores.failures)

    def save(self, taken: dict[str, Any] | None = None) -> Path:
        """Write a checkpoint that continues the run exactly. Then delete those kept by neither `keep_last` nor
        `evidence`. A save under way is waited for. Nothing is written where the step has its checkpoint already.

        Raises `SaveError` on every rank where one could not write; the older checkpoints are as they were.
        """
        self.saving.settle(wait=True)
        done = self.saving.written
        if done is not None and checkpoint_step(done) == self.learner.step:
            return done
        return self.saving.write(self._to_save(taken))

    def try_save(self, taken: dict[str, Any] | None = None, in_background: bool = False) -> None:
        """`save`. A failure (disk full) is logged; the run goes on, and the next step tries again.

        ``in_background``: return once the state is copied; `Saving.settle` publishes it.
        """
        try:
            if in_background:
                self.saving.settle(wait=True)
                self.saving.begin(self._to_save(taken))
            else:
                self.save(taken)
        except SaveError as error:
            self.saving.failed(error)

    def _to_save(self, taken: dict[str, Any] | None) -> dict[str, Any]:
        """The loop's state, from the main rank."""
        state = (taken or self.taken()) | {"monitor": self.monitor.state_dict()}
        return broadcast_object(state | {"evidence": self.evidence.state_dict(), "rollbacks": self.rollbacks.count})

    def taken(self) -> dict[str, Any]:
        """How far prompts were taken, and for which steps to come."""
        taken = {"prompts": self.prompts.state_dict(), "ahead": self.ahead.state_dict()}
        return taken | ({"exact": self.generator.state_dict()} if isinstance(self.generator, ExactGenerator) else {})

    def roll_back(self, events: list[AlarmEvent]) -> bool:
        """Undo the steps since the newest checkpoint from before the onset of ``events``, and halve the rate.

        Return whether it was done: there may be no such checkpoint. Everything that a resume would restore is as it was
        then, so that the run goes on as if it had been resumed there with half the rate. Collective.
        """
        onset, at = min(event.onset for event in events), self.learner.step
        self.saving.settle(wait=True)
        checkpoint = newest_before(self.directory.checkpoints, onset)
        names = ", ".join(event.name for event in events)
        if checkpoint is None:
            self.monitor.log(f"no rollback for {names}: no checkpoint is from before step {onset}", style="bold red")
            return False
        # In this order: a run that is killed in between is resumed at the checkpoint and comes to the alarm again.
        for line in on_main_rank(lambda: abandon_newer(self.directory, checkpoint)):
            self.monitor.log(line)
        self.saving.written = None  # set aside: its step will come again with other weights
        self.rollbacks.add([event.name for event in events], at, checkpoint_step(checkpoint))
        gone_off = self.monitor.gone_off
        continue_from(self, checkpoint, is_start=False)
        self.monitor.gone_off = gone_off
        self.monitor.log(
            f"rollback {self.rollbacks.count} of {self.rollbacks.most} for {names}: steps {self.learner.step} to "
            f"{at - 1} are undone; rate {self.learner.scheduler.get_lr({}):.3g}",
            style="bold red",
        )
        return True

    @property
    def scores_late(self) -> bool:
        """Whether a step's responses may still be scored while the learner makes its pass for old log-probs.

        The reward must be a function, which is called as responses become complete, and nothing before that pass may
        depend on rewards. With `acceptance` the state before an update is copied once its rate is known.
        """
        recipe = self.recipe
        is_early = self.rewarder.has_functions and isinstance(self.generator, AnnouncingGenerator)
        return is_early and recipe.makes_old_logprobs and not recipe.batch.filter_groups and recipe.acceptance is None

    @contextlib.contextmanager
    def saved_on_fault(self, before: dict[str, Any] | None = None) -> Iterator[None]:
        """Around sampling: an engine or a reward worker that fails leaves the learner at the end of the step before.
        That is saved, so that nothing has to be learned again; then the fault ends the run.

        ``before``: what was `taken` then; None: what is taken now.
        """
        before = before or self.taken()
        try:
            yield
        except Fault:
            self.saving.settle(wait=True)
            done = self.directory.checkpoints / checkpoint_name(self.learner.step)
            if broadcast_object(self.learner.step > 0 and not done.exists()):
                self.try_save(before)
            raise


@contextlib.contextmanager
def start(recipe: Recipe, resume: str = "auto", allow_changes: bool = False) -> Iterator[Run | None]:
    """Check, load, start both engines, resume; on leaving, end them in reverse order whatever happened.

    Gives None where nothing is to be done: the run is complete, or a stop was asked for while it waited for servers.
    ``allow_changes``: the run may go on with another recipe. Raises `InputError` before an engine starts where recipe,
    data or checkpoint cannot be used.
    """
    directory = RunDirectory(recipe.run_dir)
    check_resume(directory, resume)
    with contextlib.ExitStack() as stack:
        prepared = stack.enter_context(prepare(recipe, int(os.environ.get("WORLD_SIZE", 1))))
        recipe = prepared.recipe
        sampler = make_sampler(prepared.train, recipe.data)
        device = initialize(recipe.learner.parallel, recipe.runtime.device, recipe.seed, recipe.rollout.hang_limit_s)
        stack.callback(shutdown)
        beginning = _begin(stack, prepared, directory, resume, allow_changes)
        if beginning is None:
            yield None
            return
        checkpoint, is_main = beginning.checkpoint, world_rank() == 0
        timer = PhaseTimer()
        learner = make_learner(
            recipe, device=device, phase=timer.phase, keep_current_logprobs=recipe.may_record_batches
        )
        stack.callback(learner.close)
        summary = {"run": str(directory.root), **dict(prepared.report), "num_steps": recipe.num_steps}
        alarms = first_step_alarms(recipe, prepared.checked.architecture)
        levels = level_rules(recipe.model_dump(mode="json"))
        monitor = stack.enter_context(
            Monitor(
                directory,
                recipe.monitor,
                summary,
                is_main,
                broadcast_object,
                first_alarms=alarms,
                levels=levels,
                timer=timer,
            )
        )
        for line in beginning.lines:
            monitor.log(line)
        if is_main:
            directory.done.unlink(missing_ok=True)  # a complete run that goes on
            keep_recipe(directory, recipe, beginning.step)
            write_environment(directory.environment, applied_patches(), beginning.contents, beginning.step)
        stop = StopRequest(directory.root)
        waits_at_start = recipe.rollout.engine == "vllm_server"  # the other engines' starts cannot be interrupted
        if waits_at_start:
            stack.enter_context(stop.listening())
        try:
            generator = start_generator(recipe, prepared.tokenizer, learner, say=monitor.log, stop=stop.is_urgent)
        except RolloutInterrupted as reason:
            _interrupted(stop, monitor, reason)
            yield None
            return
        stack.callback(generator.close)
        if (teachers := start_teachers(recipe, prepared.train, learner.device.type)) is not None:
            stack.callback(teachers.close)
        if prepared.rewarder.has_functions and isinstance(generator, AnnouncingGenerator):
            generator.announce_to(prepared.rewarder.begin)
        _confirm_precision(prepared, learner, generator, monitor)
        ahead = Lookahead(sampler, generator, recipe.batch, recipe.rollout, recipe.num_steps)
        saving = Saving(recipe.checkpoint, directory.checkpoints, learner, monitor.log)
        stack.callback(saving.leave)
        run = Run(
            recipe,
            directory,
            learner,
            generator,
            prepared.rewarder,
            sampler,
            ahead,
            prepared.validation,
            monitor,
            stop,
            saving,
            Evidence(recipe.recorder, directory.batches, saving, monitor.log),
            Rollbacks(directory.rollbacks, recipe.monitor.max_rollbacks),
            prepared.train,
            teachers,
        )
        if checkpoint is not None:
            continue_from(run, checkpoint)
            monitor.log(f"continues from step {learner.step} of {recipe.num_steps}, checkpoint {checkpoint}")
            _say_begun(run)
        elif is_main and directory.metrics.exists():
            monitor.resume_at(0)  # an attempt that ended before its first checkpoint
        if not waits_at_start:
            stack.enter_context(stop.listening())
        try:
            yield run
        except RolloutInterrupted as reason:  # `Run.saved_on_fault` has saved
            _interrupted(stop, monitor, reason)


@dataclass(frozen=True)
class _Beginning:
    """Where a run goes on from. ``lines``: what to say of the way there."""

    checkpoint: Path | None
    step: int
    contents: dict[str, Any]  # see `identity.contents`; on the main rank
    lines: list[str]


def _begin(
    stack: contextlib.ExitStack,
    prepared: Prepared,
    directory: RunDirectory,
    resume: str,
    allow_changes: bool,
) -> _Beginning | None:
    """Take the run's lock, compare its recipe and find its checkpoint; None where the run is complete. Collective."""
    lock = RunLock(directory.lock)
    stack.callback(lock.release)
    note = on_main_rank(lock.acquire)
    recipe = prepared.recipe
    now = contents(recipe, prepared.train, prepared.validation) if world_rank() == 0 else {}
    changes, complete = on_main_rank(partial(_settle, directory, recipe, now, resume, allow_changes))
    if complete:
        if world_rank() == 0:
            print(f"{directory.root}: complete, {recipe.num_steps} steps; nothing is left to do")
        return None
    checkpoint, notes = find_checkpoint(directory, resume)
    step = on_main_rank(lambda: begin_step(directory, checkpoint, recipe.num_steps))
    return _Beginning(checkpoint, step, now, [line for line in (note, *notes, *changes) if line])


def _confirm_precision(prepared: Prepared, learner: Learner, generator: Generator, monitor: Monitor) -> None:
    """Hold what the engines say of their precision against the recipe; log what was not known at the start."""
    stated = contract(prepared.recipe, prepared.checked.architecture)
    for row in confirm_contract(stated, learner.describe_precision(), generator.describe_precision()):
        if (row.aspect, str(row)) not in prepared.report:
            monitor.log(f"{row.aspect}: {row}")


def _interrupted(stop: StopRequest, monitor: Monitor, reason: RolloutInterrupted) -> None:
    stop.met()
    monitor.log(f"stopped on request: {reason}; the same command continues")


def _settle(
    directory: RunDirectory, recipe: Recipe, now: dict[str, Any], resume: str, allow_changes: bool
) -> tuple[list[str], bool]:
    """What to say of changes since the run's last start, and whether nothing is left to do. For the main rank.

    Raises `InputError` for changes that make another run of it, unless they are allowed.
    """
    comparison = compare(directory, recipe, now)
    if resume not in ("auto", "never"):
        origin = compare_origin(directory, Path(resume), recipe, now)
        comparison = Comparison([*comparison.allowed, *origin.allowed], [*comparison.refused, *origin.refused])
    if not allow_changes:
        refuse(directory, comparison)
    return comparison.lines, resume == "auto" and is_complete(directory, recipe.num_steps)


def continue_from(run: Run, checkpoint: Path, is_start: bool = True) -> None:
    """Bring ``run`` to the state of ``checkpoint``, whose files were verified. Collective.

    ``is_start``: of this process; False: its sinks have the lines that could not be written yet.
    """
    state = load_beside(run.learner, run.generator, partial(run.learner.load, checkpoint, verify=False))
    part = partial(settled, checkpoint / TRAINER_FILE, state)
    is_own = checkpoint.resolve().parent == run.directory.checkpoints.resolve()

    def order(prompts: dict[str, Any]) -> None:  # a new run may have one of its own
        run.prompts.load_state_dict(prompts if is_own else in_another_order(prompts, run.recipe.data.seed))

    part("prompts", order, run.prompts.state_dict())
    part("ahead", lambda ahead: run.ahead.load_state_dict(ahead, run.train), run.ahead.state_dict(), [])
    if isinstance(run.generator, ExactGenerator):
        part("exact", run.generator.load_state_dict, run.generator.state_dict(), {})
    unwritten = {} if is_start else {"unwritten": []}
    part("monitor", lambda state: run.monitor.load_state_dict(state | unwritten), run.monitor.state_dict())
    part("evidence", run.evidence.load_state_dict, {"alarm": 0, "checkpoint": 0}, {})
    run.monitor.resume_at(run.learner.step)
    for _ in range(part("rollbacks", run.rollbacks.halvings_due, 0, 0)):
        run.learner.scheduler.decay_now()


def _say_begun(run: Run) -> None:
    if begun := sum(len(item["prompts"]) for item in run.ahead.state_dict()):
        run.monitor.log(f"{begun} prompts that were begun for later steps are sampled anew, from these weights")


def applied_patches() -> dict[str, Any]:
    """What `megatron-rl patch status` says of this environment, line by line."""
    return {"status": installed_status(shipped("patches"))}
