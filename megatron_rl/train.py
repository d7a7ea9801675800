"""The training loop: generate → reward → pack → update → refit, with a record of every step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_rl.batch import (
    build_unscored_batch,
    give_scores,
    group_metrics,
    keep_informative,
)
from megatron_rl.config import Recipe
from megatron_rl.errors import RunEnded
from megatron_rl.monitor import AlarmEvent, wanted
from megatron_rl.monitor.samples import summarise
from megatron_rl.process.host import TRIM_EVERY, give_back_memory
from megatron_rl.rewards.rewarder import Scores, merged_scores
from megatron_rl.rollout import Sampling
from megatron_rl.run.acceptance import Snapshot, judge
from megatron_rl.run.engines import hand_over
from megatron_rl.run.lookahead import staleness_metrics
from megatron_rl.run.recorded_batches import record_batch
from megatron_rl.run.start import Run, start
from megatron_rl.types import Batch, Group


def train(
    recipe: Recipe,
    resume: str = "auto",
    allow_changes: bool = False,
    before_step: Callable[[Run, int], None] | None = None,
) -> None:
    """Run ``recipe`` to its end, from the checkpoint that ``resume`` selects. Every rank of the job must call this.

    ``allow_changes``: resume even if the run had another recipe (`run.identity`). ``before_step`` is called on every
    rank with the run and the number of the next step. Raises `InputError` before an engine starts, and `RunEnded` if an
    alarm stops the run (after saving).
    """
    with start(recipe, resume, allow_changes) as run:
        if run is not None:
            _steps(run, before_step or (lambda run, step: None))


def _steps(run: Run, before_step: Callable[[Run, int], None]) -> None:
    """Do all remaining steps, until the end or a request to stop."""
    recipe, learner, monitor = run.recipe, run.learner, run.monitor
    is_late = run.scores_late
    while (step := learner.step) < recipe.num_steps:
        before_step(run, step)
        taken = run.taken()
        with run.saved_on_fault(taken):
            metrics = validate(run, step) if recipe.validation.is_due(step) else {}
            groups, sampling_metrics = sample_unscored(run, step) if is_late else sample(run, step)
            run.ahead.look_ahead(step, learner.num_updates)
            if run.teachers is not None and groups:
                with monitor.phase("teacher"):
                    sampling_metrics |= run.teachers.teach(groups)
        with monitor.phase("pack"):
            batch = build_unscored_batch(step, groups, recipe.batch)
            if not is_late and recipe.objective.kl_in_reward is None:
                give_scores(groups, recipe.objective)
        version = learner.num_updates
        score = partial(score_batch, run, batch, groups, taken) if is_late else None
        metrics |= sampling_metrics | update(run, batch, groups, score) | run.generator.stats()
        learner.step = step + 1
        events = run.record(step, metrics, groups)
        record(run, batch, version, metrics, events)
        run.saving.settle()
        saved = act_on(events, run)
        if learner.step <= step:  # an alarm took the run back
            continue
        due = run.saving.owed or _due(step + 1, recipe.checkpoint.every)
        if due and not saved and step + 1 < recipe.num_steps:
            run.try_save(in_background=recipe.checkpoint.async_save)
        if _due(step + 1, TRIM_EVERY):
            give_back_memory()
        if step + 1 < recipe.num_steps and run.stop.anywhere():
            run.save()
            run.stop.met()
            monitor.log(f"stopped on request after step {step}; the same command continues")
            return
    finish(run)


def sample(run: Run, step: int) -> tuple[list[Group], dict[str, float]]:
    """Return the scored groups of a step. `batch.filter_groups` replaces groups without signal."""
    recipe, complete, sampled = run.recipe, [], []
    batch = recipe.batch
    shares: list[Scores] = []
    for _ in range(batch.max_generations):
        with run.monitor.phase("generate") as span:
            wanted_prompts = batch.generation_prompts or batch.prompts - len(complete)
            groups = run.ahead.sample(wanted_prompts, step=step, policy_version=run.learner.num_updates)
            span.tokens = sum(rollout.num_sampled for group in groups for rollout in group.rollouts)
        shares.append(run.reward(groups, step))
        run.refuse_failures(shares[-1], step)
        sampled += groups
        complete += keep_informative(groups, batch.filter_metric) if batch.filter_groups else groups
        if len(complete) >= batch.prompts:
            break
    counts = merged_scores(shares).metrics
    if recipe.rollout.max_staleness:
        counts |= staleness_metrics(sampled, run.learner.num_updates)
    return complete[: batch.prompts], counts | group_metrics(sampled, batch.filter_metric)


def sample_unscored(run: Run, step: int) -> tuple[list[Group], dict[str, float]]:
    """Return the groups of a step, whose responses are still being scored (`Run.scores_late`)."""
    version = run.learner.num_updates
    with run.monitor.phase("generate") as span:
        groups = run.ahead.sample(run.recipe.batch.prompts, step=step, policy_version=version)
        span.tokens = sum(rollout.num_sampled for group in groups for rollout in group.rollouts)
    return groups, staleness_metrics(groups, version) if run.recipe.rollout.max_staleness else {}


def score_batch(run: Run, batch: Batch, groups: list[Group], taken: dict[str, Any]) -> dict[str, float]:
    """Wait for the scores of ``groups``, give them to ``batch`` and return their metrics.

    ``taken``: `Run.taken` from before the step was sampled, to save if it cannot be scored.
    """
    with run.saved_on_fault(taken):
        scores = run.reward(groups, batch.step)
        run.refuse_failures(scores, batch.step)
    give_scores(groups, run.recipe.objective)
    return scores.metrics | group_metrics(groups, run.recipe.batch.filter_metric)


def update(
    run: Run, batch: Batch, groups: list[Group], score: Callable[[], dict[str, float]] | None = None
) -> dict[str, float]:
    """Update on the batch, send the weights and return metrics; skip the update if all groups were left out.

    ``score``: gives a batch that is scored late its scores, and returns their metrics.
    """
    learner, generator = run.learner, run.generator
    if not groups:
        run.monitor.log(f"step {batch.step}: every group was filtered out (all rewards equal); no update")
        return learner.scheduler.metrics()
    known: dict[str, float] = {}

    def begin() -> None:
        """Do what must be done before the batch's first optimizer step. A batch without scores leaves no trace."""
        known.update({} if score is None else score())
        lengths = [rollout.length for group in groups for rollout in group.rollouts]
        learner.scheduler.observe_length(learner.num_updates, sum(lengths) / len(lengths))
        known.update(learner.scheduler.metrics())

    complete = begin
    if score is None:
        begin()
        complete = None
        if run.recipe.objective.kl_in_reward is not None:  # the learner finds it before it calls
            complete = partial(give_scores, groups, run.recipe.objective)
    generator.sleep()
    before = None if run.recipe.acceptance is None else Snapshot(learner)
    metrics = known | learner.update(batch, complete)
    hand_over(learner, generator, run.monitor.phase)
    return metrics if before is None else metrics | judge(run, batch.step, before)


