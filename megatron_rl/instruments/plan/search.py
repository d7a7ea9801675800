"""A search for layouts and offload settings: those that fit, fastest first; and what to change where nothing does."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

from megatron_rl.config import Recipe
from megatron_rl.config.learner import OffloadConfig, ParallelConfig
from megatron_rl.config.model_rules import layout_problems, lora_problems, rollout_problems
from megatron_rl.instruments.plan.hardware import GIB, MOST_UTILIZATION, Gpu
from megatron_rl.instruments.plan.memory import (
    MemoryPlan,
    Phase,
    host_phase,
    largest_utilization,
    memory_plan,
)
from megatron_rl.instruments.plan.timing import StepTime, step_time
from megatron_rl.instruments.plan.workload import Workload, make_workload
from megatron_rl.model.architecture import Architecture

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
        """Whether everything fits with its margin."""
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
    layouts, choices = [], offload_choices(work)
    if not layout_problems(work.parallel, work.architecture, work.ranks):
        layouts.append(judge(work, work.parallel, work.recipe.learner.offload))
    for parallel in _legal(work):
        best = min((judge(work, parallel, offload) for offload in choices), key=_rank)
        if not (best.is_recipes and layouts and best.utilization == layouts[0].utilization):
            layouts.append(best)
    return sorted(layouts, key=_rank)


def _rank(layout: Layout) -> tuple[float, float, int, str]:
    missing = max(0.0, layout.host.missing, *(phase.missing + phase.margin for phase in layout.memory.phases))
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
    moved, utilization = work.with_keys("learner", parallel=parallel, offload=offload), None
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


MOST_TIMES = 64  # of the fewest GPUs, up to which `fewest_gpus` looks


def fewest_gpus(recipe: Recipe, a: Architecture, gpu: Gpu, nodes: int | None, node: int | None, *sizes: Any) -> str:
    """Return a table: numbers of GPUs, from the fewest on which a layout fits, with the cheapest layout of each.

    ``nodes`` and ``node``: most nodes, and GPUs in one; None: any number, of 8. Servers' GPUs come on top.
    """
    node, lines, number = node or 8, [], 1
    servers = recipe.rollout.servers.num_expected * recipe.rollout.tensor_parallel
    servers = servers if recipe.rollout.engine == "vllm_server" else 0
    first = None
    while number <= (nodes or 512) * node and number <= (first or 512) * MOST_TIMES:
        work = make_workload(recipe, a, gpu, max(1, number // node), min(number, node), *sizes, checks=False)
        divides = work.recipe.rollout.engine == "vllm_server" or number % recipe.rollout.tensor_parallel == 0
        best = next((layout for layout in suggest(work) if layout.fits), None) if divides else None
        if best is not None:
            first = first or number
            all_gpus, step_s = number + servers, best.time.total
            hours = step_s * all_gpus / 3600
            lines.append(f"  {all_gpus:5d}  {step_s:8.0f} s a step, {hours:7.2f} GPU hours  {best}: {best.overrides}")
        number *= 2
    if not lines:
        return f"no layout of up to {(nodes or 512) * node} {gpu.name} fits with the other keys as they are"
    of_servers = f", {servers} of them servers'" if servers else ""
    return "\n".join([f"fewest: {first + servers} {gpu.name}{of_servers}; the cheapest layout of each number", *lines])


# Sentences on what does not fit, by how much, and what to change. Each suggested change was tried first.


def problems(work: Workload, plan: MemoryPlan, layouts: Callable[[], list[Layout]]) -> list[str]:
    """Return a message per part that does not fit; empty if all fits."""
    messages = []
    for phase in plan.phases:
        if phase.is_refused:
            what, size = max(phase.items, key=lambda item: item[1])
            messages.append(
                f"{phase.name}: {phase.total / GIB:.1f} GiB a GPU, {phase.missing / GIB:.1f} GiB more than the "
                f"{phase.capacity / GIB:.1f} of one {work.gpu.name}; most is {what}, {size / GIB:.1f} GiB. "
                + _remedy(work, plan, phase.name)
            )
    if not plan.holds_longest:
        messages.append(_cache_problem(work, plan))
    if not all(one.sequences(one.longest) >= 1 for one in plan.teachers):
        messages.append(
            "teaching: a teacher's cache does not hold the longest sequence; raise rollout.gpu_memory_utilization, "
            "which is each engine's own share, or rollout.kv_cache_gib"
        )
    if messages and plan.teachers:
        messages.append("teachers stay on these GPUs; with teacher.engine vllm_server they have GPUs of their own")
    if messages:
        fitting = next((layout for layout in layouts() if layout.fits), None)
        gpus = f"{work.ranks} {work.gpu.name}"
        if fitting is None:
            messages.append(f"no layout of {gpus} fits with the other keys as they are; use more or larger GPUs")
        else:
            messages.append(f"a layout of {gpus} that fits: {fitting.overrides}")
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
    if phase in ("generating", "teaching") and plan.placement == "colocated":
        most, tried = largest_utilization(work), []
        if work.recipe.rollout.kv_cache_gib is not None:
            tried.append("lower rollout.kv_cache_gib, or raise rollout.tensor_parallel")
        elif most > 0 and memory_plan(work, utilization=most).holds_longest:
            tried.append(f"set rollout.gpu_memory_utilization to at most {most:.2f}")
        choices = offload_choices(work)
        freed = next((c for c in choices if memory_plan(work.with_keys("learner", offload=c)).fits), None)
        if freed is not None:
            tried.append(f"let the learner leave: {offload_setting(freed)}")
        if tried:
            return "Enough by itself: " + "; or ".join(tried)
        return "The learner at rest leaves too little: spread it over more ranks, or use rollout.engine: vllm_server"
    learner, tried = work.recipe.learner, []
    if not learner.offload.during_passes:
        away = learner.offload.model_copy(update={"optimizer": True, "during_passes": True})
        if _holds(work, phase, offload=away):
            tried.append("set learner.offload.optimizer and learner.offload.during_passes: true")
    if learner.recompute != "full" and _holds(work, phase, recompute="full"):
        tried.append("set learner.recompute: full")
    tokens = _fewer_tokens(work, phase)
    if tokens:
        tried.append(f"lower learner.max_tokens_per_microbatch to {tokens}")
    return ("Enough by itself: " + "; or ".join(tried)) if tried else "Fewer tokens or recomputation alone do not do"


def _fewer_tokens(work: Workload, phase: str) -> int | None:
    """Return the largest microbatch that fits, in steps of 1024; None if even the longest sequence does not fit."""
    tokens = work.microbatch_tokens // 1024 * 1024
    while tokens >= work.longest:
        if tokens < work.recipe.learner.max_tokens_per_microbatch and _holds(
            work, phase, max_tokens_per_microbatch=tokens
        ):
            return tokens
        tokens -= 1024
    return None


def _holds(work: Workload, phase: str, **changes: object) -> bool:
    """Whether the phase of this name fits with other keys of `learner`."""
    return all(one.is_sure for one in memory_plan(work.with_keys("learner", **changes)).phases if one.name == phase)


def _cache_problem(work: Workload, plan: MemoryPlan) -> str:
    engine, rollout = plan.cache, work.recipe.rollout
    needed = engine.longest * engine.token_bytes + engine.sequence_bytes
    lacking = needed - engine.cache
    text = (
        f"generating: the engine's cache holds {engine.tokens} tokens, one longest sequence has {engine.longest} "
        f"(data.prompt.max_length + rollout.max_response_length); {lacking / GIB:.1f} GiB a GPU are lacking. "
    )
    if rollout.kv_cache_gib is not None:
        return text + f"Raise rollout.kv_cache_gib to {math.ceil(4 * needed / GIB) / 4}"
    needed = rollout.gpu_memory_utilization + lacking / GIB / work.gpu.memory_gib
    if plan.placement == "colocated" and needed <= largest_utilization(work):
        return text + f"Raise rollout.gpu_memory_utilization to {math.ceil(20 * needed) / 20:.2f}"
    if plan.placement == "exact":
        return text + f"Raise rollout.gpu_memory_utilization to {math.ceil(20 * needed) / 20:.2f}"
    return text + _wider_engine(work)


def _wider_engine(work: Workload) -> str:
    """Return the smallest `rollout.tensor_parallel` that holds the longest sequence and that nothing refuses."""
    prompt = work.recipe.data.prompt.max_length
    for size in SIZES:
        if size <= work.recipe.rollout.tensor_parallel:
            continue
        wider = work.with_keys("rollout", tensor_parallel=size)
        refused = rollout_problems(wider.recipe.rollout, work.architecture, prompt, work.ranks, "cuda")
        if not refused and memory_plan(wider).holds_longest:
            return f"Enough by itself: set rollout.tensor_parallel to {size}"
    return "No rollout.tensor_parallel that these GPUs allow is enough: shorten responses, or use larger GPUs"
