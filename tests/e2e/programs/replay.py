"""What test_router_replay.py runs in a process of its own: real vLLM, real Megatron, the same rollouts."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl.batch import build_batch
from megatron_rl.data import load_prompts, load_tokenizer
from megatron_rl.learner.learner import Learner
from megatron_rl.model.architecture import read_architecture
from megatron_rl.monitor import mismatch_metrics
from megatron_rl.rollout.vllm_engine import VllmGenerator
from megatron_rl.types import Batch, Prompt
from tests.support import plain_training
from tests.support.tiny import tiny_recipe

NUM_PROMPTS, NUM_SAMPLES = 16, 8
LONG_PROMPT = 200  # tokens; the engine's cache works in blocks of 128


def in_each_dtype(
    model: str,
    dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32"),
    num_prompts: int = NUM_PROMPTS,
    num_samples: int = NUM_SAMPLES,
    fp32_router: bool = False,
    fp32_head: bool = False,
) -> dict[str, dict[str, Any]]:
    return {dtype: _compare(model, dtype, num_prompts, num_samples, fp32_router, fp32_head) for dtype in dtypes}


def _compare(
    model: str, dtype: str, num_prompts: int, num_samples: int, fp32_router: bool, fp32_head: bool
) -> dict[str, Any]:
    """Rollouts scored by the learner with its own routes and with the engine's; then an update, a refit, and again."""
    is_moe = read_architecture(Path(model)).is_moe
    recipe = tiny_recipe(
        model={"path": model},
        rollout={"dtype": dtype, "max_response_length": 40, "kv_cache_gib": 0.0625},
        learner={"dtype": dtype, "optimizer": {"lr": 1e-3}},
        objective={"max_response_length": 40},
        routing={"replay": "r3"} if is_moe else {},
        precision={} if dtype == "fp32" else {"fp32_router": fp32_router, "fp32_head": fp32_head},
    )
    learner = Learner(recipe)
    prompts = load_prompts(recipe.data.train, load_tokenizer(model), recipe.data.prompt)
    random = np.random.default_rng(0)
    long = [Prompt(f"long:{i}", random.integers(3, 98, LONG_PROMPT).tolist(), "") for i in range(2)]
    prompts = [prompts[i] for i in range(num_prompts)] + long
    generator = VllmGenerator(
        recipe.rollout, Path(model), max_prompt_length=LONG_PROMPT, record_routes=is_moe, precision=recipe.precision
    )
    try:
        batch = _sample(generator, prompts, num_samples, 0, recipe)
        result = {"bound": _rounding_bound(model, batch) if dtype == "fp32" else None} | _score(learner, batch)
        _move_sinks(learner)
        generator.refit(learner.export_weights(), learner.num_updates)
        contract = generator.describe_precision()
        result |= {"router": contract.get("router"), "head": contract["head"]}
        result["after refit"] = _score(learner, _sample(generator, prompts, num_samples, learner.num_updates, recipe))
        return result
    finally:
        generator.close()


def _move_sinks(learner: Learner) -> None:
    """Give attention sinks, where there are any, other values in bf16, the only ones that vLLM computes with. What an
    update moves them by is lost there."""
    for name, parameter in learner.model.named_parameters():
        if name.endswith("softmax_offset"):
            parameter.data.copy_((1.5 * parameter + 1.0).bfloat16())


def _score(learner: Learner, batch: Batch) -> dict[str, Any]:
    """Spread of rho with the learner's routes and with the engine's; the largest difference of log-probs in each
    sequence with the former; the longest one's share of the tokens; and the metrics of an update."""
    modes = ("native", "replay") if learner.replay is not None else ("native", "native")
    native, replayed = (learner.compute_logprobs(batch, mode) for mode in modes)
    off = [np.abs(old - s.inference_logprobs).max() for old, s in zip(native, batch.sequences, strict=True)]
    spreads = {"native": _rho_std(native, batch), "replayed": _rho_std(replayed, batch)}
    lengths = [s.whole_length for s in batch.sequences]
    longest = max(lengths) / sum(lengths)
    return {**spreads, "native, by sequence": off, "longest": longest, "metrics": learner.update(batch)}


def _rounding_bound(model: str, batch: Batch) -> float:
    """How far a float32 engine's log-probs may lie from float64's, but for one sequence whose router may meet a tie."""
    with torch.no_grad():
        single, double = (
            plain_training.logprobs(plain_training.load(model, dtype), batch).double()
            for dtype in (torch.float32, torch.float64)
        )
    errors = (single - double).abs().split([s.length for s in batch.sequences])
    largest = sorted(float(error.max()) for error in errors)[-2]
    return math.sqrt(max(s.whole_length for s in batch.sequences)) * largest  # as `bound_from_double`


def _sample(generator: VllmGenerator, prompts: list, num_samples: int, version: int, recipe: Any) -> Batch:
    groups = generator.rollout(prompts, num_samples, policy_version=version, step=0)
    for i, rollout in enumerate(rollout for group in groups for rollout in group.rollouts):
        rollout.reward = float(i % 2)  # untrained models earn nothing; some advantage is needed
    return build_batch(0, groups, recipe.batch, recipe.objective)


def _rho_std(logprobs: list[np.ndarray], batch: Batch) -> float:
    old = torch.from_numpy(np.concatenate(logprobs))
    inference = torch.from_numpy(np.concatenate([s.inference_logprobs for s in batch.sequences]))
    offsets = torch.tensor([0, *(s.length for s in batch.sequences)]).cumsum(0)
    return mismatch_metrics(old, inference, torch.ones_like(old, dtype=torch.bool), offsets)["mismatch/rho_std"]
