"""The recipe: one file that says everything about a run, and the rules between its sections.

A field's own range stands at the field. `model_rules` has what depends on model and ranks. Every function of a rule
returns messages that name keys, values found and values allowed; an empty list where nothing is wrong.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import model_validator

from megatron_rl.config.learner import ParallelConfig, ScheduleConfig
from megatron_rl.config.sections import BatchConfig, RecipeSections
from megatron_rl.config.teacher_rules import teacher_problems


def section_problems(recipe: RecipeSections) -> list[str]:
    """Sections that contradict each other. Part of loading a recipe."""
    problems = list(
        schedule_problems(
            recipe.schedule,
            recipe.learner.optimizer.lr,
            total_steps=recipe.num_updates if recipe.num_steps else math.inf,
        )
    )
    problems += exact_problems(recipe) + batch_problems(recipe.batch) + offload_problems(recipe)
    problems += tf32_problems(recipe) + teacher_problems(recipe)
    learner = recipe.learner
    problems += dispatcher_problems(learner.parallel, learner.token_dispatcher, recipe.runtime.device)
    problems += epoch_problems(recipe)
    if recipe.num_sequences % recipe.batch.minibatches:
        problems.append(
            f"batch.minibatches: {recipe.batch.minibatches} does not divide the {recipe.num_sequences} sequences of a "
            f"step (batch.prompts {recipe.batch.prompts} · rollout.num_samples {recipe.rollout.num_samples})"
        )
    if recipe.batch.minibatches == 1:
        problems += [
            f"objective.correction.{i}: opsm with pi_old: learner and batch.minibatches 1 never drops anything, "
            "because pi is then pi_old; use pi_old: rollout, or several mini-batches"
            for i, item in enumerate(recipe.objective.correction)
            if item.mode == "opsm" and item.pi_old == "learner"
        ]
    if recipe.objective.anchor == "interpolate" and not recipe.rollout.max_staleness:
        problems.append(
            "objective.anchor: interpolate with rollout.max_staleness 0: every token is of the newest weights, and the "
            "interpolated policy is mu; use bypass, or max_staleness of 1 or more"
        )
    bound = recipe.schedule.staleness_bound
    is_stale = recipe.rollout.max_staleness or (recipe.exact.dose is not None and recipe.exact.dose.kind == "stale")
    if bound is not None and not is_stale and recipe.batch.minibatches == 1:
        problems.append(
            f"schedule.staleness_bound: {bound:g} bounds nothing, because rollout.max_staleness is 0 and "
            "batch.minibatches 1, without a dose of kind stale: every update learns what its own weights sampled; set "
            "one of these, or null"
        )
    penalty = recipe.objective.log_ratio_penalty
    if penalty and not has_log_ratio(recipe):
        problems.append(
            f"objective.log_ratio_penalty: {penalty:g} adds nothing, because pi is what it is compared with: "
            "batch.minibatches is 1; use several mini-batches, anchor: bypass with an engine that differs, or 0"
        )
    if recipe.recorder.record_batches == "off":
        problems += [
            f"recorder.record_batches: off, but alarm {rule.name!r} wants record_batch; use on_alarm"
            for rule in recipe.monitor.alarms
            if "record_batch" in rule.then
        ]
    problems += rollback_problems(recipe)
    if recipe.acceptance is not None:
        problems += acceptance_problems(recipe)
    for key in ("every", "at_start"):
        if getattr(recipe.validation, key) and not recipe.data.validation:
            problems.append(f"validation.{key}: set, but data.validation names no file")
    if recipe.learner.lora is not None and recipe.precision.export_from == "master":
        problems.append("precision.export_from: master needs master weights, which learner.lora has not; use learner")
    if recipe.learner.quantization is not None:
        problems += rounding_problems(recipe)
    if recipe.objective.router_shift is not None:
        problems += router_shift_problems(recipe)
    problems += reference_problems(recipe)
    if recipe.scoring is not None and recipe.batch.minibatches > 1 and not recipe.makes_old_logprobs:
        problems.append(
            f"scoring: set with batch.minibatches {recipe.batch.minibatches} and an objective that makes no pass for "
            "log po: from the second update on, pi has other weights than what it is compared with; use minibatches 1, "
            "or null"
        )
    head = recipe.rollout.sampled_head
    if recipe.objective.score_centering and not head:
        wanted = recipe.rollout.top_k if recipe.rollout.kept_sets else 128
        problems.append(
            "objective.score_centering: true needs the sampler's most probable tokens, but rollout.sampled_head is 0; "
            f"set it to {wanted}"
        )
    of_teacher = recipe.teacher is not None and recipe.teacher.tokens == "student"
    if head and not recipe.objective.score_centering and not of_teacher:
        problems.append(
            f"rollout.sampled_head: {head}, but objective.score_centering is false and nothing reads the head; set "
            "that to true, or use 0"
        )
    if recipe.objective.advantage == "min_variance" and recipe.learner.dtype == "fp16":
        problems.append(
            "objective.advantage: min_variance with learner.dtype fp16, whose loss scale would overflow in gradients "
            "that no loss divides; use bf16 or fp32"
        )
    advantage = recipe.objective.advantage
    if advantage not in ("reinforce", "none") and recipe.rollout.num_samples < 2:
        problems.append(
            f"objective.advantage: {advantage} needs rollout.num_samples of at least 2, found "
            f"{recipe.rollout.num_samples}: a response is compared with the others of its prompt; use reinforce for one"
        )
    return problems


def rollback_problems(recipe: RecipeSections) -> list[str]:
    """Why an alarm could not take the run back, or what it could not undo; empty where it can or none is to."""
    rules = [rule for rule in recipe.monitor.alarms if "rollback" in rule.then]
    if not rules:
        return []
    saves, problems = recipe.checkpoint, []
    name = f"alarm {rules[0].name!r} has rollback"
    if not saves.every:
        problems.append(f"checkpoint.every: {saves.every}, but {name}, which goes back to a checkpoint; set it")
    for rule in rules:
        span = rule.for_steps + (0 if rule.statistic in ("value", "not_finite", "ratio") else rule.window)
        if saves.every and saves.keep_last and (saves.keep_last - 1) * saves.every < span:
            problems.append(
                f"checkpoint.keep_last: {saves.keep_last} of every {saves.every} steps, but alarm {rule.name!r} with "
                f"rollback goes off up to {span} steps after its onset, and none from before would be left; keep "
                f"{-(-span // saves.every) + 1}"
            )
    if recipe.rollout.engine == "vllm_server":
        problems.append(
            f"rollout.engine: vllm_server, but {name}: servers never go back to an older version of the weights; use "
            "engine vllm, or another action"
        )
    if recipe.exact.dose is not None and recipe.exact.dose.kind == "stale":
        problems.append(f"exact.noise.kind: stale, but {name}: the sampler would keep weights that it undoes")
    return problems


def acceptance_problems(recipe: RecipeSections) -> list[str]:
    """Why updates cannot be scored, or undone; empty where they can."""
    problems = []
    if not recipe.data.validation:
        problems.append("acceptance: set, but data.validation names no file; an update is scored on held-out prompts")
    if recipe.acceptance.num_samples < 2 and recipe.objective.advantage != "reinforce":
        problems.append(
            "acceptance.num_samples: 1, but responses are compared with the others of their prompt; use 2 or more"
        )
    if recipe.rollout.engine == "vllm_server":
        problems.append(
            "acceptance: set with rollout.engine vllm_server, whose servers never go back to an older version of the "
            "weights; use engine vllm, or null"
        )
    if recipe.exact.dose is not None and recipe.exact.dose.kind == "stale":
        problems.append("acceptance: set with exact.noise.kind stale: the sampler would keep weights that are undone")
    return problems


def reference_problems(recipe: RecipeSections) -> list[str]:
    """Why there is no divergence from a reference policy, or none to speak of; empty where there is, or none is asked
    for."""
    objective, rollout = recipe.objective, recipe.rollout
    if recipe.reference is None:
        return [
            f"objective.{key}: set, but the section reference is null and names no policy to stay near; set it ({{}}: "
            "the model that the run starts from), or use null"
            for key in ("kl_loss", "kl_in_reward")
            if getattr(objective, key) is not None
        ]
    problems = []
    if (rollout.top_p < 1 or rollout.top_k) and not rollout.kept_sets:
        problems.append(
            f"reference: set with rollout.top_p {rollout.top_p:g}, top_k {rollout.top_k}: the responses are of a "
            "distribution over some of the tokens, both policies over all, and k would not estimate their divergence; "
            "use top_p: 1 and top_k: 0, or rollout.kept_sets: true"
        )
    return problems


def router_shift_problems(recipe: RecipeSections) -> list[str]:
    """Why the routers' shift cannot be had, or does nothing; empty where it can and does."""
    key, parallel = f"objective.router_shift: {recipe.objective.router_shift:g}", recipe.learner.parallel
    problems = []
    if recipe.batch.minibatches == 1:
        problems.append(
            f"{key} does nothing, because no router has moved: batch.minibatches is 1; use several, or null"
        )
    problems += [
        f"{key} with learner.parallel.{name} {size}: a token's layers, or a response's tokens, would be on several "
        "ranks, whose scores are not brought together; use 1, with expert for the rest"
        for name, size in (("tensor", parallel.tensor), ("pipeline", parallel.pipeline), ("context", parallel.context))
        if size > 1
    ]
    return problems


