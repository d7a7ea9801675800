"""Putting a plan together."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.plan.advice import deadline_problem, host_problem, problems
from megatron_rl.plan.host import host_phase
from megatron_rl.plan.memory import MemoryPlan, Phase, memory_plan
from megatron_rl.plan.search import Layout, suggest
from megatron_rl.plan.timing import StepTime, step_time
from megatron_rl.plan.workload import Workload


@dataclass(frozen=True)
class Plan:
    work: Workload
    memory: MemoryPlan
    host: Phase
    time: StepTime
    layouts: list[Layout]  # best first
    problems: list[str]  # what does not fit; empty where all does


def make_plan(work: Workload) -> Plan:
    memory, layouts = memory_plan(work), suggest(work)
    time, host = step_time(work, memory.engine), host_phase(work, memory)
    found = problems(work, memory, layouts) + host_problem(work, host) + deadline_problem(work, time)
    return Plan(work, memory, host, time, layouts, found)
