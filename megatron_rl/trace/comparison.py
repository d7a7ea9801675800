"""A trace against `plan`: whether the arithmetic that users decide by is that of the learner they will get."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.plan.hardware import GIB, GRAPHS_GIB, RUNTIME_GIB
from megatron_rl.plan.learner import learner_memory
from megatron_rl.plan.memory import PLACEMENT, learner_stages
from megatron_rl.plan.workload import Workload
from megatron_rl.trace.learner import RankTrace
from megatron_rl.trace.recorder import DEVICE

TOLERANCE = 0.05  # of a static kind; what `plan` leaves out is padding of buffers


@dataclass(frozen=True)
class Comparison:
    """One static kind on one rank, in bytes."""

    rank: int
    kind: str
    traced: float
    planned: float

    @property
    def error(self) -> float:
        """Of the plan, relative to the trace; 0 where both are 0."""
        return 0.0 if self.planned == self.traced else (self.planned - self.traced) / max(self.traced, 1.0)

    @property
    def holds(self) -> bool:
        return abs(self.error) <= TOLERANCE


def compare_static(work: Workload, trace: RankTrace) -> list[Comparison]:
    """Each static kind of a rank against what `plan` says of its pipeline stage, and their sum."""
    planned = learner_stages(work)[trace.stage]
    kinds = {
        "weights": planned.weights,
        "gradients": planned.gradients,
        "master weights": planned.masters,
        "moments": planned.moments,
    }
    found = [Comparison(trace.rank, kind, trace.static[kind], size) for kind, size in kinds.items()]
    return [*found, Comparison(trace.rank, "all static", sum(trace.static.values()), planned.static)]


def room_for_a_save(work: Workload, trace: RankTrace) -> float:
    """Bytes of a GPU that are free when a checkpoint is written: beside the learner at rest, the runtime and, where it
    is colocated, the engine asleep."""
    asleep = GRAPHS_GIB * GIB if is_colocated(work) else 0.0
    return work.gpu.memory_gib * GIB - RUNTIME_GIB * GIB - asleep - sum(trace.static.values())


def planned_passes(work: Workload, fused: bool) -> float:
    """What `plan` says a forward and a backward pass add, with uniform routes: ``fused`` for TransformerEngine's
    layers, else for those that are traced."""
    (stage,) = learner_memory(
        work.architecture,
        work.recipe.learner,
        work.ranks,
        work.microbatch_tokens,
        fp32_head=work.recipe.precision.fp32_head,
        fused=fused,
    )
    return stage.activations + max(stage.head, stage.layer) + stage.buffers


def save_fits(work: Workload, trace: RankTrace) -> bool:
    return trace.phase("checkpoint").transient(DEVICE) <= room_for_a_save(work, trace)


def differences(work: Workload, traces: list[RankTrace]) -> list[str]:
    """What differs from `plan` by more than `TOLERANCE`, and saves that do not fit; empty where all is well."""
    found = [
        f"rank {line.rank}: {line.kind}: {line.planned / GIB:.2f} GiB by plan, {line.traced / GIB:.2f} traced "
        f"({line.error:+.1%})"
        for trace in traces
        for line in compare_static(work, trace)
        if not line.holds
    ]
    for trace in traces:
        if not save_fits(work, trace):
            needed, free = trace.phase("checkpoint").transient(DEVICE) / GIB, room_for_a_save(work, trace) / GIB
            form = trace.checkpoint_format
            found.append(f"rank {trace.rank}: a save in the format {form} adds {needed:.2f} GiB, {free:.2f} are free")
    return found


def is_colocated(work: Workload) -> bool:
    """Whether an engine sleeps on the learner's GPUs."""
    return PLACEMENT[work.recipe.rollout.engine] == "colocated"