def validate(run: Run, step: int) -> dict[str, float]:
    """Return `val/*` of the policy before ``step``, always with the same held-out prompts and seeds."""
    config = run.recipe.validation
    prompts = list(run.validation)[: config.limit]
    with run.monitor.phase("validate"):
        groups = run.generator.rollout(
            prompts,
            config.num_samples,
            policy_version=run.learner.num_updates,
            step=0,
            sampling=Sampling.of_validation(run.recipe.rollout, config),
        )
    run.score(groups, step)
    rewards = [rollout.raw_reward for group in groups for rollout in group.scored]
    if not rewards:
        run.monitor.log(f"validation before step {step}: no response has a score (reward.on_error)", style="bold red")
        return summarise(groups)
    metrics = {"val/reward/mean": sum(rewards) / len(rewards), **summarise(groups)}
    run.monitor.log(f"validation before step {step}: reward {metrics['val/reward/mean']:.3f}")
    return metrics


def record(run: Run, batch: Batch, policy_version: int, metrics: dict[str, float], events: list[AlarmEvent]) -> None:
    """Write the step's batch if the recipe or an alarm requests it, and keep what explains an alarm.

    ``policy_version``: of the weights before the step.
    """
    config, alarmed = run.recipe.recorder, wanted(events, "record_batch")
    with run.monitor.phase("record"):
        if batch.sequences and (alarmed or config.is_every_step):
            try:
                keep = alarmed or config.record_batches == "all"
                record_batch(run.directory.batches, batch, policy_version, metrics, keep)
            except OSError as error:  # on every rank; a failed record must not end the run
                run.monitor.log(f"the batch of step {batch.step} could not be recorded: {error}", style="bold red")
        run.evidence.after_step(batch.step, events)


def act_on(events: list[AlarmEvent], run: Run) -> bool:
    """Carry out this step's alarms and overflows on every rank. Return whether a checkpoint was written."""
    if wanted(events, "decay_lr"):
        run.learner.scheduler.decay_now()
    reasons = [event.message for event in events if "stop" in event.actions]
    back = [event for event in events if "rollback" in event.actions]
    if back and run.rollbacks.is_spent:
        reasons += [f"{event.message} (monitor.max_rollbacks: {run.rollbacks.most})" for event in back]
    if run.learner.overflow.reason_to_end:
        reasons.append(run.learner.overflow.reason_to_end)
    if reasons:
        run.save()
        raise RunEnded("; ".join(reasons))
    if back and run.roll_back(back):
        return False
    if wanted(events, "save") and run.learner.step < run.recipe.num_steps:  # else `finish` saves
        run.try_save(in_background=run.recipe.checkpoint.async_save)
        return True
    return False


def finish(run: Run) -> None:
    """Do the last validation, checkpoint and export, then mark the run as done."""
    recipe = run.recipe
    if recipe.validation.every:
        with run.saved_on_fault():
            metrics = validate(run, recipe.num_steps)
        run.record(recipe.num_steps, metrics)
    run.save()
    run.monitor.refuse_lost_steps()
    if recipe.checkpoint.export_hf:
        folder = run.directory.checkpoints / "hf"
        run.learner.export_hf(folder)
        run.monitor.log(f"Hugging Face checkpoint: {folder}")
    if run.monitor.is_main_rank:
        run.directory.done.write_text(f"{recipe.num_steps}\n")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
