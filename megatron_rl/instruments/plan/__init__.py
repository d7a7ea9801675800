"""`megatron-rl plan`: memory, time and layouts of a recipe on a GPU, by arithmetic alone.

No module here imports an engine or torch. The assumptions are in `hardware`, with reasons in docs/planning.md.
"""

from megatron_rl.instruments.plan.hardware import GPUS, Gpu, find_gpu
from megatron_rl.instruments.plan.report import Plan, as_json, make_plan, render, summary
from megatron_rl.instruments.plan.search import fewest_gpus
from megatron_rl.instruments.plan.workload import Workload, make_workload

__all__ = [
    "GPUS",
    "Gpu",
    "Plan",
    "Workload",
    "as_json",
    "fewest_gpus",
    "find_gpu",
    "make_plan",
    "make_workload",
    "render",
    "summary",
]
