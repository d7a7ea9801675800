"""Traces as text and as JSON values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_rl.instruments.plan.hardware import GIB, GRAPHS_GIB, RUNTIME_GIB
from megatron_rl.instruments.plan.learner import learner_memory
from megatron_rl.instruments.plan.memory import PLACEMENT, learner_stages
from megatron_rl.instruments.plan.workload import Workload
from megatron_rl.instruments.trace.fake_rank import DEVICE, HOST
from megatron_rl.instruments.trace.learner import PASSES, RankTrace, why_untraced

# Compares a trace with `plan`, to check the plan's arithmetic against the real learner.


TOLERANCE = 0.05  # relative error per static kind; `plan` leaves out padding of buffers


@dataclass(frozen=True)
class Comparison:
    """One static kind on one rank, in bytes."""

    rank: int
    kind: str
    traced: float
    planned: float

    @property
    def error(self) -> float:
        """Error of the plan relative to the trace; 0 if both are 0."""
        return 0.0 if self.planned == self.traced else (self.planned - self.traced) / max(self.traced, 1.0)

    @property
    def holds(self) -> bool:
        return abs(self.error) <= TOLERANCE


def compare_static(work: Workload, trace: RankTrace) -> list[Comparison]:
    """Return the comparison of each static kind of a rank with the plan of its pipeline stage, and of their sum."""
    planned = learner_stages(work)[trace.stage]
    kinds = {
        "weights": planned.weights,
        "gradients": planned.gradients,
        "master weights": planned.masters,
        "moments": planned.moments,
    }
    comparisons = [Comparison(trace.rank, kind, trace.static[kind], size) for kind, size in kinds.items()]
    return [*comparisons, Comparison(trace.rank, "all static", sum(trace.static.values()), planned.static)]


def room_for_a_save(work: Workload, trace: RankTrace) -> float:
    """Return the free bytes of a GPU during a save, beside the resting learner, the runtime and a sleeping engine."""
    asleep = GRAPHS_GIB * GIB if is_colocated(work) else 0.0
    return work.gpu.memory_gib * GIB - RUNTIME_GIB * GIB - asleep - sum(trace.static.values())


def planned_passes(work: Workload, fused: bool) -> float:
    """Return the bytes of a forward and a backward pass in `plan`, with uniform routes.

    ``fused``: with TransformerEngine's layers, else with the traced layers.
    """
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
    """Return messages on differences from `plan` above `TOLERANCE` and on saves that do not fit."""
    messages = [
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
            messages.append(
                f"rank {trace.rank}: a save in the format {form} adds {needed:.2f} GiB, {free:.2f} are free"
            )
    return messages


def is_colocated(work: Workload) -> bool:
    """Return whether an engine sleeps on the learner's GPUs."""
    return PLACEMENT[work.recipe.rollout.engine] == "colocated"


MIB = 1 << 20


def render(work: Workload, traces: list[RankTrace]) -> str:
    p = work.parallel
    lines = [
        f"{work.recipe.name}: {work.ranks} ranks, TP{p.tensor} · PP{p.pipeline} · CP{p.context} · "
        f"DP{work.data_parallel} · EP{p.expert} · ETP{p.expert_tensor}, {work.recipe.learner.dtype}; "
        "fake tensors, fake process groups"
    ]
    for trace in traces:
        lines += ["", *_rank(work, trace)]
    return "\n".join(lines)


def as_json(work: Workload, traces: list[RankTrace]) -> dict[str, Any]:
    """Return the traces as JSON values; sizes are in bytes."""
    return {"recipe": work.recipe.name, "ranks": work.ranks, "traces": [_rank_json(work, trace) for trace in traces]}


def _rank(work: Workload, trace: RankTrace) -> list[str]:
    lines = [
        f"rank {trace.rank} (pipeline stage {trace.stage}): {trace.num_layers} layers, "
        f"{trace.parameters / 1e9:.3f} B parameters",
        "  at rest           traced      plan     error",
    ]
    for line in compare_static(work, trace):
        state = "" if line.holds else f"  ← beyond {TOLERANCE:.0%}"
        lines.append(
            f"    {line.kind:<14} {line.traced / GIB:7.2f} {line.planned / GIB:9.2f} GiB {line.error:+7.1%}{state}"
        )
    lines.append(f"    {'other':<14} {trace.static['other'] / GIB:7.2f}           (part of the sum)")
    lines.append("  added, GiB              device: at most      kept    host: at most      kept")
    for phase in trace.phases:
        sizes = [size / GIB for where in (DEVICE, HOST) for size in (phase.transient(where), phase.kept(where))]
        lines.append("    {:<22} {:15.2f} {:9.2f} {:16.2f} {:9.2f}".format(phase.name, *sizes))
    lines += [_save(work, trace), _passes(work, trace)]
    lines.append("  collectives")
    for phase in trace.phases:
        lines += [
            f"    {phase.name:<22} {call.kind:<18} {call.group} of {call.size}: {count} × {size / count / MIB:.2f} MiB"
            for call, (count, size) in phase.sent.items()
        ]
    return lines


def _save(work: Workload, trace: RankTrace) -> str:
    room, needed = room_for_a_save(work, trace), trace.phase("checkpoint").transient(DEVICE)
    state = "fits" if save_fits(work, trace) else "DOES NOT FIT"
    return (
        f"  a save in the format {trace.checkpoint_format} adds {needed / GIB:.2f} GiB where {room / GIB:.1f} GiB are "
        f"free beside {'a sleeping engine' if is_colocated(work) else 'the learner'}: {state}"
    )


def _passes(work: Workload, trace: RankTrace) -> str:
    if reason := why_untraced(work):
        return f"  no forward and backward pass is traced: {reason}"
    if PASSES not in [phase.name for phase in trace.phases]:
        return "  no forward and backward pass was asked for"
    traced = trace.phase(PASSES).transient(DEVICE)
    plain, transformer_engine = (planned_passes(work, fused) for fused in (False, True))
    return (
        f"  {PASSES} of {work.microbatch_tokens} tokens: {traced / GIB:.2f} GiB traced, {plain / GIB:.2f} by plan "
        f"({plain / traced - 1:+.1%}); {transformer_engine / GIB:.2f} by plan with TransformerEngine's layers"
    )


def _rank_json(work: Workload, trace: RankTrace) -> dict[str, Any]:
    record = {
        "rank": trace.rank,
        "stage": trace.stage,
        "num_layers": trace.num_layers,
        "parameters": trace.parameters,
        "static": {
            line.kind: {"traced": line.traced, "planned": line.planned, "error": line.error, "holds": line.holds}
            for line in compare_static(work, trace)
        }
        | {"other": {"traced": trace.static["other"]}},
        "phases": {
            phase.name: {
                "device_transient": phase.transient(DEVICE),
                "device_kept": phase.kept(DEVICE),
                "host_transient": phase.transient(HOST),
                "host_kept": phase.kept(HOST),
                "collectives": [
                    {"kind": call.kind, "group": call.group, "group_size": call.size, "count": count, "bytes": size}
                    for call, (count, size) in phase.sent.items()
                ],
            }
            for phase in trace.phases
        },
        "checkpoint": {
            "format": trace.checkpoint_format,
            "free_beside_sleeping_engine": room_for_a_save(work, trace),
            "fits": save_fits(work, trace),
        },
    }
    if PASSES in record["phases"]:
        planned = {"planned": planned_passes(work, False), "planned_fused": planned_passes(work, True)}
        record["passes"] = {
            "tokens": work.microbatch_tokens,
            "traced": trace.phase(PASSES).transient(DEVICE),
            **planned,
        }
    return record
