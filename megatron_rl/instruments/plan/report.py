"""The complete plan of a workload, as values and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron_rl.config import Recipe
from megatron_rl.errors import InputError
from megatron_rl.instruments.plan import hardware as hw
from megatron_rl.instruments.plan.hardware import GIB
from megatron_rl.instruments.plan.learner import BYTES, active_parameters, checkpoint_cost, total_parameters
from megatron_rl.instruments.plan.memory import (
    PLACEMENT,
    EvidenceCost,
    MemoryPlan,
    OwnCode,
    Phase,
    StageTime,
    evidence_cost,
    host_phase,
    memory_plan,
    own_code,
    parity_memory,
)
from megatron_rl.instruments.plan.search import (
    Layout,
    StepTime,
    deadline_problem,
    host_problem,
    judge,
    letters,
    offload_choices,
    problems,
    sequences_proposed,
    step_time,
    suggest,
)
from megatron_rl.instruments.plan.servers import Arm, ColocatedPlan, ServerPlan, colocated_plan, server_plan
from megatron_rl.instruments.plan.workload import Lengths, Workload


@dataclass(frozen=True)
class Plan:
    work: Workload
    memory: MemoryPlan
    host: Phase
    time: StepTime  # time of the engines
    own: OwnCode  # cost of this project's code beside the engines
    evidence: EvidenceCost  # what `recorder.evidence` adds, of which `own` has the part without a disk
    layouts: list[Layout]  # best first
    problems: list[str]  # what does not fit; empty if all fits
    sequences: tuple[int, StepTime] | None  # a better `rollout.max_num_seqs` with its time of a step, if there is one
    simulated: ServerPlan | ColocatedPlan | None = None  # only if lengths of responses were given


def make_plan(work: Workload, lengths: Lengths | None = None) -> Plan:
    """Return the plan of ``work``. ``lengths``: simulate the recipe's engines with these, of the workload's mean."""
    memory, layouts = memory_plan(work), suggest(work)
    time, own_costs = step_time(work, memory.engine), own_code(work)
    host = host_phase(work, memory)
    all_problems = problems(work, memory, layouts) + host_problem(work, host) + deadline_problem(work, time)
    simulated = _simulated(work, memory, lengths, own_costs.seconds) if lengths is not None else None
    evidence = evidence_cost(work, own_costs, checkpoint_cost(work).size * work.ranks)
    sequences = sequences_proposed(work)
    return Plan(work, memory, host, time, own_costs, evidence, layouts, all_problems, sequences, simulated)


def _simulated(work: Workload, memory: MemoryPlan, lengths: Lengths, own_seconds: float) -> ServerPlan | ColocatedPlan:
    """Raises `InputError` for the exact engine, which is not simulated."""
    if memory.engine is None:
        raise InputError(
            f"--lengths simulates vLLM, but rollout.engine is {work.recipe.rollout.engine}; leave it out, or use "
            "--mean-response"
        )
    if memory.placement == "colocated":
        return colocated_plan(work, lengths, own_seconds)
    return server_plan(work, memory.engine, lengths, own_seconds)


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the totals of a plan as JSON values: seconds, and GiB of a GPU or a host."""
    time, own_costs = plan.time, plan.own
    return {
        "recipe": plan.work.recipe.name,
        "ranks": plan.work.ranks,
        "gpu": plan.work.gpu.name,
        "gpu_measured": list(plan.work.gpu.measured),
        "gpu_gib": {phase.name: phase.total / GIB for phase in plan.memory.phases},
        "step_s": time.total,
        "phases_s": asdict(time),
        "own_code": {
            "seconds": own_costs.seconds,
            "host_gib_rank": own_costs.host_rank / GIB,
            "host_gib_node": own_costs.host_node / GIB,
            "sockets_rank": own_costs.sockets,
            "stages": [asdict(stage) for stage in own_costs.stages],
            "aside": [asdict(stage) for stage in own_costs.aside],
        },
        "checkpoint": asdict(checkpoint_cost(plan.work)),
        "evidence": asdict(plan.evidence) | {"disk": plan.evidence.disk},
        "host_gib_node": plan.host.total / GIB,
        "parity_host_gib": _parity_host_gib(plan.work),
        "problems": plan.problems,
        "proposed": {"rollout.max_num_seqs": plan.sequences[0], "step_s": plan.sequences[1].total}
        if plan.sequences
        else {},
        **_simulated_json(plan.simulated),
    }


