"""What may not go together between sections of a recipe, once. `model_rules` has what depends on model and ranks.

A field's own range stands at the field. Every function returns messages that name keys, values found and values
allowed; an empty list where nothing is wrong.
"""

from __future__ import annotations

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.config.schedule import ScheduleConfig
from megatron_rl.config.sections import BatchConfig, RecipeSections

MAX_CARRY_OVER_FACTOR = 2
"""Of f · n groups n are learned from; the other (f - 1) · n have to fit into the next step's n."""


def section_problems(recipe: RecipeSections) -> list[str]:
    """Sections that contradict each other. Part of loading a recipe."""
    found = list(
        schedule_problems(
            recipe.schedule,
            recipe.learner.optimizer.lr,
            recipe.learner.optimizer.weight_decay,
            total_steps=recipe.num_updates,
        )
    )
    found += exact_problems(recipe) + batch_problems(recipe.batch) + offload_problems(recipe)
    found += oversample_problems(recipe.batch, recipe.rollout)
    if recipe.num_sequences % recipe.batch.minibatches:
        found.append(
            f"batch.minibatches: {recipe.batch.minibatches} does not divide the {recipe.num_sequences} sequences of a "
            f"step (batch.prompts {recipe.batch.prompts} · rollout.num_samples {recipe.rollout.num_samples})"
        )
    if recipe.recorder.record_batches == "off":
        found += [
            f"recorder.record_batches: off, but alarm {rule.name!r} wants record_batch; use on_alarm"
            for rule in recipe.monitor.alarms
            if "record_batch" in rule.then
        ]
    if recipe.validation.every and not recipe.data.validation:
        found.append("validation.every: set, but data.validation names no file")
    best = recipe.checkpoint.keep_best
    if best is not None and best.metric.startswith("val/") and not recipe.validation.every:
        found.append(f"checkpoint.keep_best: {best.metric} is never measured with validation.every 0; set it")
    if recipe.learner.lora is not None and recipe.precision.export_from == "master":
        found.append("precision.export_from: master needs master weights, which learner.lora has not; use learner")
    advantage = recipe.objective.advantage
    if advantage != "reinforce" and recipe.rollout.num_samples < 2:
        found.append(
            f"objective.advantage: {advantage} needs rollout.num_samples of at least 2, found "
            f"{recipe.rollout.num_samples}: a response is compared with the others of its prompt; use reinforce for one"
        )
    if recipe.learner.compile and recipe.runtime.device == "cuda":
        found.append(
            "learner.compile: true with runtime.device cuda, where TransformerEngine's layers bring their own kernels; "
            "use compile: false"
        )
    return found


def offload_problems(recipe: RecipeSections) -> list[str]:
    """Parts of `learner.offload` that gain nothing or cannot leave; empty where all fit."""
    offload, engine, found = recipe.learner.offload, recipe.rollout.engine, []
    if offload.during_passes and not offload.optimizer:
        found.append(
            "learner.offload.during_passes: true is about what learner.offload.optimizer moves; set that to true, too"
        )
    if engine == "vllm_server":
        parts = ["gradients", "weights"] + ["optimizer"] * (not offload.during_passes)
        found += [
            f"learner.offload.{part}: true with rollout.engine vllm_server, whose servers have GPUs of their own: "
            "nothing is gained; use false" + " or set learner.offload.during_passes" * (part == "optimizer")
            for part in parts
            if getattr(offload, part)
        ]
    if engine == "exact" and offload.weights:
        found.append(
            "learner.offload.weights: true with rollout.engine exact, which generates with the learner's own weights; "
            "use false"
        )
    return found


def batch_problems(batch: BatchConfig) -> list[str]:
    """Keys of the `batch` section that have no effect, or can never fill a step; empty where all fit."""
    found = []
    if not batch.filter_groups:
        for key, default in (("max_generations", 1), ("generation_prompts", None), ("filter_metric", "reward")):
            if (value := getattr(batch, key)) != default:
                found.append(f"batch.{key}: {value} is about what filter_groups leaves out; set filter_groups: true")
    elif batch.generation_prompts and batch.generation_prompts * batch.max_generations < batch.prompts:
        found.append(
            f"batch.generation_prompts: {batch.generation_prompts} in at most {batch.max_generations} rounds "
            f"(batch.max_generations) never make the {batch.prompts} of batch.prompts; raise one of the two"
        )
    return found