def rounding_problems(recipe: RecipeSections) -> list[str]:
    """Why the learner cannot round its weights as the engine does; empty where it can."""
    key, problems = "learner.quantization: as_rollout", []
    if recipe.rollout.quantization.weights is None:
        problems.append(f"{key}, but rollout.quantization.weights is null and nothing is rounded; set it, or use null")
    if recipe.learner.lora is not None:
        problems.append(
            f"{key} with learner.lora, whose adapters are merged in every pass and would not be rounded; use null"
        )
    if recipe.learner.dtype != recipe.rollout.dtype:
        problems.append(
            f"{key} with learner.dtype {recipe.learner.dtype}, rollout.dtype {recipe.rollout.dtype}: the engine would "
            "round other numbers than the learner; set both alike"
        )
    parallel = recipe.learner.parallel
    split = {
        "learner.parallel.tensor": parallel.tensor,
        "learner.parallel.expert_tensor": parallel.expert_tensor,
        "rollout.tensor_parallel": recipe.rollout.tensor_parallel,
    }
    problems += [
        f"{key} with {name} {size}: blocks that share a scale would begin elsewhere in a part of a matrix; use 1"
        for name, size in split.items()
        if size > 1
    ]
    return problems


def epoch_problems(recipe: RecipeSections) -> list[str]:
    """What keeps the number of steps of `num_epochs` from being known before the run."""
    if recipe.num_epochs is None:
        return []
    keys = {
        "batch.filter_groups": recipe.batch.filter_groups,
        "weights in data.train": bool(recipe.data.weights),
    }
    return [
        f"num_epochs: {recipe.num_epochs:g} with {key}: how many prompts a step or an epoch takes is known only in the "
        "run; use num_steps"
        for key, is_set in keys.items()
        if is_set
    ]


