"""The complete plan of a workload."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megatron_rl.instruments.plan.hardware import GIB
from megatron_rl.instruments.plan.learner import checkpoint_cost
from megatron_rl.instruments.plan.lengths import Lengths
from megatron_rl.instruments.plan.memory import MemoryPlan, Phase, host_phase, memory_plan
from megatron_rl.instruments.plan.own_code import EvidenceCost, OwnCode, evidence_cost, own_code
from megatron_rl.instruments.plan.search import (
    Layout,
    deadline_problem,
    host_problem,
    problems,
    sequences_proposed,
    suggest,
)
from megatron_rl.instruments.plan.servers import ServerPlan, server_plan
from megatron_rl.instruments.plan.timing import StepTime, step_time
from megatron_rl.instruments.plan.workload import Workload


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
    servers: ServerPlan | None = None  # only if lengths of responses were given


def make_plan(work: Workload, lengths: Lengths | None = None) -> Plan:
    """Return the plan of ``work``. ``lengths``: simulate the recipe's servers with these, of the workload's mean."""
    memory, layouts = memory_plan(work), suggest(work)
    time, own_costs = step_time(work, memory.engine), own_code(work)
    host = host_phase(work, memory)
    all_problems = problems(work, memory, layouts) + host_problem(work, host) + deadline_problem(work, time)
    servers = server_plan(work, memory.engine, lengths, own_costs.seconds) if lengths is not None else None
    evidence = evidence_cost(work, own_costs, checkpoint_cost(work).size * work.ranks)
    sequences = sequences_proposed(work)
    return Plan(work, memory, host, time, own_costs, evidence, layouts, all_problems, sequences, servers)


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
        "problems": plan.problems,
        "proposed": {"rollout.max_num_seqs": plan.sequences[0], "step_s": plan.sequences[1].total}
        if plan.sequences
        else {},
        **({"pipeline": plan.servers.as_json()} if plan.servers else {}),
    }
