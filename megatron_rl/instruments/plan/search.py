"""Seconds of a step by arithmetic, and a search by it for layouts and offload settings: those that fit, fastest first.

The time of a part is work over rate, and the larger of computation and memory traffic.
Each rate is a data-sheet figure times a constant of `plan.hardware`. Use the result to find the dominant part and to
compare layouts; it is not a promise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

from megatron_rl.config.learner import OffloadConfig, ParallelConfig
from megatron_rl.config.model_rules import layout_problems, lora_problems
from megatron_rl.instruments.plan import hardware as hw
from megatron_rl.instruments.plan.generation import Decoding, EngineMemory, exact_generation, prefill_costs
from megatron_rl.instruments.plan.hardware import GIB, MOST_UTILIZATION
from megatron_rl.instruments.plan.learner import (
    BYTES,
    GRADIENT_BYTES,
    active_parameters,
    key_value_width,
    query_width,
    stage_parameters,
    total_parameters,
)
from megatron_rl.instruments.plan.memory import (
    MemoryPlan,
    Phase,
    exact_cache,
    host_phase,
    largest_utilization,
    learner_stages,
    memory_plan,
)
from megatron_rl.instruments.plan.workload import Workload
from megatron_rl.model.architecture import Architecture
from megatron_rl.model.families import FAMILIES
from megatron_rl.model.families.weights import EXPERT

RECOMPUTED = {
    "none": 0.0,
    "selective": 0.5,
    "full": 1.0,
}  # forward passes repeated in the backward pass; selective: MoE


@dataclass(frozen=True)
class StepTime:
    """Seconds of the phases of one rollout step."""

    generate: float
    old_logprobs: float
    update: float  # forward and backward of all mini-batches, with their communication
    communication: float  # the part of `update` and `old_logprobs` that is communication
    optimizer: float
    refit: float
    offload: float = 0.0  # offload copies in both directions
    scores: float = 0.0  # a pass of each response alone: objective.advantage min_variance
    acceptance: float = 0.0  # responses that judge an update, their log-probs, and the weights sent once more
    samples_ahead: bool = False  # rollout.max_staleness > 0: servers generate the next batch meanwhile

    @property
    def hidden(self) -> float:
        """Seconds in which generating and learning overlap, if they have separate GPUs."""
        learning = self.old_logprobs + self.scores + self.update + self.optimizer
        return min(self.generate, learning) if self.samples_ahead else 0.0

    @property
    def total(self) -> float:
        learning = self.old_logprobs + self.scores + self.update + self.optimizer
        return self.generate + learning + self.refit + self.offload + self.acceptance - self.hidden


def step_time(work: Workload, engine: EngineMemory | None) -> StepTime:
    """Return the seconds of a step. ``engine`` None: the learner itself generates (exact)."""
    recipe, updates = work.recipe, work.recipe.batch.minibatches
    generate, refit = _sampling(work, work, engine), 0.0 if engine is None else _refit(work)
    forward = _forward_seconds(work)
    talk = _talk(work)  # communication of one forward pass over the step's tokens
    again = RECOMPUTED[recipe.learner.recompute]
    bubble = (1.0 + (work.parallel.pipeline - 1) / work.microbatches) * _slowest_stage(work)
    passes = (3 + again) * forward + (2 + again) * talk
    scored = recipe.objective.advantage == "min_variance"
    return StepTime(
        generate=generate,
        old_logprobs=_logprobs(work) if recipe.makes_old_logprobs else 0.0,
        update=passes * bubble,
        communication=(2 + again + recipe.makes_old_logprobs) * talk * bubble,
        optimizer=updates * _optimizer(work),
        refit=refit,
        offload=_offload(work),
        # Responses go through the pipeline one after the other, so that each stage waits for the others.
        scores=passes * work.parallel.pipeline * _slowest_stage(work) if scored else 0.0,
        acceptance=_acceptance(work, engine, refit),
        samples_ahead=recipe.rollout.max_staleness > 0,
    )


def _sampling(work: Workload, step: Workload, engine: EngineMemory | None) -> float:
    """Return the seconds in which the engine of ``work`` samples what ``step`` asks for."""
    return exact_generation(step, exact_cache(work)) if engine is None else _generation(step, engine)


def _acceptance(work: Workload, engine: EngineMemory | None, refit: float) -> float:
    """Return the seconds of judging an update: responses to held-out prompts, their log-probs, and the weights that
    are sent after it, whether it was kept or undone."""
    config = work.recipe.acceptance
    if config is None:
        return 0.0
    judged = work.with_batch(
        prompts=config.prompts, filter_groups=False, max_generations=1, generation_prompts=None, oversample=None
    ).with_rollout(num_samples=config.num_samples)
    return _sampling(work, judged, engine) + _logprobs(judged) + refit


# -- learning


def _logprobs(work: Workload) -> float:
    """Return the seconds of a pass for the log-probs of a step's responses."""
    is_moe, bubble = work.architecture.is_moe, 1.0 + (work.parallel.pipeline - 1) / work.microbatches
    forward = _forward_seconds(work) * hw.LEARNER_MFU[is_moe] / hw.PREFILL_MFU[is_moe]
    return (forward + _talk(work)) * bubble * _slowest_stage(work)


