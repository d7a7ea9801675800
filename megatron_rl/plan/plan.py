"""Putting a plan together."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.plan.advice import deadline_problem, problems
from megatron_rl.plan.memory import MemoryPlan, memory_plan
from megatron_rl.plan.search import Layout, suggest
from megatron_rl.plan.timing import StepTime, step_time
from megatron_rl.plan.workload import Workload


@dataclass(frozen=True)
class Plan:
    work: Workload
    memory: MemoryPlan
    time: StepTime
    layouts: list[Layout]  # best first
    problems: list[str]  # what does not fit; empty where all does


def make_plan(work: Workload) -> Plan:
    memory, layouts = memory_plan(work), suggest(work)
    time = step_time(work, memory.engine)
    return Plan(work, memory, time, layouts, problems(work, memory, layouts) + deadline_problem(work, time))