def dispatcher_problems(parallel: ParallelConfig, dispatcher: str | None, device: str = "auto") -> list[str]:
    """Return why `learner.token_dispatcher` cannot serve this layout on ``device``; empty where it can."""
    if dispatcher == "allgather" and parallel.pipeline > 1:
        return [
            f"learner.token_dispatcher: allgather with learner.parallel.pipeline {parallel.pipeline}: Megatron's "
            "stages hand on sequences of different lengths, which allgather refuses; use alltoall"
        ]
    same_tokens, experts = parallel.tensor * parallel.context, parallel.expert * parallel.expert_tensor
    if dispatcher == "allgather" and same_tokens % experts:
        return [
            f"learner.token_dispatcher: allgather with learner.parallel.expert · expert_tensor = {experts}: it needs "
            "as many tokens on each rank of the experts, which the ranks of one replica alone have: tensor · context = "
            f"{same_tokens}; use alltoall, or an expert · expert_tensor that divides it"
        ]
    if dispatcher == "flex" and experts == 1:
        return [
            "learner.token_dispatcher: flex with learner.parallel.expert 1: no token leaves its rank; use alltoall, or "
            "deal the experts out"
        ]
    if dispatcher == "flex" and device == "cpu":
        return ["learner.token_dispatcher: flex with runtime.device cpu: DeepEP needs NVIDIA GPUs; use alltoall"]
    return []