def _parity_host_gib(work: Workload) -> float:
    """Return the host memory of `megatron-rl parity` with its six witnesses."""
    return parity_memory(work.architecture, PARITY_TOKENS, _wider(work.recipe)).host(num_witnesses=6) / GIB


def _wider(recipe: Recipe) -> str:
    return max((recipe.learner.dtype, recipe.rollout.dtype), key=BYTES.__getitem__)


def _simulated_json(simulated: ServerPlan | ColocatedPlan | None) -> dict[str, Any]:
    if simulated is None:
        return {}
    return {"pipeline" if isinstance(simulated, ServerPlan) else "generation": simulated.as_json()}


NUM_LAYOUTS = 5
FILES = 1024  # default limit of open files of a process


def render(plan: Plan) -> str:
    work, memory = plan.work, plan.memory
    lines = [*_head(work), ""]
    for phase in memory.phases:
        lines += [*_phase(phase, memory), ""]
    lines += [*_host(plan.host), ""]
    lines += [*_cache(work, memory), *_sequences(plan), *_placements(work, memory), ""]
    lines += [*_time(plan), _checkpoint(work), *_evidence(plan), "", *_own(plan), ""]
    if isinstance(plan.simulated, ServerPlan):
        lines += [*pipeline_lines(plan.simulated), ""]
    elif plan.simulated is not None:
        lines += [*generation_lines(plan.simulated), ""]
    lines += [*_offload(work), ""]
    lines += [*_parity(work), ""]
    lines += [*_layouts(plan), ""]
    return "\n".join(lines + _assumptions(work))


