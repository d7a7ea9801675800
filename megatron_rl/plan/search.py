"""Layouts of the learner for a number of ranks, those that fit first, fastest first."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.learner import ParallelConfig
from megatron_rl.config.rules import MAX_EXACT_TENSOR_PARALLEL, layout_problems
from megatron_rl.plan.memory import MemoryPlan, largest_utilization, memory_plan
from megatron_rl.plan.timing import StepTime, step_time
from megatron_rl.plan.workload import Workload

_SIZE_KEYS = ("tensor", "pipeline", "expert", "expert_tensor")
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Layout:
    parallel: ParallelConfig
    memory: MemoryPlan
    time: StepTime
    utilization: float | None  # of a colocated engine: the recipe's, or what this layout leaves if that is less
    is_recipes: bool

    @property
    def overrides(self) -> str:
        """What makes a recipe have this layout."""
        settings = [f"--set learner.parallel.{key}={getattr(self.parallel, key)}" for key in _SIZE_KEYS]
        if self.utilization is not None:
            settings.append(f"--set rollout.gpu_memory_utilization={int(self.utilization * 100) / 100:g}")
        return " ".join(settings)

    def __str__(self) -> str:
        p = self.parallel
        expert = f" EP{p.expert} ETP{p.expert_tensor}" if p.expert * p.expert_tensor > 1 else ""
        return f"TP{p.tensor} PP{p.pipeline}{expert}"


def suggest(work: Workload) -> list[Layout]:
    """Every legal layout on the workload's ranks: what fits by step time, then what does not by what it lacks."""

    def rank(layout: Layout) -> tuple[float, float, str]:
        missing = max(0.0, *(phase.missing for phase in layout.memory.phases))
        return missing, layout.time.total, str(layout)

    return sorted((_judge(work, parallel) for parallel in _legal(work)), key=rank)


def _legal(work: Workload) -> list[ParallelConfig]:
    a, exact = work.architecture, work.recipe.rollout.engine == "exact"
    tensors = [n for n in SIZES if n <= min(work.gpus_per_node, MAX_EXACT_TENSOR_PARALLEL if exact else 8)]
    pipelines = [1] if exact else [n for n in SIZES if n <= work.ranks]
    experts = [n for n in SIZES if n <= min(a.num_experts, work.ranks)] if a.is_moe else [1]
    own = work.parallel
    candidates = {(own.tensor, own.pipeline, own.expert, own.expert_tensor): own}
    for tensor in tensors:
        for pipeline in pipelines:
            for expert in experts:
                for expert_tensor in {1, tensor} if a.is_moe else {1}:
                    sizes = {"tensor": tensor, "pipeline": pipeline, "expert": expert, "expert_tensor": expert_tensor}
                    candidates.setdefault(tuple(sizes.values()), ParallelConfig(**sizes))
    if work.recipe.learner.lora is not None:
        candidates = {key: parallel for key, parallel in candidates.items() if key[0] == 1}
    return [parallel for parallel in candidates.values() if not layout_problems(parallel, a, work.ranks)]


def _judge(work: Workload, parallel: ParallelConfig) -> Layout:
    moved, utilization = work.with_learner(parallel=parallel), None
    rollout = work.recipe.rollout
    if rollout.engine == "vllm" and rollout.kv_cache_gib is None:
        utilization = min(rollout.gpu_memory_utilization, largest_utilization(moved))
    memory = memory_plan(moved, utilization=utilization)
    return Layout(parallel, memory, step_time(moved, memory.engine), utilization, parallel == work.parallel)
