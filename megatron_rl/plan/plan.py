"""Putting a plan together."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megatron_rl.plan.advice import deadline_problem, host_problem, problems
from megatron_rl.plan.checkpoint import checkpoint_cost
from megatron_rl.plan.hardware import GIB
from megatron_rl.plan.host import host_phase
from megatron_rl.plan.lengths import Lengths
from megatron_rl.plan.memory import MemoryPlan, Phase, memory_plan
from megatron_rl.plan.own_code import OwnCode, own_code
from megatron_rl.plan.search import Layout, suggest
from megatron_rl.plan.servers import ServerPlan, server_plan
from megatron_rl.plan.timing import StepTime, step_time
from megatron_rl.plan.workload import Workload


@dataclass(frozen=True)
class Plan:
    work: Workload
    memory: MemoryPlan
    host: Phase
    time: StepTime  # of the engines
    own: OwnCode  # beside them
    layouts: list[Layout]  # best first
    problems: list[str]  # what does not fit; empty where all does
    servers: ServerPlan | None = None  # where lengths of responses were given


def make_plan(work: Workload, lengths: Lengths | None = None) -> Plan:
    """``lengths``: simulate the recipe's servers on these, whose mean is the workload's."""
    memory, layouts = memory_plan(work), suggest(work)
    time, own = step_time(work, memory.engine), own_code(work)
    host = host_phase(work, memory)
    found = problems(work, memory, layouts) + host_problem(work, host) + deadline_problem(work, time)
    servers = server_plan(work, memory.engine, lengths, own.seconds) if lengths is not None else None
    return Plan(work, memory, host, time, own, layouts, found, servers)


def as_json(plan: Plan) -> dict[str, Any]:
    """The totals of a plan: seconds, and GiB of a GPU or of a host."""
    time, own = plan.time, plan.own
    return {
        "recipe": plan.work.recipe.name,
        "ranks": plan.work.ranks,
        "gpu": plan.work.gpu.name,
        "gpu_gib": {phase.name: phase.total / GIB for phase in plan.memory.phases},
        "step_s": time.total,
        "phases_s": asdict(time),
        "own_code": {
            "seconds": own.seconds,
            "host_gib_rank": own.host_rank / GIB,
            "host_gib_node": own.host_node / GIB,
            "sockets_rank": own.sockets,
            "stages": [asdict(stage) for stage in own.stages],
            "aside": [asdict(stage) for stage in own.aside],
        },
        "checkpoint": asdict(checkpoint_cost(plan.work)),
        "host_gib_node": plan.host.total / GIB,
        "problems": plan.problems,
        **({"pipeline": plan.servers.as_json()} if plan.servers else {}),
    }
