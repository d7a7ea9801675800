"""Inputs of a plan from two recipes at paper scale."""

import functools
import warnings
from pathlib import Path

from megatron_rl.config import load_recipe
from megatron_rl.instruments.plan import GPUS, make_workload
from megatron_rl.instruments.plan.workload import Workload
from megatron_rl.model.architecture import shape_of
from tests.support.tiny import REPOSITORY

MOE = REPOSITORY / "recipes" / "length_decay" / "rloo-qwen3-30b-a3b-4n8g-tp4ep8-auto.yaml"
DENSE = REPOSITORY / "recipes" / "length_decay" / "rloo-qwen3-8b-base-2n8g-tp4-lr1e-6.yaml"
STAYS = ("learner.offload={gradients: false, optimizer: false}", "rollout.gpu_memory_utilization=0.4")
"""A learner that is there while the engine generates; the recipes' own leave."""


@functools.cache
def work(path: Path = MOE, gpu: str = "h100-80", *overrides: str, **sizes) -> Workload:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recipe = load_recipe(path, [*STAYS, *overrides])
    return make_workload(recipe, shape_of(recipe.model.path)[0], GPUS[gpu], **sizes)