def has_mismatch(recipe: RecipeSections) -> bool:
    """Whether the rollout engine's probabilities may differ from the learner's at the same weights."""
    return recipe.rollout.engine != "exact" or recipe.exact.dose is not None


def has_log_ratio(recipe: RecipeSections) -> bool:
    """Whether pi can differ from what the objective's own ratio is measured from."""
    return recipe.batch.minibatches > 1 or (recipe.objective.needs_no_po and has_mismatch(recipe))


def offload_problems(recipe: RecipeSections) -> list[str]:
    """Parts of `learner.offload` that gain nothing or cannot leave; empty where all fit."""
    offload, engine, problems = recipe.learner.offload, recipe.rollout.engine, []
    if offload.during_passes and not offload.optimizer:
        problems.append(
            "learner.offload.during_passes: true is about what learner.offload.optimizer moves; set that to true, too"
        )
    if engine == "vllm_server":
        remedies = {"gradients": "", "weights": ""}
        if not offload.during_passes:
            remedies["optimizer"] = " or set learner.offload.during_passes"
        problems += [
            f"learner.offload.{part}: true with rollout.engine vllm_server, whose servers have GPUs of their own: "
            f"nothing is gained; use false{remedy}"
            for part, remedy in remedies.items()
            if getattr(offload, part)
        ]
    if engine == "exact" and offload.weights:
        problems.append(
            "learner.offload.weights: true with rollout.engine exact, which generates with the learner's own weights; "
            "use false"
        )
    return problems


def tf32_problems(recipe: RecipeSections) -> list[str]:
    """Return why one process would need two kinds of fp32 products, or TF32 where there is none."""
    learner, rollout = recipe.fp32_products
    if "tf32" not in learner | rollout:
        return []
    problems, dtypes = [], f"learner.dtype: {recipe.learner.dtype}, rollout.dtype: {recipe.rollout.dtype}"
    dtypes += "" if recipe.scoring is None else f", scoring.dtype: {recipe.scoring.dtype}"
    if recipe.runtime.device == "cpu":
        problems.append(f"{dtypes} with runtime.device cpu: tf32 needs an NVIDIA GPU; use fp32")
    if recipe.rollout.engine == "exact":
        problems.append(f"{dtypes} with rollout.engine exact, whose kernels have no TF32; use fp32, bf16 or fp16")
    processes = [learner, rollout] if recipe.rollout.engine == "vllm_server" else [learner | rollout]
    if {"fp32", "tf32"} in processes:
        precision = recipe.precision
        parts = [
            f"precision.{name}: true"
            for name, is_on in (
                ("fp32_head", precision.fp32_head or precision.rollout_head),
                ("fp32_router", precision.fp32_router or precision.rollout_router),
            )
            if is_on
        ]
        problems.append(
            f"{', '.join([dtypes, *parts])}: one process multiplies all fp32 matrices alike, in full or as TF32; use "
            "tf32 without fp32 beside it, fp32 without tf32, or rollout.engine vllm_server, whose engine is a process "
            "of its own"
        )
    return problems


def batch_problems(batch: BatchConfig) -> list[str]:
    """Keys of the `batch` section that have no effect, or can never fill a step; empty where all fit."""
    problems = []
    if not batch.filter_groups:
        for key, default in (("max_generations", 1), ("generation_prompts", None), ("filter_metric", "reward")):
            if (value := getattr(batch, key)) != default:
                problems.append(f"batch.{key}: {value} is about what filter_groups leaves out; set filter_groups: true")
    elif batch.generation_prompts and batch.generation_prompts * batch.max_generations < batch.prompts:
        problems.append(
            f"batch.generation_prompts: {batch.generation_prompts} in at most {batch.max_generations} rounds "
            f"(batch.max_generations) never make the {batch.prompts} of batch.prompts; raise one of the two"
        )
    return problems


