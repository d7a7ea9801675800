"""The complete plan of a workload, as values and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from megatron_rl.config import Recipe
from megatron_rl.instruments.plan import hardware as hw
from megatron_rl.instruments.plan.hardware import GIB
from megatron_rl.instruments.plan.learner import active_parameters, checkpoint_cost, total_parameters
from megatron_rl.instruments.plan.memory import MemoryPlan, Phase, host_phase, memory_plan
from megatron_rl.instruments.plan.search import (
    Layout,
    deadline_problem,
    host_problem,
    judge,
    letters,
    offload_choices,
    problems,
    suggest,
)
from megatron_rl.instruments.plan.timing import StepTime, phase_range, step_time
from megatron_rl.instruments.plan.workload import Workload


@dataclass(frozen=True)
class Plan:
    work: Workload
    memory: MemoryPlan
    host: Phase
    time: StepTime  # time of the engines
    problems: list[str]  # what does not fit; empty if all fits

    @cached_property
    def layouts(self) -> list[Layout]:
        """Legal layouts on as many GPUs, best first."""
        return suggest(self.work)

    @property
    def has_time(self) -> bool:
        """Whether the engine holds the longest sequence. Without, no time of a step is known."""
        return self.memory.holds_longest


def make_plan(work: Workload) -> Plan:
    """Return the plan of ``work``."""
    memory = memory_plan(work)
    time = step_time(work, memory.engine)
    host = host_phase(work, memory)
    all_problems = (
        problems(work, memory, lambda: suggest(work)) + host_problem(work, host) + deadline_problem(work, time)
    )
    return Plan(work, memory, host, time, all_problems)


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the totals of a plan as JSON values: seconds, and GiB of a GPU or a host."""
    time = plan.time
    return {
        "recipe": plan.work.recipe.name,
        "ranks": plan.work.ranks,
        "gpu": plan.work.gpu.name,
        "gpu_measured": list(plan.work.gpu.measured),
        "gpu_gib": {phase.name: phase.total / GIB for phase in plan.memory.phases},
        "gpu_margin_gib": {phase.name: phase.margin / GIB for phase in plan.memory.phases},
        "step_s": time.total if plan.has_time else None,
        "step_range_s": list(time.range) if plan.has_time else None,
        "phases_s": time.phases,
        "phases_range_s": {name: list(phase_range(name, seconds)) for name, seconds in time.phases.items()},
        "hidden_s": time.hidden,
        "lengths": plan.work.lengths.source,
        "checkpoint": asdict(checkpoint_cost(plan.work)),
        "host_gib_node": plan.host.total / GIB,
        "problems": plan.problems,
    }


NUM_LAYOUTS = 5


def render(plan: Plan, detail: bool = False) -> str:
    """Return whether it fits, how fast it is, and the cheapest layout; with ``detail`` every part of the arithmetic."""
    if not detail:
        return "\n".join(_answer(plan))
    work, memory = plan.work, plan.memory
    lines = [*_head(work), ""]
    for phase in memory.phases:
        lines += [*_phase(phase, memory), ""]
    host = plan.host
    lines.append(
        f"host memory: {host.total / GIB:.0f} of {host.capacity / GIB:.0f} GiB a node (--host-memory): {host.state}"
    )
    lines += [*(f"  {size / GIB:8.1f}  {what}" for what, size in host.items), ""]
    lines += [*_cache(work, memory), "", *_time(plan), _checkpoint(work), "", *_offload(work), ""]
    return "\n".join([*lines, *_layouts(plan), "", *_assumptions(work)])


def _answer(plan: Plan) -> list[str]:
    work, time, host = plan.work, plan.time, plan.host
    tightest = max(plan.memory.phases, key=lambda phase: phase.missing + phase.margin)
    lines = [
        *_head(work)[:3:2],
        f"  memory      {tightest.name}: {tightest.total / GIB:.1f} of {tightest.capacity / GIB:.1f} GiB a GPU "
        f"(± {tightest.margin / GIB:.1f}): {tightest.state}; host {host.total / GIB:.0f} of {host.capacity / GIB:.0f} "
        "GiB a node",
    ]
    if plan.has_time:
        tokens = work.recipe.num_sequences * work.mean_response
        parts = {"generating": time.generate, "learning": time.learning}
        parts |= {"weights": time.refit, "sleep, wake and copies": time.switch + time.offload}
        told = ", ".join(f"{name} {duration(seconds)}" for name, seconds in parts.items() if seconds)
        both = f", {duration(time.hidden)} of them at the same time" * time.samples_ahead
        lines += [
            f"  a step      {_span(time)}: {told}{both}",
            f"  tokens      {tokens / time.total:.0f} of responses a second, of mean length {work.mean_response:.0f} "
            f"({work.lengths.source})",
            _whole_run(work.recipe, time.total),
        ]
    else:
        lines.append("  a step      not known: the engine's cache does not hold the longest sequence")
    best = plan.layouts[0] if plan.layouts else None
    if best is not None and best.fits and not best.is_recipes:
        lines.append(f"  cheapest    {best}, {_span(best.time)}: {best.overrides}")
    elif best is not None and best.fits:
        lines.append("  cheapest    the recipe's own layout, of those that fit on as many GPUs")
    return [*lines, "  more        --detail"]


