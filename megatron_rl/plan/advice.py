"""What does not fit, by how much, and what to change: sentences for a person, each change tried before it is named."""

from __future__ import annotations

import math

from megatron_rl.config.learner import OffloadConfig
from megatron_rl.plan.hardware import GIB
from megatron_rl.plan.memory import MemoryPlan, Phase, largest_utilization, memory_plan
from megatron_rl.plan.search import Layout, offload_choices, offload_setting
from megatron_rl.plan.timing import StepTime
from megatron_rl.plan.workload import Workload


def problems(work: Workload, plan: MemoryPlan, layouts: list[Layout]) -> list[str]:
    """One entry per thing that does not fit; empty where all does."""
    found = []
    for phase in plan.phases:
        if phase.missing > 0:
            what, size = max(phase.items, key=lambda item: item[1])
            found.append(
                f"{phase.name}: {phase.total / GIB:.1f} GiB a GPU, {phase.missing / GIB:.1f} GiB more than the "
                f"{phase.capacity / GIB:.1f} of one {work.gpu.name}; most is {what}, {size / GIB:.1f} GiB. "
                + _remedy(work, plan, phase.name)
            )
    if not plan.holds_longest:
        found.append(_cache_problem(work, plan))
    if found:
        fitting = next((layout for layout in layouts if layout.fits), None)
        found.append(_instead(work, fitting))
    return found


def deadline_problem(work: Workload, time: StepTime) -> list[str]:
    """A round of sampling that takes longer than `rollout.deadline_s` ends the run; empty where none does."""
    deadline, round_s = work.recipe.rollout.deadline_s, time.generate / max(1.0, work.sampling_rounds)
    if deadline is None or round_s <= deadline:
        return []
    return [
        f"generating: {round_s:.0f} s a round, longer than rollout.deadline_s ({deadline:g}): the run would end. Raise "
        f"rollout.deadline_s above that, shorten responses or use more GPUs"
    ]


def host_problem(work: Workload, host: Phase) -> list[str]:
    """Host memory beyond what a node has; empty where it suffices."""
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
    """The largest microbatch that fits, in steps of 1024; None where not even one longest sequence does."""
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