def oversample_problems(batch: BatchConfig, rollout: RolloutConfig) -> list[str]:
    """Why `batch.oversample` cannot be used; empty where it can, or is not set."""
    oversample, found = batch.oversample, []
    if oversample is None:
        return found
    if rollout.engine != "vllm_server":
        found.append(
            f"batch.oversample: set, but rollout.engine {rollout.engine} returns a batch when all of it is complete; "
            "use null or rollout.engine: vllm_server"
        )
    if batch.generation_prompts:
        found.append(
            f"batch.generation_prompts: {batch.generation_prompts} and batch.oversample.factor {oversample.factor:g} "
            "both say how many groups are asked for; remove generation_prompts"
        )
    if oversample.rest == "carry_over" and not rollout.max_staleness:
        found.append(
            "batch.oversample.rest: carry_over with rollout.max_staleness 0; a group that is carried over is one step "
            "old when it is learned from; set rollout.max_staleness: 1 or more, or use rest: abort"
        )
    if oversample.rest == "carry_over" and oversample.factor > MAX_CARRY_OVER_FACTOR:
        found.append(
            f"batch.oversample.factor: {oversample.factor:g} with rest carry_over leaves more groups over than the "
            f"next step learns from, so that their age would grow; use at most {MAX_CARRY_OVER_FACTOR}, or rest: abort"
        )
    return found


def schedule_problems(schedule: ScheduleConfig, lr: float, weight_decay: float, total_steps: int) -> list[str]:
    """What does not fit the optimizer's numbers or the length of the run; empty where all does."""
    found = []
    if schedule.floor(lr) > lr:
        found.append(f"schedule.min_lr: {schedule.min_lr} is above learner.optimizer.lr ({lr})")
    if schedule.warmup_from > lr:
        found.append(f"schedule.warmup_from: {schedule.warmup_from} is above learner.optimizer.lr ({lr})")
    if schedule.style in ("linear", "cosine") and schedule.warmup_steps >= (schedule.decay_steps or total_steps):
        found.append(
            f"schedule.warmup_steps: {schedule.warmup_steps} leaves nothing of the "
            f"{schedule.decay_steps or total_steps} steps for the decay"
        )
    if schedule.weight_decay_end is not None and schedule.weight_decay_end < weight_decay:
        found.append(
            f"schedule.weight_decay_end: {schedule.weight_decay_end} is below learner.optimizer.weight_decay "
            f"({weight_decay}); Megatron's weight decay only grows"
        )
    return found


def exact_problems(recipe: RecipeSections) -> list[str]:
    """Why ``recipe`` cannot run with the engine `exact`, or why its `exact` section has no effect."""
    rollout, parallel, found = recipe.rollout, recipe.learner.parallel, []
    if rollout.engine != "exact":
        if recipe.exact.dose is not None:
            std = recipe.exact.noise_std
            found.append(
                f"{f'exact.noise_std: {std:g}' if std else f'exact.noise: {recipe.exact.dose.kind}'} needs "
                f"rollout.engine exact, found {rollout.engine}; other engines bring their own mismatch"
            )
        return found
    dose = recipe.exact.dose
    if dose is not None and dose.kind == "weights" and recipe.learner.lora is not None:
        found.append(
            "exact.noise.kind: weights with learner.lora, whose adapters are merged in every pass and would not be "
            "rounded; use another kind, or no adapters"
        )
    if rollout.dtype != recipe.learner.dtype:
        found.append(
            f"rollout.dtype: {rollout.dtype}, but rollout.engine exact generates with the learner's own weights "
            f"(learner.dtype {recipe.learner.dtype}); set both alike"
        )
    if rollout.quantization.weights or rollout.quantization.kv_cache:
        found.append(
            "rollout.quantization: set, but rollout.engine exact generates with the learner's own weights; remove it"
        )
    if rollout.top_p < 1 or rollout.top_k:
        found.append(
            f"rollout.top_p {rollout.top_p:g}, top_k {rollout.top_k}: rollout.engine exact samples from the "
            "policy itself; use top_p 1 and top_k 0"
        )
    if recipe.validation.top_p < 1:
        found.append(
            f"validation.top_p: {recipe.validation.top_p:g}, but rollout.engine exact samples from all tokens; use 1"
        )
    if rollout.tensor_parallel > 1:
        found.append(
            f"rollout.tensor_parallel: {rollout.tensor_parallel}, but rollout.engine exact has the learner's "
            "layout (learner.parallel); leave it at 1"
        )
    if parallel.context > 1:
        found.append(
            f"learner.parallel.context: {parallel.context}; rollout.engine exact generates token by token, and its "
            "attention over parts of a sequence would add up in another order; use 1, with tensor or pipeline for the "
            "rest"
        )
    if recipe.routing.needs_engine_routes:
        key = "replay: r3" if recipe.routing.replay == "r3" else "telemetry: true"
        found.append(
            f"routing.{key} needs another engine's routes; under rollout.engine exact there is none, and routes "
            "agree by themselves; use replay off or r2 without telemetry"
        )
    if recipe.learner.fused_head:
        found.append(
            "learner.fused_head: true with rollout.engine exact, which needs logits that do not depend on how tokens "
            "are batched; use fused_head: false"
        )
    if recipe.learner.compile:
        found.append(
            "learner.compile: true with rollout.engine exact, whose passes must agree bit for bit however tokens are "
            "batched; use compile: false"
        )
    return found