def flops_forward(a: Architecture, tokens: float, length: float, attention_cost: float = 1.0) -> float:
    """Return the operations of a forward pass: two per active parameter and token, and causal attention.

    Those of attention count ``attention_cost`` times.
    """
    return tokens * (2 * active_parameters(a) + attention_cost * 2 * a.num_layers * query_width(a) * length)


def _slowest_stage(work: Workload) -> float:
    """Return the work of the stage with the head over that of the mean stage; all stages wait for it."""
    a, stages = work.architecture, work.parallel.pipeline
    head = a.vocab_size * a.hidden_size
    return ((active_parameters(a) - head) / stages + head) / (active_parameters(a) / stages)


def _forward_seconds(work: Workload) -> float:
    rate = work.gpu.flops(work.recipe.learner.dtype) * hw.LEARNER_MFU[work.architecture.is_moe] * work.ranks
    cost = work.gpu.attention_cost
    return flops_forward(work.architecture, work.trained_tokens, work.mean_sequence, cost) / rate


def _talk(work: Workload) -> float:
    """Return the seconds of tensor-, context- and expert-parallel exchanges in a forward pass, without overlap.

    Per layer, tensor parallelism gathers twice and reduces twice; context parallelism sends all keys and values to
    every rank; an MoE block sends k rows per token and gets them back.
    """
    a, p, b = work.architecture, work.parallel, BYTES[work.recipe.learner.dtype]
    tokens = work.trained_tokens / work.data_parallel / p.context  # of one rank
    row = a.hidden_size * b
    tensor = 4 * a.num_layers / p.pipeline * tokens * row * (p.tensor - 1) / p.tensor
    context_bytes = 2 * a.num_layers / p.pipeline * tokens * (p.context - 1) * key_value_width(a) * b / p.tensor
    rows = tokens / p.tensor * a.experts_per_token * p.expert_tensor
    expert = 2 * sum(a.moe_layers) / p.pipeline * rows * row * (p.expert - 1) / p.expert
    return (
        tensor / _link(work, p.tensor)
        + context_bytes / _link(work, p.tensor * p.context)
        + expert / _link(work, p.expert * p.expert_tensor)
    )


