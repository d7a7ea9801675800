"""`megatron-rl plan`: memory, time and layouts of a recipe on a GPU, by arithmetic alone.

Nothing here imports an engine or torch. What is assumed is in `hardware`, with its reasons in docs/planning.md.
"""

from megatron_rl.plan.hardware import GPUS, Gpu
from megatron_rl.plan.plan import Plan, as_json, make_plan
from megatron_rl.plan.report import render, summary
from megatron_rl.plan.workload import Workload, make_workload

__all__ = ["GPUS", "Gpu", "Plan", "Workload", "as_json", "make_plan", "make_workload", "render", "summary"]