def schedule_problems(schedule: ScheduleConfig, lr: float, total_steps: float) -> list[str]:
    """What does not fit the optimizer's numbers or the length of the run; empty where all does."""
    problems = []
    if schedule.floor(lr) > lr:
        problems.append(f"schedule.min_lr: {schedule.min_lr} is above learner.optimizer.lr ({lr})")
    if schedule.warmup_from > lr:
        problems.append(f"schedule.warmup_from: {schedule.warmup_from} is above learner.optimizer.lr ({lr})")
    if schedule.style in ("linear", "cosine") and schedule.warmup_steps >= (schedule.decay_steps or total_steps):
        problems.append(
            f"schedule.warmup_steps: {schedule.warmup_steps} leaves nothing of the "
            f"{schedule.decay_steps or total_steps} steps for the decay"
        )
    return problems


def exact_problems(recipe: RecipeSections) -> list[str]:
    """Why ``recipe`` cannot run with the engine `exact`, or why its `exact` section has no effect."""
    rollout, parallel, problems = recipe.rollout, recipe.learner.parallel, []
    if rollout.engine != "exact":
        if recipe.exact.dose is not None:
            std = recipe.exact.noise_std
            problems.append(
                f"{f'exact.noise_std: {std:g}' if std else f'exact.noise: {recipe.exact.dose.kind}'} needs "
                f"rollout.engine exact, found {rollout.engine}; other engines bring their own mismatch"
            )
        return problems
    dose = recipe.exact.dose
    if dose is not None and dose.kind == "weights" and recipe.learner.lora is not None:
        problems.append(
            "exact.noise.kind: weights with learner.lora, whose adapters are merged in every pass and would not be "
            "rounded; use another kind, or no adapters"
        )
    if rollout.dtype != recipe.learner.dtype:
        problems.append(
            f"rollout.dtype: {rollout.dtype}, but rollout.engine exact generates with the learner's own weights "
            f"(learner.dtype {recipe.learner.dtype}); set both alike"
        )
    if rollout.quantization.weights or rollout.quantization.kv_cache:
        problems.append(
            "rollout.quantization: set, but rollout.engine exact generates with the learner's own weights; remove it"
        )
    if rollout.top_p < 1 or rollout.top_k:
        problems.append(
            f"rollout.top_p {rollout.top_p:g}, top_k {rollout.top_k}: rollout.engine exact samples from the "
            "policy itself; use top_p 1 and top_k 0"
        )
    if recipe.validation.top_p < 1:
        problems.append(
            f"validation.top_p: {recipe.validation.top_p:g}, but rollout.engine exact samples from all tokens; use 1"
        )
    if rollout.tensor_parallel > 1:
        problems.append(
            f"rollout.tensor_parallel: {rollout.tensor_parallel}, but rollout.engine exact has the learner's "
            "layout (learner.parallel); leave it at 1"
        )
    if parallel.context > 1:
        problems.append(
            f"learner.parallel.context: {parallel.context}; rollout.engine exact generates token by token, and its "
            "attention over parts of a sequence would add up in another order; use 1, with tensor or pipeline for the "
            "rest"
        )
    if recipe.routing.needs_engine_routes:
        key = "replay: r3" if recipe.routing.replay == "r3" else "telemetry: true"
        problems.append(
            f"routing.{key} needs another engine's routes; under rollout.engine exact there is none, and routes "
            "agree by themselves; use replay off or r2 without telemetry"
        )
    if recipe.learner.megatron:
        problems.append(
            f"learner.megatron: {', '.join(recipe.learner.megatron)} with rollout.engine exact, whose two passes agree "
            "for the fields that this project sets alone; remove it"
        )
    if recipe.learner.token_dispatcher != "alltoall":
        problems.append(
            f"learner.token_dispatcher: {recipe.learner.token_dispatcher} with rollout.engine exact, which adds up the "
            "outputs of experts in the order of alltoall; use alltoall"
        )
    if recipe.learner.fused_head:
        problems.append(
            "learner.fused_head: true with rollout.engine exact, which needs logits that do not depend on how tokens "
            "are batched; use fused_head: false"
        )
    return problems