def _span(time: StepTime) -> str:
    low, high = time.range
    return f"about {duration(time.total)} ({duration(low)} to {duration(high)})"


def summary(plan: Plan) -> str:
    """Return one line for a recipe's header."""
    learning, generating = plan.memory.phases[:2]
    capacity, offload = learning.capacity / GIB, plan.work.recipe.learner.offload
    away = f", {plan.time.offload:.1f} s of it offload, {plan.host.total / GIB:.0f} GiB of host memory a node"
    return (
        f"{plan.work.ranks} × {plan.work.gpu.name}: learning {learning.total / GIB:.1f}, generating "
        f"{generating.total / GIB:.1f} of {capacity:.1f} GiB a GPU; {_span(plan.time)} a step"
    ) + away * (offload.optimizer or offload.weights)


def _head(work: Workload) -> list[str]:
    a, p, recipe = work.architecture, work.parallel, work.recipe
    active = f", {active_parameters(a) / 1e9:.2f} B active" if a.is_moe else ""
    expert = f" · EP{p.expert} · ETP{p.expert_tensor}" if a.is_moe else ""
    context = f" · CP{p.context}" if p.context > 1 else ""
    return [
        f"{recipe.name} on {work.nodes} × {work.gpus_per_node} {work.gpu.name}",
        f"  model       {a.model_type}, {total_parameters(a) / 1e9:.2f} B parameters{active}",
        f"  layout      TP{p.tensor} · PP{p.pipeline}{context} · DP{work.data_parallel}{expert}; "
        f"learner {recipe.learner.dtype}, recompute {recipe.learner.recompute}",
        f"  step        {recipe.num_sequences} sequences, mean {work.mean_prompt:.0f} + {work.mean_response:.0f} "
        f"tokens, {recipe.batch.minibatches} update(s) of {work.microbatches} microbatch(es) of up to "
        f"{work.microbatch_tokens} tokens a replica",
    ]


def _phase(phase: Phase, memory: MemoryPlan) -> list[str]:
    stage = f", pipeline stage {memory.learner.stage}" if phase.name == "learning" and memory.learner.stage else ""
    lines = [f"{phase.name}: {phase.total / GIB:.1f} of {phase.capacity / GIB:.1f} GiB a GPU{stage}: {phase.state}"]
    lines += [f"  {size / GIB:8.2f}  {what}" for what, size in phase.items if size > 0]
    if phase.name == "learning":
        m = memory.learner
        added = dict(phase.items)["activations and temporaries"]
        at_peak = {"kept activations": m.activations, "buffers": m.buffers}
        at_peak |= {"logits": m.head} if m.head > m.layer else {"layer at hand": m.layer}
        if added != m.passes:  # the update is the peak
            at_peak = {"update": m.optimizer}
        lines.append("            of it " + ", ".join(f"{k} {v / GIB:.2f}" for k, v in at_peak.items() if v > 0))
    return lines


def _offload(work: Workload) -> list[str]:
    """Return a table of the gain and the price of each setting of `learner.offload` in the recipe's layout."""
    lines = [
        "offload       g gradients, o optimizer, w weights, P during passes; GiB a GPU learning and at rest, tokens of "
        "cache, seconds of copies, GiB of a node's host"
    ]
    for offload in offload_choices(work):
        layout = judge(work, work.parallel, offload)
        learning, resting = layout.memory.phases[0].total / GIB, layout.memory.learner.at_rest(offload) / GIB
        tokens = f"{layout.memory.engine.tokens:9d}" if layout.memory.engine else ""
        share = "" if layout.utilization is None else f" at utilization {layout.utilization:.2f}"
        state = "" if layout.fits else "  does not fit"
        mark = "  ← the recipe's" if offload == work.recipe.learner.offload else ""
        lines.append(
            f"  {letters(offload) or 'none':<5}{learning:6.1f}{resting:6.1f}{tokens}{layout.time.offload:6.1f}"
            f"{layout.host.total / GIB:6.0f}; {duration(layout.time.total)} a step{share}{state}{mark}"
        )
    return lines


def _cache(work: Workload, memory: MemoryPlan) -> list[str]:
    engine, rollout = memory.engine, work.recipe.rollout
    if engine is None:
        cache = memory.cache
        return [
            f"cache         {cache.tokens} tokens a replica of the exact engine: {cache.tokens / cache.longest:.1f} "
            f"longest sequences (rollout.max_num_seqs {rollout.max_num_seqs})"
        ]
    at_once = min(rollout.max_num_seqs, int(engine.sequences(work.mean_sequence)))
    return [
        f"cache         {engine.tokens} tokens an engine: {engine.sequences(engine.longest):.1f} longest sequences, "
        f"{at_once} mean ones at a time (rollout.max_num_seqs {rollout.max_num_seqs})"
    ]