def _optimizer(work: Workload) -> float:
    """Return the seconds of reducing gradients and gathering weights over data-parallel ranks, and of Adam's pass."""
    p, stage = work.parallel, stage_parameters(work.architecture, work.parallel)[0]
    seconds = 0.0
    expert_dp = max(1, work.ranks // (p.expert * p.expert_tensor * p.pipeline))
    for number, replicas in ((stage.dense, work.data_parallel * p.context), (stage.expert, expert_dp)):
        moved = number * (GRADIENT_BYTES + BYTES[work.recipe.learner.dtype]) * (replicas - 1) / replicas
        seconds += moved / _link(work, work.ranks if replicas > 1 else 1)
        seconds += number / replicas * hw.ADAM_BYTES / work.gpu.bandwidth
    return seconds


def _link(work: Workload, group: int) -> float:
    """Return the bytes per second of a collective among ``group`` ranks, neighbours first."""
    return hw.LINK * (work.gpu.nvlink if group <= work.nvlink_gpus else work.gpu.network)


# -- generating


def _generation(work: Workload, engine: EngineMemory) -> float:
    """Return the seconds of decoding at the concurrency of the cache, the longest response alone, and prefill."""
    recipe, tp = work.recipe, work.recipe.rollout.tensor_parallel
    colocated = recipe.rollout.engine == "vllm"
    engines = max(1, work.ranks // tp) if colocated else recipe.rollout.servers.num_expected
    num = work.sampled_sequences / engines
    concurrency = max(1.0, min(num, recipe.rollout.max_num_seqs, engine.tokens / work.mean_sequence))
    steps = num * work.mean_response / concurrency
    tail = max(0.0, recipe.rollout.max_response_length - steps)
    prompts = num / (recipe.rollout.num_samples if recipe.rollout.enable_prefix_caching else 1)
    token, square = prefill_costs(work)
    prefill = prompts * work.mean_prompt * (token + square * work.mean_prompt)
    return steps * _decoding_step(work, engine, concurrency) + tail * _decoding_step(work, engine, 1.0) + prefill


def _decoding_step(work: Workload, engine: EngineMemory, sequences: float) -> float:
    """Return the seconds of a decoding step with all sequences at half of the mean response."""
    context = sequences * (work.mean_prompt + work.mean_response / 2)
    return Decoding.of(work, engine).step(sequences, context)


def _refit(work: Workload) -> float:
    """Return the seconds of a weight update: to local engines, or to servers by broadcast (overlapped) or by files."""
    gathered, handling = weights_seconds(work)
    if work.recipe.rollout.engine != "vllm_server":
        return gathered + handling
    model_bytes = total_parameters(work.architecture) * BYTES[work.recipe.rollout.dtype]
    if not work.recipe.rollout.why_files:
        return max(gathered, model_bytes / (hw.LINK * work.gpu.network)) + handling
    return gathered + handling + 2 * model_bytes / hw.DISK  # once written, once read


def weights_seconds(work: Workload) -> tuple[float, float]:
    """Return the seconds of a weight update on the links, and of handling its tensors.

    Every rank gathers the whole model, tensor by tensor. A sleeping engine drops its old weights without a copy.
    """
    a = work.architecture
    model_bytes = total_parameters(a) * BYTES[work.recipe.rollout.dtype]
    gathered = model_bytes / _link(work, work.ranks) if work.ranks > 1 else 0.0
    matrices = num_expert_matrices(a)
    handling = (num_tensors(a) - matrices) * hw.TENSOR_OVERHEAD_S + matrices * hw.EXPERT_OVERHEAD_S
    return gathered, handling


def _offload(work: Workload) -> float:
    """Return the seconds of offload copies.

    Each part leaves and returns once per step; Adam's states do so in every update if they are away during passes. If
    sampling uses older weights, the current ones leave and older ones return once per step.
    """
    offload, updates = work.recipe.learner.offload, work.recipe.batch.minibatches
    stages = learner_stages(work)
    states, weights = (max(getattr(stage, part) for stage in stages) for part in ("states", "weights"))
    rounds = updates if offload.during_passes else 1
    kept_weights = offload.weights + (work.earlier_weights > 0)
    moved = 2 * (rounds * states * offload.optimizer + weights * kept_weights)
    return moved / (hw.HOST_LINK * work.gpu.host_link)


def num_tensors(a: Architecture) -> int:
    """Return the number of tensors of a Hugging Face checkpoint."""
    rows = [weight for weight in FAMILIES[a.model_type].layer if EXPERT not in weight.hf[0]]
    in_layer = {is_moe: sum(len(w.hf) for w in rows if w.is_in(a, is_moe)) for is_moe in set(a.moe_layers)}
    outside = 3 - a.tie_embeddings  # embedding, last norm, head
    return sum(in_layer[is_moe] for is_moe in a.moe_layers) + outside + num_expert_matrices(a)


def num_expert_matrices(a: Architecture) -> int:
    """Return the number of tensors that belong to single experts."""
    rows = [weight for weight in FAMILIES[a.model_type].layer if EXPERT in weight.hf[0]]
    return sum(a.moe_layers) * sum(len(weight.hf) for weight in rows) * a.num_experts


PARTS = ("gradients", "optimizer", "weights", "during_passes")
_SIZE_KEYS = ("tensor", "pipeline", "context", "expert", "expert_tensor")
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
MIN_CONTEXT_TOKENS = 4096
"""Fewest tokens of the longest sequence per context-parallel rank in the searched layouts. Shorter sequences
fit on fewer ranks and are better spread over data-parallel ones."""


@dataclass(frozen=True)
class Layout:
    parallel: ParallelConfig
    offload: OffloadConfig
    memory: MemoryPlan
    host: Phase
    time: StepTime
    utilization: float | None  # of a colocated engine; the recipe's value for the recipe's own layout
    is_recipes: bool
    sets_offload: bool  # whether its offload differs from the recipe's

    @property
    def fits(self) -> bool:
        return self.memory.fits and self.host.missing <= 0

    @property
    def overrides(self) -> str:
        """The overrides that give a recipe this layout."""
        settings = [f"--set learner.parallel.{key}={getattr(self.parallel, key)}" for key in _SIZE_KEYS]
        if self.sets_offload:
            settings.append(offload_setting(self.offload))
        if self.utilization is not None:
            settings.append(f"--set rollout.gpu_memory_utilization={int(self.utilization * 100) / 100:g}")
        return " ".join(settings)

    def __str__(self) -> str:
        p = self.parallel
        expert = f" EP{p.expert} ETP{p.expert_tensor}" if p.expert * p.expert_tensor > 1 else ""
        away = f" -{letters(self.offload)}" if letters(self.offload) else ""
        context = f" CP{p.context}" if p.context > 1 else ""
        return f"TP{p.tensor} PP{p.pipeline}{context}{expert}{away}"


def letters(offload: OffloadConfig) -> str:
    """Return a letter per offloaded part: gradients, optimizer, weights; P: during passes."""
    return "".join(letter for letter, part in zip("gowP", PARTS, strict=True) if getattr(offload, part))


def offload_setting(offload: OffloadConfig) -> str:
    """Return the overrides that give any recipe this offload."""
    return " ".join(f"--set learner.offload.{part}={str(getattr(offload, part)).lower()}" for part in PARTS)


def offload_choices(work: Workload) -> list[OffloadConfig]:
    """Return the recipe's offload and useful ones for its engine, cheapest first. Freeing gradients costs nothing."""
    engine, recipes_offload = work.recipe.rollout.engine, work.recipe.learner.offload
    if engine == "vllm_server":
        choices = [{}, {"optimizer": True, "during_passes": True}]
    else:
        free, states = {"gradients": True}, {"gradients": True, "optimizer": True}
        choices = [{}, free, states, states | {"during_passes": True}]
        if engine == "vllm":
            choices += [states | {"weights": True}, states | {"weights": True, "during_passes": True}]
    offloads = [OffloadConfig(**choice) for choice in choices]
    return offloads if recipes_offload in offloads else [*offloads, recipes_offload]


def suggest(work: Workload) -> list[Layout]:
    """Return every legal layout on the workload's ranks with its best offload, and the recipe's own.

    Layouts that fit come first, by step time; then the others, by the memory that they lack.
    """
    layouts, choices = [judge(work, work.parallel, work.recipe.learner.offload)], offload_choices(work)
    for parallel in _legal(work):
        best = min((judge(work, parallel, offload) for offload in choices), key=_rank)
        if not (best.is_recipes and best.utilization == layouts[0].utilization):
            layouts.append(best)
    return sorted(layouts, key=_rank)


def _rank(layout: Layout) -> tuple[float, float, int, str]:
    missing = max(0.0, layout.host.missing, *(phase.missing for phase in layout.memory.phases))
    parts = sum(getattr(layout.offload, part) for part in PARTS)
    return missing, layout.time.total, parts, str(layout)


def _legal(work: Workload) -> list[ParallelConfig]:
    a, exact = work.architecture, work.recipe.rollout.engine == "exact"
    tensors = [n for n in SIZES if n <= min(work.gpus_per_node, 8)]
    pipelines = [1] if exact else [n for n in SIZES if n <= work.ranks]
    experts = [n for n in SIZES if n <= min(a.num_experts, work.ranks)] if a.is_moe else [1]
    contexts = [1] if exact else [1, *(n for n in SIZES if n > 1 and work.longest >= n * MIN_CONTEXT_TOKENS)]
    recipes_parallel = work.parallel
    candidates = {tuple(getattr(recipes_parallel, key) for key in _SIZE_KEYS): recipes_parallel}
    for tensor, pipeline, context, expert in product(tensors, pipelines, contexts, experts):
        for expert_tensor in {1, tensor} if a.is_moe else {1}:
            sizes = dict(zip(_SIZE_KEYS, (tensor, pipeline, context, expert, expert_tensor), strict=True))
            candidates.setdefault(tuple(sizes.values()), ParallelConfig(**sizes))
    has_adapters = work.recipe.learner.lora is not None
    return [
        parallel
        for parallel in candidates.values()
        if not layout_problems(parallel, a, work.ranks) and not (has_adapters and lora_problems(a, parallel))
    ]


def judge(work: Workload, parallel: ParallelConfig, offload: OffloadConfig) -> Layout:
    """Return ``work`` in this layout, with a colocated engine on the memory that the learner leaves.

    The recipe's own layout has the recipe's share, or the memory left if that is less.
    """
    moved, utilization = work.with_learner(parallel=parallel, offload=offload), None
    rollout, recipes_offload = work.recipe.rollout, work.recipe.learner.offload
    is_recipes = parallel == work.parallel and offload == recipes_offload
    if rollout.engine == "vllm" and rollout.kv_cache_gib is None:
        most = rollout.gpu_memory_utilization if is_recipes else MOST_UTILIZATION
        utilization = min(most, largest_utilization(moved))
    memory = memory_plan(moved, utilization=utilization)
    time = step_time(moved, memory.engine)
    return Layout(
        parallel, offload, memory, host_phase(moved, memory), time, utilization, is_recipes, offload != recipes_offload
    )


NUM_SEQUENCES = (64, 128, 256, 512, 1024)  # searched values of `rollout.max_num_seqs`
WORTH = 0.99  # share of a step's time below which another value is proposed


def sequences_proposed(work: Workload) -> tuple[int, StepTime] | None:
    """Return the `rollout.max_num_seqs` that makes steps shorter by more than 1%, with the time of a step; else None.

    More sequences at a time read the weights less often; but the sampler's memory for each of them is taken from the
    cache. Of values within 1% of the shortest step the smallest counts: sequences beyond it only wait for the cache.
    """
    own = step_time(work, memory_plan(work).engine).total
    candidates = []
    for number in NUM_SEQUENCES:
        other = work.with_rollout(max_num_seqs=number)
        memory = memory_plan(other)
        if memory.fits:
            candidates.append((number, step_time(other, memory.engine)))
    best = min((time.total for _, time in candidates), default=own)
    if best >= WORTH * own:
        return None
    return next((number, time) for number, time in candidates if WORTH * time.total <= best)


# Sentences on what does not fit, by how much, and what to change. Each suggested change was tried first.


def problems(work: Workload, plan: MemoryPlan, layouts: list[Layout]) -> list[str]:
    """Return a message per part that does not fit; empty if all fits."""
    messages = []
    for phase in plan.phases:
        if phase.missing > 0:
            what, size = max(phase.items, key=lambda item: item[1])
            messages.append(
                f"{phase.name}: {phase.total / GIB:.1f} GiB a GPU, {phase.missing / GIB:.1f} GiB more than the "
                f"{phase.capacity / GIB:.1f} of one {work.gpu.name}; most is {what}, {size / GIB:.1f} GiB. "
                + _remedy(work, plan, phase.name)
            )
    if not plan.holds_longest:
        messages.append(_cache_problem(work, plan))
    if messages:
        fitting = next((layout for layout in layouts if layout.fits), None)
        messages.append(_instead(work, fitting))
    return messages


def deadline_problem(work: Workload, time: StepTime) -> list[str]:
    """Return a message if a round of sampling exceeds `rollout.deadline_s`, which would end the run; else empty."""
    deadline, round_s = work.recipe.rollout.deadline_s, time.generate / max(1.0, work.sampling_rounds)
    if deadline is None or round_s <= deadline:
        return []
    return [
        f"generating: {round_s:.0f} s a round, longer than rollout.deadline_s ({deadline:g}): the run would end. Raise "
        f"rollout.deadline_s above that, shorten responses or use more GPUs"
    ]


def host_problem(work: Workload, host: Phase) -> list[str]:
    """Return a message if host memory exceeds that of a node; else empty."""
    if host.missing <= 0:
        return []
    what, size = max(host.items, key=lambda item: item[1])
    offload = work.recipe.learner.offload
    keys = [f"learner.offload.{part}" for part in ("weights", "optimizer") if getattr(offload, part)]
    return [
        f"host memory: {host.total / GIB:.0f} GiB a node, {host.missing / GIB:.0f} GiB more than the "
        f"{work.host_gib:.0f} of one (--host-memory); most is {what}, {size / GIB:.0f} GiB. "
        + (f"Turn off {' or '.join(keys)}, or use more nodes" if keys else "Use fewer ranks a node")
    ]


def _remedy(work: Workload, plan: MemoryPlan, phase: str) -> str:
    if phase == "generating" and plan.placement == "colocated":
        most, tried = largest_utilization(work), []
        if work.recipe.rollout.kv_cache_gib is not None:
            tried.append("lower rollout.kv_cache_gib, or raise rollout.tensor_parallel")
        elif most > 0 and memory_plan(work, utilization=most).holds_longest:
            tried.append(f"set rollout.gpu_memory_utilization to at most {most:.2f}")
        freed = next((choice for choice in offload_choices(work) if _fits(work, choice)), None)
        if freed is not None:
            tried.append(f"let the learner leave: {offload_setting(freed)}")
        if tried:
            return "Enough by itself: " + "; or ".join(tried)
        return "The learner at rest leaves too little: spread it over more ranks, or use rollout.engine: vllm_server"
    learner, tried = work.recipe.learner, []
    if not learner.offload.during_passes:
        away = learner.offload.model_copy(update={"optimizer": True, "during_passes": True})
        if _fits_learning(work, offload=away):
            tried.append("set learner.offload.optimizer and learner.offload.during_passes: true")
    if learner.recompute != "full" and _fits_learning(work, recompute="full"):
        tried.append("set learner.recompute: full")
    tokens = _fewer_tokens(work)
    if tokens:
        tried.append(f"lower learner.max_tokens_per_microbatch to {tokens}")
    return ("Enough by itself: " + "; or ".join(tried)) if tried else "Fewer tokens or recomputation alone do not do"


def _fewer_tokens(work: Workload) -> int | None:
    """Return the largest microbatch that fits, in steps of 1024; None if even the longest sequence does not fit."""
    tokens = work.microbatch_tokens // 1024 * 1024
    while tokens >= work.longest:
        if tokens < work.recipe.learner.max_tokens_per_microbatch and _fits_learning(
            work, max_tokens_per_microbatch=tokens
        ):
            return tokens
        tokens -= 1024
    return None


def _fits(work: Workload, offload: OffloadConfig) -> bool:
    return memory_plan(work.with_learner(offload=offload)).fits


def _fits_learning(work: Workload, **changes: object) -> bool:
    return memory_plan(work.with_learner(**changes)).phases[0].missing <= 0


def _cache_problem(work: Workload, plan: MemoryPlan) -> str:
    engine, rollout = plan.cache, work.recipe.rollout
    lacking = engine.longest * engine.token_bytes - engine.cache
    text = (
        f"generating: the engine's cache holds {engine.tokens} tokens, one longest sequence has {engine.longest} "
        f"(data.prompt.max_length + rollout.max_response_length); {lacking / GIB:.1f} GiB a GPU are lacking. "
    )
    if rollout.kv_cache_gib is not None:
        return text + f"Raise rollout.kv_cache_gib to {math.ceil(4 * engine.longest * engine.token_bytes / GIB) / 4}"
    needed = rollout.gpu_memory_utilization + lacking / GIB / work.gpu.memory_gib
    if plan.placement == "colocated" and needed <= largest_utilization(work):
        return text + f"Raise rollout.gpu_memory_utilization to {math.ceil(20 * needed) / 20:.2f}"
    if plan.placement == "exact":
        return text + f"Raise rollout.gpu_memory_utilization to {math.ceil(20 * needed) / 20:.2f}"
    return text + f"Raise rollout.tensor_parallel above {rollout.tensor_parallel}"


def _instead(work: Workload, fitting: Layout | None) -> str:
    if fitting is None:
        return (
            f"no layout of {work.ranks} {work.gpu.name} fits with the other keys as they are; use more or larger GPUs"
        )
    return f"a layout of {work.ranks} {work.gpu.name} that fits: {fitting.overrides}"
