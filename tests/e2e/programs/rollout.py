"""What each rank runs in test_vllm_ranks.py and test_exact.py."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.checkpoint.hf_folder import HFFolder
from megatron_rl.config.learner import ParallelConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.learner import process_groups as distributed
from megatron_rl.learner.learner import Learner
from megatron_rl.rollout import RolloutError
from megatron_rl.rollout.requests import everywhere
from megatron_rl.rollout.vllm_engine import VllmGenerator
from megatron_rl.run.engines import start_generator
from megatron_rl.types import Group
from tests.e2e.hf_reference import prompts
from tests.support.tiny import MODEL, tiny_recipe
from tools.dev.make_tiny_checkpoint import build_tokenizer


def start(tensor_parallel: int, model: Path = MODEL) -> VllmGenerator:
    config = RolloutConfig(dtype="fp32", max_response_length=24, kv_cache_gib=0.0625, tensor_parallel=tensor_parallel)
    return VllmGenerator(config, model, max_prompt_length=12, record_routes=True)


def moved(model: Path) -> list[tuple[str, torch.Tensor]]:
    """Other weights: every tensor a little larger, the norms unchanged."""
    return [
        (name, tensor if name.endswith("norm.weight") else tensor * 1.05) for name, tensor in HFFolder(model).items()
    ]


def sample(generator: VllmGenerator, model: Path) -> list[list[Group]]:
    """More requests than ranks, fewer than ranks, and after an update."""
    results = [
        generator.rollout(prompts(7), 3, policy_version=0, step=0),
        generator.rollout(prompts(1), 1, policy_version=0, step=1),
    ]
    generator.refit(iter(moved(model)), 1)
    return [*results, generator.rollout(prompts(7), 3, policy_version=1, step=2)]


def rollout_beside_megatron(tensor_parallel: int, model: Path) -> dict[str, Any]:
    """The learner joins first, the engine starts in its world and leaves it as it was."""
    distributed.initialize(ParallelConfig(tensor=2, expert=2), "cpu", seed=0)
    random_state = torch.get_rng_state()
    sums = [megatron_sums()]
    generator = start(tensor_parallel, model)
    results = sample(generator, model)
    sums.append(megatron_sums())
    generator.close()
    sums.append(megatron_sums())
    untouched = bool((torch.get_rng_state() == random_state).all())
    distributed.shutdown()
    return {"results": results, "sums": sums, "untouched": untouched}


def megatron_sums() -> list[float]:
    """Sum of ranks + 1 over the world and over Megatron's tensor-, expert- and data-parallel groups."""
    groups = [
        None,
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_expert_model_parallel_group(),
        parallel_state.get_data_parallel_group(),
    ]
    totals = []
    for group in groups:
        value = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(value, group=group)
        totals.append(value.item())
    return totals


def one_engine_fails() -> str:
    """Rank 1's engine breaks; what does this rank say?"""
    generator = start(1)
    if dist.get_rank() == 1:

        def broken_step():
            raise IndexError("broken on purpose")

        generator._llm.llm_engine.step = broken_step
    try:
        generator.rollout(prompts(4), 2, policy_version=0, step=0)
    except RolloutError as error:
        return str(error)
    finally:
        generator.close()
    return "no error"


def exact_and_vllm() -> dict[str, list[Group]]:
    """The same requests to the exact engine, on the learner, and to vLLM beside it; both hold the same weights."""
    rollout = {"max_response_length": 24, "kv_cache_gib": 0.0625}
    recipe = tiny_recipe(rollout={"engine": "exact", **rollout}, data={"prompt": {"max_length": 12}})
    learner = Learner(recipe)
    exact = start_generator(recipe, build_tokenizer(), learner)
    results = {}
    for name, generator in (("exact", exact), ("vllm", start(1))):
        results[name] = everywhere(generator.rollout(prompts(32), 4, policy_version=0, step=3))
        generator.close()
    distributed.shutdown()
    return results
