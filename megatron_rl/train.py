"""The loop: generate → reward → pack → update → refit, and a record of every step."""

from __future__ import annotations

from megatron_rl.batch import build_batch, group_metrics, keep_informative, release_routes
from megatron_rl.config import Recipe
from megatron_rl.errors import RunEnded
from megatron_rl.monitor import AlarmEvent, wanted
from megatron_rl.monitor.validation import success_rates, summarise
from megatron_rl.process.host_memory import FreedMemory
from megatron_rl.rewards.shared import Scores, merged
from megatron_rl.rollout import Sampling
from megatron_rl.run.engines import hand_over
from megatron_rl.run.lookahead import staleness_metrics
from megatron_rl.run.model_card import write_model_card
from megatron_rl.run.oversampling import Oversampling
from megatron_rl.run.start import Run, start
from megatron_rl.stored.batches import keep_newest, record_batch
from megatron_rl.types import Batch, Group


def train(recipe: Recipe, resume: str = "auto", allow_changes: bool = False) -> None:
    """Run ``recipe`` to its end, from the checkpoint that ``resume`` chooses. Every rank of the job calls it.

    ``allow_changes``: also where the run that is resumed had another recipe (`config.identity`). Raises `InputError`
    before an engine starts, `RunEnded` where an alarm stops the run (after saving).
    """
    with start(recipe, resume, allow_changes) as run:
        if run is not None:
            _steps(run)


def _steps(run: Run) -> None:
    """All steps that are left, until the end or a request to stop."""
    recipe, learner, monitor, freed = run.recipe, run.learner, run.monitor, FreedMemory()
    for step in range(learner.step, recipe.num_steps):
        with run.saved_on_fault():
            metrics = validate(run, step) if _due(step, recipe.validation.every) else {}
            groups, sampling_metrics = sample(run, step)
            run.ahead.look_ahead(step, learner.num_updates)
            sampling_metrics |= run.prompts.metrics()
        with monitor.phase("pack"):
            batch = build_batch(step, groups, recipe)
            release_routes(groups)
        version = learner.num_updates
        metrics |= sampling_metrics | update(run, batch, groups) | run.generator.stats()
        learner.step = step + 1
        events = run.record(step, metrics, groups, batch)
        record(run, batch, version, metrics, alarmed=wanted(events, "record_batch"))
        run.saving.settle()
        saved = act_on(events, run)
        due = run.saving.owed or _due(step + 1, recipe.checkpoint.every)
        if due and not saved and step + 1 < recipe.num_steps:
            run.try_save(in_background=recipe.checkpoint.async_save)
        freed.give_back()
        if step + 1 < recipe.num_steps and run.stop.anywhere():
            run.save()
            run.stop.met()
            monitor.log(f"stopped on request after step {step}; the same command continues")
            return
    finish(run)


def sample(run: Run, step: int) -> tuple[list[Group], dict[str, float]]:
    """Scored groups of one step. With `batch.filter_groups`, groups without signal are left out and replaced."""
    if isinstance(run.ahead, Oversampling):
        return sample_first(run, run.ahead, step)
    recipe, kept, sampled, counts = run.recipe, [], [], {}
    batch = recipe.batch
    for _ in range(batch.max_generations):
        with run.monitor.phase("generate") as span:
            wanted_prompts = batch.generation_prompts or batch.prompts - len(kept)
            groups = run.ahead.sample(wanted_prompts, step=step, policy_version=run.learner.num_updates)
            span.tokens = sum(rollout.length for group in groups for rollout in group.rollouts)
        new_counts = run.score(groups, step)
        run.prompts.observe(success_rates(groups))
        counts = {name: counts.get(name, 0.0) + value for name, value in new_counts.items()}
        sampled += groups
        kept += keep_informative(groups, batch.filter_metric) if batch.filter_groups else groups
        if len(kept) >= batch.prompts:
            break
    if recipe.rollout.max_staleness:
        staleness = staleness_metrics(sampled, run.learner.num_updates)
        run.ahead.check_staleness(step, staleness)
        counts |= staleness
    return kept[: batch.prompts], counts | group_metrics(sampled, batch.filter_metric)