def summary(plan: Plan) -> str:
    """Return one line for a recipe's header."""
    learning, generating = plan.memory.phases[:2]
    capacity, offload = learning.capacity / GIB, plan.work.recipe.learner.offload
    away = f", {plan.time.offload:.1f} s of it offload, {plan.host.total / GIB:.0f} GiB of host memory a node"
    return (
        f"{plan.work.ranks} × {plan.work.gpu.name}: learning {learning.total / GIB:.1f}, generating "
        f"{generating.total / GIB:.1f} of {capacity:.1f} GiB a GPU; {duration(plan.time.total)} a step"
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
    state = "fits" if phase.missing <= 0 else f"DOES NOT FIT by {phase.missing / GIB:.1f} GiB"
    stage = f", pipeline stage {memory.learner.stage}" if phase.name == "learning" and memory.learner.stage else ""
    lines = [f"{phase.name}: {phase.total / GIB:.1f} of {phase.capacity / GIB:.1f} GiB a GPU{stage}: {state}"]
    lines += [f"  {size / GIB:8.2f}  {what}" for what, size in phase.items if size > 0]
    if phase.name == "learning":
        m = memory.learner
        parts = {"kept activations": m.activations, "logits": m.head, "layer at hand": m.layer, "update": m.optimizer}
        lines.append("            of it " + ", ".join(f"{k} {v / GIB:.2f}" for k, v in parts.items() if v > 0))
    return lines


def _host(host: Phase) -> list[str]:
    state = "fits" if host.missing <= 0 else f"DOES NOT FIT by {host.missing / GIB:.0f} GiB"
    lines = [f"host memory: {host.total / GIB:.0f} of {host.capacity / GIB:.0f} GiB a node (--host-memory): {state}"]
    return lines + [f"  {size / GIB:8.1f}  {what}" for what, size in host.items]


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


PARITY_TOKENS = 103  # of `megatron-rl parity`, where it is given none


def _parity(work: Workload) -> list[str]:
    """Return what `megatron-rl parity` takes with its own tokens, by its arithmetic."""
    wider = _wider(work.recipe)
    memory = parity_memory(work.architecture, PARITY_TOKENS, wider)
    return [
        f"parity        {PARITY_TOKENS} tokens in {wider}; GiB of one host: {memory.taps / GIB:.2f} of taps a witness, "
        f"{memory.definition / GIB:.2f} of the model in float64, {memory.largest / GIB:.2f} of its largest tensor, "
        f"{memory.model / GIB:.1f} of transformers' model",
        f"  on a GPU    the weights alone, and {memory.gathered / GIB:.3f} GiB of the one tap that is put together; "
        "other models: megatron-rl parity --layers N",
    ]


def _cache(work: Workload, memory: MemoryPlan) -> list[str]:
    engine, rollout = memory.engine, work.recipe.rollout
    if engine is None:
        cache = memory.cache
        return [
            f"cache         {cache.tokens} tokens a replica of the exact engine: {cache.tokens / cache.longest:.1f} "
            f"longest sequences (rollout.max_num_seqs {rollout.max_num_seqs})"
        ]
    at_once = min(rollout.max_num_seqs, int(engine.tokens / work.mean_sequence))
    return [
        f"cache         {engine.tokens} tokens an engine: {engine.tokens / engine.longest:.1f} longest sequences, "
        f"{at_once} mean ones at a time (rollout.max_num_seqs {rollout.max_num_seqs})"
    ]


def _sequences(plan: Plan) -> list[str]:
    if plan.sequences is None:
        return []
    number, time = plan.sequences
    return [
        f"  more of it  --set rollout.max_num_seqs={number}: {duration(time.generate)} of generating instead of "
        f"{duration(plan.time.generate)}, {duration(time.total)} a step"
    ]


def _placements(work: Workload, memory: MemoryPlan) -> list[str]:
    """Return one line for each placement that the recipe does not use."""
    lines = []
    for placement in dict.fromkeys(PLACEMENT.values()):
        if placement != memory.placement:
            other = memory_plan(work, placement)
            sizes = ", ".join(f"{phase.name} {phase.total / GIB:.1f}" for phase in other.phases[:2])
            tokens = f", cache {other.engine.tokens} tokens" if other.engine else ""
            lines.append(f"as {placement:<10} {sizes} GiB{tokens}: {'fits' if other.fits else 'does not fit'}")
    return lines


def _time(plan: Plan) -> list[str]:
    t, work = plan.time, plan.work
    tokens = work.recipe.num_sequences * work.mean_response
    ahead = [
        f"  {-t.hidden:8.1f} s  generating and learning at the same time (rollout.max_staleness)"
    ] * t.samples_ahead
    return [
        f"step time     about {duration(t.total)} ({tokens / t.total:.0f} response tokens/s), rewards not counted",
        f"  {t.generate:8.1f} s  generate{_rounds(work)}{_deadline(plan)}",
        f"  {t.old_logprobs:8.1f} s  old log-probs{'' if t.old_logprobs else ' (not needed)'}",
        f"  {t.update:8.1f} s  forward and backward",
        f"  {t.communication:8.1f} s      of these two, tensor- and expert-parallel communication",
        *[f"  {t.scores:8.1f} s  a pass of each response alone (objective.advantage: min_variance)"] * (t.scores > 0),
        f"  {t.optimizer:8.1f} s  optimizer and data-parallel communication",
        f"  {t.refit:8.1f} s  weights to the engine",
        *[f"  {t.offload:8.1f} s  copies to and from host memory (learner.offload)"] * (t.offload > 0),
        *[f"  {t.acceptance:8.1f} s  responses that judge the update, and the weights once more (acceptance)"]
        * (t.acceptance > 0),
        *ahead,
        _whole_run(work.recipe, t.total),
    ]


def _whole_run(recipe: Recipe, step_s: float) -> str:
    if recipe.num_steps is None:
        return f"  run         {recipe.length}; `megatron-rl check` counts the prompts"
    return f"  run         {recipe.num_steps} steps: {recipe.num_steps * step_s / 86400:.1f} days"


def _own(plan: Plan) -> list[str]:
    own_costs, share = plan.own, plan.own.seconds / plan.time.total
    lines = [
        f"own code      about {own_costs.seconds:.1f} s a step beside the engines ({share:.1%}); host memory: "
        f"{own_costs.host_rank / GIB:.1f} GiB a rank, {own_costs.host_node / GIB:.1f} GiB a node"
    ]
    lines += [
        f"  {stage.seconds:8.2f} s  {stage.name}{_bytes(stage)}{', while servers sample' * stage.while_sampling}"
        for stage in own_costs.stages
    ]
    lines += [
        f"  {stage.seconds:8.2f} s  {stage.name}{_bytes(stage)}, where the recipe asks for it"
        for stage in own_costs.aside
    ]
    few = f": raise `ulimit -n` above the usual {FILES}" if own_costs.sockets > FILES / 2 else ""
    return [*lines, f"  sockets     about {own_costs.sockets:.0f} a rank, without NCCL's{few}"]


def _bytes(stage: StageTime) -> str:
    return f", {stage.received / 1e6:.0f} MB from other ranks" if stage.received > 1e6 else ""


def _checkpoint(work: Workload) -> str:
    cost, every = checkpoint_cost(work), work.recipe.checkpoint.every
    when = f"every {every} steps" if every else "at the end"
    return (
        f"checkpoint    {cost.size / GIB:.1f} GiB a rank {when}: whole after {duration(cost.written_s)} at "
        f"{hw.DISK / 1e9:g} GB/s a node, training waits {duration(cost.stalled_s)}; meanwhile "
        f"{cost.host / GIB:.1f} GiB more of host memory a rank, {cost.device / GIB:.1f} on the GPU"
    )


def _evidence(plan: Plan) -> list[str]:
    cost = plan.evidence
    stays = f"an alarm keeps at most {cost.after_alarm / GIB:.0f} GiB more (recorder.evidence)"
    if not cost.batches:
        return [f"evidence      {stays}"] if cost.after_alarm else []
    return [
        f"evidence      the newest {cost.batches} batches of {cost.batch / GIB:.2f} GiB on disk: "
        f"{cost.disk / GIB:.0f} GiB; {cost.seconds:.2f} s a step ({cost.seconds / plan.time.total:.2%}) at "
        f"{hw.DISK / 1e9:g} GB/s a node; {stays}"
    ]


def _deadline(plan: Plan) -> str:
    return "  ← longer than rollout.deadline_s" if deadline_problem(plan.work, plan.time) else ""


def _rounds(work: Workload) -> str:
    return f", {work.sampling_rounds:g} rounds of sampling a step" if work.sampling_rounds > 1 else ""


def _layouts(plan: Plan) -> list[str]:
    recipes_index = next((i for i, layout in enumerate(plan.layouts) if layout.is_recipes), None)
    shown = list(range(min(NUM_LAYOUTS, len(plan.layouts))))
    if recipes_index is not None and recipes_index not in shown:
        shown.append(recipes_index)
    order = "fastest that fits first" if plan.layouts[0].fits else "none fits, the one that lacks least first"
    lines = [f"layouts of {plan.work.ranks} ranks, {order} ({len(plan.layouts)} legal)"]
    lines += [f"  {i + 1:3d}. {_layout(plan.layouts[i])}" for i in shown]
    best = plan.layouts[0]
    if recipes_index != 0 and best.fits:
        lines.append(f"  the first, by this arithmetic, whose efficiencies were not measured: {best.overrides}")
    return lines


def _layout(layout: Layout) -> str:
    learning, generating = layout.memory.phases[:2]
    engine = "" if layout.utilization is None else f", utilization {layout.utilization:.2f}"
    mark = "  ← the recipe's" if layout.is_recipes else ""
    state = "" if layout.fits else "  does not fit"
    return (
        f"{layout!s:<28} learning {learning.total / GIB:6.1f}, generating {generating.total / GIB:6.1f} GiB{engine}; "
        f"{duration(layout.time.total)}{state}{mark}"
    )


def _exact(work: Workload) -> str:
    if work.recipe.rollout.engine != "exact":
        return ""
    bandwidth, rate = hw.EXACT_BANDWIDTH, hw.EXACT_FLOPS[BYTES[work.recipe.learner.dtype]]
    return (
        f"exact products at {bandwidth['dense']:.0%} of bandwidth or {rate['dense']:.0%} of peak, those of experts at "
        f"{bandwidth['experts']:.0%} or {rate['experts']:.0%} (measured on an H200), "
        f"exact attention at {hw.EXACT_ATTENTION_BANDWIDTH:.0%} of bandwidth "
        f"and {1e6 * hw.KEY_BLOCK_S:g} µs a block of keys, {1e6 * hw.KERNEL_S:g} µs a kernel, "
    )


def _unmeasured(work: Workload) -> str:
    if work.gpu.measured:
        return "These shares were not measured on a GPU."
    other = "other " if work.recipe.rollout.engine == "exact" else ""
    return f"No {other}figure was measured on a GPU."


def _assumptions(work: Workload) -> list[str]:
    moe, gpu = work.architecture.is_moe, work.gpu
    return [
        "assumed (docs/planning.md): "
        f"{gpu.flops(work.recipe.learner.dtype) / 1e12:.0f} TFLOP/s, {gpu.bandwidth / 1e12:.2f} TB/s, links "
        f"{gpu.nvlink / 1e9:.0f} and {gpu.network / 1e9:.0f} GB/s at {hw.LINK:.0%}; learning at "
        f"{hw.LEARNER_MFU[moe]:.0%} and prefill at {hw.PREFILL_MFU[moe]:.0%} of peak; decoding at "
        f"{hw.DECODE_BANDWIDTH:.0%} of bandwidth or {hw.DECODE_FLOPS:.0%} of peak, "
        f"{1e3 * (hw.EAGER_OVERHEAD_S if work.recipe.rollout.enforce_eager else hw.STEP_OVERHEAD_S):g} ms a step; "
        f"host copies at "
        f"{hw.HOST_LINK:.0%} of {gpu.host_link / 1e9:.0f} GB/s; runtime {hw.RUNTIME_GIB:g} GiB, "
        f"engine graphs {hw.GRAPHS_GIB:g} GiB, fragmentation {hw.FRAGMENTATION:.0%}, "
        f"{_exact(work)}"
        f"busiest expert rank {hw.EXPERT_IMBALANCE:g} × the mean"
        f"{f'; {hw.TURNS} turns a conversation' * (work.recipe.rollout.function is not None)}. " + _unmeasured(work),
        *([f"measured on a node ({gpu.name}): {'; '.join(gpu.measured)}"] if gpu.measured else []),
    ]


# A simulated pipeline as text.


def pipeline_lines(plan: ServerPlan) -> list[str]:
    """Return the lines of the simulation: the recipe's own arm in detail, then the others for comparison."""
    p, sampled = plan.pipeline, plan.lengths.sample()
    learn_s = p.learn[0] + p.learn[1] * p.asking.num_prompts * p.asking.num_samples * (
        p.asking.prompt_tokens + float(sampled.mean())
    )
    both = " and the learner" if p.joins else ""
    alone = f"the learner {duration(p.publish_s)} beside them and " if p.publish_s else ""
    lines = [
        f"pipeline      {_described(plan.lengths)}",
        f"  {p.num_servers} servers of up to {p.costs.slots} responses at a time; a step's {p.asking.num_prompts} × "
        f"{p.asking.num_samples} responses are learned in {duration(learn_s)}; weights take {alone}the servers{both} "
        f"{p.load_s:.1f} s",
        f"  {'in_flight, max_staleness':<28}{'a step':>9}{'tokens/s':>10}{'learner waits':>15}{'servers idle':>14}"
        f"{'decoding':>12}{'computed twice':>16}  staleness: share of tokens",
    ]
    return [*lines, *(_line(arm, p.costs.slots) for arm in plan.arms)]


def _described(lengths: Lengths) -> str:
    sampled = lengths.sample()
    shares = ", ".join(f"{share}% up to {np.percentile(sampled, share):.0f}" for share in (50, 90, 99))
    return (
        f"{lengths.source}: responses of {sampled.mean():.0f} tokens on average; {shares}; longest {sampled.max():.0f}"
    )


def generation_lines(plan: ColocatedPlan) -> list[str]:
    """Return the lines of simulated engines beside the learner: the recipe's `max_num_seqs`, then others."""
    engines = "1 engine" if plan.num_engines == 1 else f"{plan.num_engines} engines; a round ends with the slowest"
    lines = [
        f"generation    {_described(plan.lengths)}",
        f"  {engines}",
        f"  {'rollout.max_num_seqs':<22}{'generating':>12}{'a step':>9}{'engines wait':>14}{'decoding':>10}"
        f"{'computed twice':>16}",
    ]
    for arm in plan.arms:
        mark = "  ← the recipe's" if arm.is_recipes else ""
        lines.append(
            f"  {arm.max_num_seqs:<22}{duration(arm.generate_s):>12}{duration(arm.step_s):>9}{arm.waiting:14.0%}"
            f"{arm.running:10.0f}{arm.preempted:16.1%}{mark}"
        )
    return lines


def _line(arm: Arm, slots: int) -> str:
    t = arm.time
    steps = ", ".join(f"{steps}: {share:.0%}" for steps, share in t.staleness.items() if share >= 0.005)
    lost = f"; {t.given_up:.0%} more sampled and given up" if t.given_up > 0.005 else ""
    mark = "  ← the recipe's" if arm.is_recipes else ""
    return (
        f"  {arm.mode + ', ' + str(arm.max_staleness):<28}{duration(t.step_s):>9}{t.tokens_per_s:10.0f}"
        f"{t.learner_idle:15.0%}{t.servers_idle:14.0%}{f'{t.running:.0f} of {slots}':>12}{t.recomputed:16.1%}"
        f"  {steps}{lost}{mark}"
    )


def duration(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