PHASES = {
    "generate": "generate",
    "old_logprobs": "old log-probs",
    "update": "forward and backward",
    "scores": "a pass of each response alone (objective.advantage: min_variance)",
    "optimizer": "optimizer and data-parallel communication",
    "refit": "weights to the engine",
    "switch": "sleep and wake of the engine",
    "offload": "copies to and from host memory (learner.offload)",
    "second_models": "log-probs under second models (reference, scoring, teacher)",
    "teachers": "log-probs of teachers' engines",
    "acceptance": "responses that judge the update, and the weights once more (acceptance)",
}


def _time(plan: Plan) -> list[str]:
    t, work = plan.time, plan.work
    if not plan.has_time:
        return ["step time     not known: the engine's cache does not hold the longest sequence"]
    tokens = work.recipe.num_sequences * work.mean_response
    rounds = f", {work.sampling_rounds:g} rounds of sampling a step" if work.sampling_rounds > 1 else ""
    notes = {"generate": rounds + "  ← longer than rollout.deadline_s" * bool(deadline_problem(work, t))}
    if work.recipe.rollout.engine == "vllm_server" and work.recipe.rollout.why_files:
        notes["refit"] = f", by files: {work.recipe.rollout.why_files}"
    lines = [f"step time     {_span(t)}, {tokens / t.total:.0f} response tokens/s; rewards not counted"]
    for name, seconds in t.phases.items():
        if seconds:
            low, high = phase_range(name, seconds)
            lines.append(f"  {seconds:8.1f} s  {low:7.1f} to {high:7.1f}  {PHASES[name]}{notes.get(name, '')}")
    if t.samples_ahead:
        lines.append(f"  {-t.hidden:8.1f} s  generating and learning at the same time (rollout.max_staleness)")
    return [*lines, _whole_run(work.recipe, t.total)]


def _whole_run(recipe: Recipe, step_s: float) -> str:
    if recipe.num_steps is None:
        return f"  run         {recipe.length}; `megatron-rl check` counts the prompts"
    return f"  run         {recipe.num_steps} steps: {recipe.num_steps * step_s / 86400:.1f} days"


def _checkpoint(work: Workload) -> str:
    cost, every = checkpoint_cost(work), work.recipe.checkpoint.every
    when = f"every {every} steps" if every else "at the end"
    return (
        f"checkpoint    {cost.size / GIB:.1f} GiB a rank {when}: whole after {duration(cost.written_s)} at "
        f"{hw.DISK / 1e9:g} GB/s a node"
    )


def _layouts(plan: Plan) -> list[str]:
    shown = []
    for layout in plan.layouts:  # of layouts that differ in context parallelism or offload alone, the best
        sizes = _without_context(layout)
        if len(shown) < NUM_LAYOUTS and sizes not in [_without_context(other) for other in shown]:
            shown.append(layout)
    shown += [layout for layout in plan.layouts if layout.is_recipes and layout not in shown]
    if not shown:
        return [f"layouts of {plan.work.ranks} ranks: none is legal"]
    order = "fastest that fits first" if plan.layouts[0].fits else "none fits, the one that lacks least first"
    lines = [f"layouts of {plan.work.ranks} ranks, {order} ({len(plan.layouts)} legal)"]
    lines += [f"  {plan.layouts.index(layout) + 1:3d}. {_layout(layout)}" for layout in shown]
    best = plan.layouts[0]
    if best.fits and not best.is_recipes:
        lines.append(f"  the first: {best.overrides}")
    return lines


def _without_context(layout: Layout) -> object:
    return layout.parallel.model_copy(update={"context": 1})


def _layout(layout: Layout) -> str:
    learning, generating = layout.memory.phases[:2]
    engine = "" if layout.utilization is None else f", utilization {layout.utilization:.2f}"
    mark = "  ← the recipe's" if layout.is_recipes else ""
    refused = any(phase.is_refused for phase in layout.memory.phases)
    state = "" if layout.fits else "  does not fit" if refused or layout.host.missing > 0 else "  may not fit"
    return (
        f"{layout!s:<28} learning {learning.total / GIB:6.1f}, generating {generating.total / GIB:6.1f} GiB{engine}; "
        f"{duration(layout.time.total)}{state}{mark}"
    )


def _assumptions(work: Workload) -> list[str]:
    gpu, dispatcher = work.gpu, work.recipe.learner.token_dispatcher if work.architecture.is_moe else "dense"
    return [
        "assumed (docs/planning.md, plan/hardware.py): "
        f"{gpu.flops(work.recipe.learner.dtype) / 1e12:.0f} TFLOP/s, {gpu.bandwidth / 1e12:.2f} TB/s, links "
        f"{gpu.nvlink / 1e9:.0f} and {gpu.network / 1e9:.0f} GB/s; learning at {gpu.fitted(hw.LEARNER_SHARE):.0%} of "
        f"peak, or {1e3 * hw.LAYER_HOST_S[dispatcher]:g} ms of the host a layer and microbatch",
        *([f"measured on a node ({gpu.name}): {'; '.join(gpu.measured)}"] if gpu.measured else []),
    ]


def duration(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
