"""A trace as text, and as an object for JSON."""

from __future__ import annotations

from typing import Any

from megatron_rl.plan.hardware import GIB
from megatron_rl.plan.workload import Workload
from megatron_rl.trace.comparison import (
    TOLERANCE,
    compare_static,
    is_colocated,
    planned_passes,
    room_for_a_save,
    save_fits,
)
from megatron_rl.trace.learner import RankTrace
from megatron_rl.trace.recorder import DEVICE, HOST
from megatron_rl.trace.update import PASSES, why_untraced

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
    """Bytes everywhere."""
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
    here, there = (planned_passes(work, fused) for fused in (False, True))
    return (
        f"  {PASSES} of {work.microbatch_tokens} tokens: {traced / GIB:.2f} GiB traced, {here / GIB:.2f} by plan "
        f"({here / traced - 1:+.1%}); {there / GIB:.2f} by plan with TransformerEngine's layers"
    )


def _rank_json(work: Workload, trace: RankTrace) -> dict[str, Any]:
    found = {
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
    if PASSES in found["phases"]:
        planned = {"planned": planned_passes(work, False), "planned_fused": planned_passes(work, True)}
        found["passes"] = {"tokens": work.microbatch_tokens, "traced": trace.phase(PASSES).transient(DEVICE), **planned}
    return found
