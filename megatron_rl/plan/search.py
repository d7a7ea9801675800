"""Layouts of the learner for a number of ranks, and what leaves the GPU while the engine generates: those that fit
first, fastest first."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from megatron_rl.config.learner import OffloadConfig, ParallelConfig
from megatron_rl.config.model_rules import layout_problems, lora_problems
from megatron_rl.plan.hardware import MOST_UTILIZATION
from megatron_rl.plan.host import host_phase
from megatron_rl.plan.memory import MemoryPlan, Phase, largest_utilization, memory_plan
from megatron_rl.plan.timing import StepTime, step_time
from megatron_rl.plan.workload import Workload

PARTS = ("gradients", "optimizer", "weights", "during_passes")
_SIZE_KEYS = ("tensor", "pipeline", "context", "expert", "expert_tensor")
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
MIN_CONTEXT_TOKENS = 4096
"""Tokens of the longest sequence that a context-parallel rank has at least, in the layouts that are looked at: shorter
sequences fit on fewer ranks, and are better spread over data-parallel ones."""


@dataclass(frozen=True)
class Layout:
    parallel: ParallelConfig
    offload: OffloadConfig
    memory: MemoryPlan
    host: Phase
    time: StepTime
    utilization: float | None  # of a colocated engine; of the recipe's own layout the recipe's
    is_recipes: bool
    sets_offload: bool  # another one than the recipe's

    @property
    def fits(self) -> bool:
        return self.memory.fits and self.host.missing <= 0

    @property
    def overrides(self) -> str:
        """What makes a recipe have this layout."""
        settings = [f"--set learner.parallel.{key}={getattr(self.parallel, key)}" for key in _SIZE_KEYS]
        if self.sets_offload:
            settings.append(offload_setting(self.offload))
        if self.utilization is not None:
            settings.append(f"--set rollout.gpu_memory_utilization={int(self.utilization * 100) / 100:g}")
        return " ".join(settings)

    def __str__(self) -> str:
        p = self.parallel
        expert = f" EP{p.expert} ETP{p.expert_tensor}" if p.expert * p.expert_tensor > 1 else ""
        away = letters(self.offload)
        context = f" CP{p.context}" if p.context > 1 else ""
        return f"TP{p.tensor} PP{p.pipeline}{context}{expert}" + f" -{away}" * bool(away)


def letters(offload: OffloadConfig) -> str:
    """What leaves, a letter each: gradients, optimizer, weights; P: during passes."""
    return "".join(letter for letter, part in zip("gowP", PARTS, strict=True) if getattr(offload, part))


def offload_setting(offload: OffloadConfig) -> str:
    """What makes a recipe have it, whatever it has now."""
    return " ".join(f"--set learner.offload.{part}={str(getattr(offload, part)).lower()}" for part in PARTS)


def offload_choices(work: Workload) -> list[OffloadConfig]:
    """The recipe's own, and those worth a look with its engine, cheapest first. Gradients cost nothing to free."""
    engine, own = work.recipe.rollout.engine, work.recipe.learner.offload
    if engine == "vllm_server":
        choices = [{}, {"optimizer": True, "during_passes": True}]
    else:
        free, states = {"gradients": True}, {"gradients": True, "optimizer": True}
        choices = [{}, free, states, states | {"during_passes": True}]
        if engine == "vllm":
            choices += [states | {"weights": True}, states | {"weights": True, "during_passes": True}]
    found = [OffloadConfig(**choice) for choice in choices]
    return found if own in found else [*found, own]


def suggest(work: Workload) -> list[Layout]:
    """Every legal layout on the workload's ranks, with the offload that suits it best, and the recipe's own: what fits
    by step time, then what does not by what it lacks."""
    found, choices = [judge(work, work.parallel, work.recipe.learner.offload)], offload_choices(work)
    for parallel in _legal(work):
        best = min((judge(work, parallel, offload) for offload in choices), key=_rank)
        if not (best.is_recipes and best.utilization == found[0].utilization):
            found.append(best)
    return sorted(found, key=_rank)


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
    own = work.parallel
    candidates = {tuple(getattr(own, key) for key in _SIZE_KEYS): own}
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
    """``work`` in this layout, a colocated engine with as much of the GPU as the learner leaves it. The recipe's own
    layout has the recipe's share, or what is left if that is less."""
    moved, utilization = work.with_learner(parallel=parallel, offload=offload), None
    rollout, own = work.recipe.rollout, work.recipe.learner.offload
    is_recipes = parallel == work.parallel and offload == own
    if rollout.engine == "vllm" and rollout.kv_cache_gib is None:
        most = rollout.gpu_memory_utilization if is_recipes else MOST_UTILIZATION
        utilization = min(most, largest_utilization(moved))
    memory = memory_plan(moved, utilization=utilization)
    time = step_time(moved, memory.engine)
    return Layout(parallel, offload, memory, host_phase(moved, memory), time, utilization, is_recipes, offload != own)