REMOVED: dict[str, tuple[Any, str]] = {
    "learner.compile": (False, "torch.compile made an update on CPUs a tenth faster and had no use on GPUs"),
    "learner.loss_scale.growth_factor": (2.0, "the loss scale grows by 2"),
    "learner.loss_scale.backoff_factor": (0.5, "an overflow halves the loss scale"),
    "learner.loss_scale.minimum": (1.0, "the loss scale never falls below 1"),
    "monitor.repetition_ngram": (8, "response/repetition_frac counts n-grams of 8 tokens"),
    "monitor.show_sample_every": (0, "`megatron-rl run samples RUN` prints the responses that monitor.samples keeps"),
    "monitor.sinks.mlflow": (None, "MLflow's importers read the TensorBoard files of a run"),
    "monitor.sinks.swanlab": (None, "`swanlab convert -t tensorboard` reads the TensorBoard files of a run"),
    "monitor.sinks.wandb.name": (None, "a run has the name of its directory"),
    "monitor.sinks.wandb.tags": ([], "the client takes tags from WANDB_TAGS"),
    "monitor.samples.max_chars": (4000, "a text has at most 4000 characters"),
    "monitor.samples.max_mib": (64.0, "samples.jsonl holds at most 64 MiB"),
    "monitor.noise_ema": (0.9, "running means decay by 0.9 a step"),
    "monitor.alarms.again_after": (None, "a rule goes off once, until its condition has ceased and come back"),
    "data.train.id_key": (None, "rows are named by their column id, else by their number"),
    "data.validation.id_key": (None, "rows are named by their column id, else by their number"),
    "data.curriculum": (None, "every epoch visits every prompt once; `paper sanity-set` keeps problems by difficulty"),
    "validation.repeated_rows": ("merge", "equal rows are one problem; raise validation.num_samples"),
    "data.prompt.truncation": ("refuse", "a longer prompt ends the run, or is left out by data.prompt.overlong: drop"),
    "data.cache": ("auto", "every start tokenizes its files"),
    "batch.oversample": (None, "rollout.in_flight.mode: keep or abort_and_resume trains on while long responses go on"),
    "checkpoint.keep_best": (None, "keep_last: 0 keeps every checkpoint, to choose from"),
    "rollout.servers.token_file": (None, "write: export MRL_SERVER_TOKEN=$(cat FILE)"),
    "rollout.servers.retries": (3, "a request is sent again up to three times"),
    "rollout.servers.concurrency": (None, "a server computes rollout.max_num_seqs responses at a time"),
    "rollout.servers.weights_stall_s": (60.0, "an update that stands still for 60 s breaks off"),
    "rollout.enable_prefix_caching": (True, "equal beginnings of prompts are computed once wherever vLLM can"),
    "schedule.weight_decay_end": (None, "the weight decay stays learner.optimizer.weight_decay"),
    "schedule.weight_decay_style": ("linear", "the weight decay stays learner.optimizer.weight_decay"),
    "exact.kv_cache": (True, "keys and values of earlier tokens are always kept"),
    "exact.noise.in_validation": (False, "validation measures the policy without the dose"),
}
"""Keys that earlier versions had: the value at which each did nothing, and what a recipe with another value is told.
Resolved recipes of earlier runs hold them, and are read without them. The way to a key leads through lists."""


def without_removed(values: Any) -> Any:
    """Return ``values`` of a recipe without the `REMOVED` keys that have no effect."""
    for path, (neutral, _) in REMOVED.items():
        values = _without(values, path.split("."), neutral)
    return values


def _without(values: Any, path: list[str], neutral: Any) -> Any:
    key, *below = path
    if isinstance(values, list):
        return [_without(item, path, neutral) for item in values]
    if not isinstance(values, dict) or key not in values:
        return values
    removed = values[key]
    if below:
        return {**values, key: _without(removed, below, neutral)}
    if type(removed) is type(neutral) and removed == neutral:
        return {name: value for name, value in values.items() if name != key}
    return values


class Recipe(RecipeSections):
    """All sections (`config.sections`), and the promise that they go together (`section_problems`)."""

    @model_validator(mode="before")
    @classmethod
    def _without_removed(cls, values: Any) -> Any:
        return without_removed(values)

    @model_validator(mode="after")
    def _sections_fit(self) -> Recipe:
        if problems := section_problems(self):
            raise ValueError("\n".join(problems))
        return self