def sample_first(run: Run, ahead: Oversampling, step: int) -> tuple[list[Group], dict[str, float]]:
    """`sample` with `batch.oversample`: groups are scored as they become complete, until the batch is filled."""
    batch, version = run.recipe.batch, run.learner.num_updates
    sampled: list[Group] = []
    shares: list[Scores] = []
    ahead.open(step, version)
    for number in range(batch.max_generations):
        if number:
            ahead.refill(version)
        while not ahead.is_filled:
            with run.monitor.phase("generate") as span:
                groups = ahead.arrivals()
                span.tokens = sum(rollout.length for group in groups for rollout in group.rollouts)
            if not groups:
                break
            shares.append(run.reward(groups, step))
            run.prompts.observe(success_rates(groups))
            sampled += groups
            ahead.keep(keep_informative(groups, batch.filter_metric) if batch.filter_groups else groups)
        if ahead.is_filled:
            break
    scores = merged(shares)
    run.refuse_failures(scores, step)
    kept, metrics = ahead.close()
    staleness = staleness_metrics(kept, version)
    ahead.check_staleness(step, staleness)
    metrics |= scores.metrics | staleness | group_metrics(sampled, batch.filter_metric)
    return kept, metrics


def update(run: Run, batch: Batch, groups: list[Group]) -> dict[str, float]:
    """Learn from the batch and hand the weights over; nothing is learned from a step whose groups were all left out."""
    learner, generator = run.learner, run.generator
    if not groups:
        run.monitor.log(f"step {batch.step}: every group was filtered out (all rewards equal); no update")
        return learner.scheduler.metrics()
    lengths = [rollout.length for group in groups for rollout in group.rollouts]
    learner.scheduler.observe_length(learner.num_updates, sum(lengths) / len(lengths))
    generator.sleep()
    metrics = learner.scheduler.metrics() | learner.update(batch)
    hand_over(learner, generator, run.monitor.phase)
    return metrics


def validate(run: Run, step: int) -> dict[str, float]:
    """`val/*` of the policy before step ``step``, on the same held-out prompts and seeds every time."""
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
    rewards = [rollout.raw_reward for group in groups for rollout in group.rollouts]
    metrics = {"val/reward/mean": sum(rewards) / len(rewards), **summarise(groups)}
    run.monitor.log(f"validation before step {step}: reward {metrics['val/reward/mean']:.3f}")
    return metrics


def record(run: Run, batch: Batch, policy_version: int, metrics: dict[str, float], alarmed: bool) -> None:
    """Put the step's batch on disk if the recipe or an alarm says so. ``policy_version``: of the weights before it."""
    config, folder = run.recipe.recorder, run.directory.batches
    if batch.sequences and (alarmed or config.record_batches in ("last_n", "all")):
        with run.monitor.phase("record"):
            try:
                record_batch(folder, batch, policy_version, metrics, keep=alarmed)
            except OSError as error:  # on every rank; the record of a run is worth less than the run
                run.monitor.log(f"the batch of step {batch.step} could not be recorded: {error}", style="bold red")
    if config.record_batches == "last_n":
        keep_newest(folder, config.keep)


def act_on(events: list[AlarmEvent], run: Run) -> bool:
    """Do what this step's alarms and overflows ask for, the same on every rank. True where a checkpoint was written."""
    if wanted(events, "decay_lr"):
        run.learner.scheduler.decay_now()
    reasons = [event.message for event in events if "stop" in event.actions]
    if run.learner.overflow.reason_to_end:
        reasons.append(run.learner.overflow.reason_to_end)
    if reasons:
        run.save()
        raise RunEnded("; ".join(reasons))
    if wanted(events, "save"):
        run.try_save(in_background=run.recipe.checkpoint.async_save)
        return True
    return False


def finish(run: Run) -> None:
    """Last validation, checkpoint and export; then the mark that nothing is left to do."""
    recipe = run.recipe
    if recipe.validation.every:
        with run.saved_on_fault():
            metrics = validate(run, recipe.num_steps)
        run.record(recipe.num_steps, metrics)
    run.save()
    if recipe.checkpoint.export_hf:
        folder = run.directory.checkpoints / "hf"
        run.learner.export_hf(folder)
        if run.monitor.is_main_rank:
            write_model_card(folder, run.directory, recipe.num_steps)
        run.monitor.log(f"Hugging Face checkpoint: {folder}")
    if run.monitor.is_main_rank:
        run.directory.done.write_text(f"{recipe.num_steps}\n")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
