"""What may not go together between a recipe, its model and the ranks. `rules` has what holds without the model.

Every function returns messages that name keys, values found and values allowed; an empty list where nothing is wrong.
`check`, `plan`, the engines and the tools all ask here.
"""

from __future__ import annotations

import math
from typing import Literal

from megatron_rl.checkpoint.architecture import Architecture
from megatron_rl.config.learner import ParallelConfig
from megatron_rl.config.quantization import ON_CUDA
from megatron_rl.config.rollout import CPU_EXPERT_MULTIPLE, CPU_HEAD_DIMS, RolloutConfig
from megatron_rl.config.routing import RoutingConfig
from megatron_rl.config.sections import RecipeSections


def model_problems(
    recipe: RecipeSections,
    architecture: Architecture,
    world_size: int | None,
    device: Literal["cpu", "cuda"] | None = None,
) -> list[str]:
    """Why the recipe cannot run with the model on ``world_size`` ranks.

    ``world_size`` and ``device``: None where not known; then only what holds for every value is checked.
    """
    found = architecture.problems() + layout_problems(recipe.learner.parallel, architecture, world_size)
    found += rollout_problems(recipe.rollout, architecture, recipe.data.prompt.max_length, world_size, device)
    found += routing_problems(recipe.routing, architecture) + precision_problems(recipe, architecture)
    if recipe.exact.dose is not None and recipe.exact.dose.kind == "router" and not architecture.is_moe:
        found.append(f"exact.noise.kind: router, but the model ({architecture.model_type}) has none; use another kind")
    if recipe.learner.lora is not None:
        found += lora_problems(architecture, recipe.learner.parallel)
    return found


def smallest_world(parallel: ParallelConfig, rollout: RolloutConfig) -> int:
    """The number of ranks that every number of ranks of this layout is a multiple of."""
    engine = rollout.tensor_parallel if rollout.engine != "vllm_server" else 1
    experts = parallel.expert * parallel.expert_tensor * parallel.pipeline
    return math.lcm(parallel.tensor * parallel.pipeline * parallel.context, experts, engine)


def layout_problems(parallel: ParallelConfig, architecture: Architecture, world_size: int | None) -> list[str]:
    """Why this layout cannot hold the model; empty where it can. ``world_size`` None: not known yet."""
    a, found = architecture, []

    def must_divide(size: int, what: str, number: int, key: str) -> None:
        if number % size:
            fits = [n for n in (1, 2, 4, 8, 16, 32, 64) if number % n == 0]
            found.append(f"learner.parallel.{key}: {size} does not divide {what} ({number}); try one of {fits}")

    must_divide(parallel.tensor, "the number of attention heads", a.num_heads, "tensor")
    must_divide(parallel.tensor, "the number of key/value heads", a.num_kv_heads, "tensor")
    must_divide(parallel.pipeline, "the number of layers", a.num_layers, "pipeline")
    if a.is_moe:
        must_divide(parallel.expert, "the number of experts", a.num_experts, "expert")
        must_divide(parallel.expert_tensor, "the width of an expert", a.moe_ffn_hidden_size, "expert_tensor")
    elif parallel.expert > 1 or parallel.expert_tensor > 1:
        found.append(f"learner.parallel.expert: {parallel.expert}, but {a.model_type} has no experts; use 1")
    if world_size is not None:
        for size, key in (
            (parallel.tensor * parallel.pipeline * parallel.context, "tensor · pipeline · context"),
            (parallel.expert * parallel.expert_tensor * parallel.pipeline, "expert · expert_tensor · pipeline"),
        ):
            if world_size % size:
                found.append(f"learner.parallel: {key} = {size} does not divide the number of ranks ({world_size})")
    return found


def rollout_problems(
    rollout: RolloutConfig,
    architecture: Architecture,
    max_prompt_length: int,
    world_size: int | None = None,
    device: Literal["cpu", "cuda"] | None = None,
) -> list[str]:
    """Why the `rollout` section cannot serve the model; empty where it can. None: not known yet, and not checked."""
    found = []
    total, limit = max_prompt_length + rollout.max_response_length, architecture.max_position_embeddings
    if total > limit:
        found.append(
            f"rollout.max_response_length: prompts of up to {max_prompt_length} tokens (data.prompt.max_length) "
            f"plus responses of up to {rollout.max_response_length} make {total}, but the model's "
            f"max_position_embeddings is {limit}; lower one of the two"
        )
    for number, what in (
        (architecture.num_heads, "attention heads"),
        (architecture.num_kv_heads, "key/value heads"),
    ):
        if number % rollout.tensor_parallel:
            found.append(f"rollout.tensor_parallel: {rollout.tensor_parallel} does not divide the {number} {what}")
    in_ranks = rollout.engine != "vllm_server"
    if in_ranks and world_size is not None and world_size % rollout.tensor_parallel:
        found.append(f"rollout.tensor_parallel: {rollout.tensor_parallel} does not divide the {world_size} ranks")
    too_high = [token for token in rollout.stop_token_ids or [] if token >= architecture.vocab_size]
    if too_high:
        found.append(
            f"rollout.stop_token_ids: {too_high} are outside the vocabulary (0 … {architecture.vocab_size - 1})"
        )
    if device is None:
        return found
    return found + (_cpu_problems if device == "cpu" else _cuda_problems)(rollout, architecture)


def _cuda_problems(rollout: RolloutConfig, architecture: Architecture) -> list[str]:
    """Rounding that vLLM on CUDA cannot do again at every weight update."""
    wanted, found = rollout.quantization, []
    if wanted.weights in ("int8", "int4"):
        found.append(
            f"rollout.quantization.weights: {wanted.weights} on CUDA, where vLLM rounds linear layers and experts "
            "to fp8 alone while it loads; use fp8, or runtime.device cpu"
        )
    elif wanted.weights is not None:
        if wanted.of_weights not in ON_CUDA:
            found.append(
                f"rollout.quantization.block: {wanted.block}; vLLM on CUDA has [128, 128], [1, null] and [null, null]"
            )
        if rollout.dtype == "fp32":
            found.append(
                "rollout.dtype: fp32 with rollout.quantization.weights; vLLM's fp8 kernels on CUDA give bf16 or fp16"
            )
        width = architecture.moe_ffn_hidden_size // rollout.tensor_parallel
        padded = architecture.is_moe and (width % 128 or architecture.hidden_size % 128)
        if wanted.of_weights == (128, 128) and padded:
            found.append(
                f"rollout.tensor_parallel: {rollout.tensor_parallel} leaves experts of {architecture.hidden_size} × "
                f"{width}, which rollout.quantization.block [128, 128] does not divide: vLLM would pad them and hold "
                "those of all layers in full until an update ends; use another tensor_parallel, or block [1, null]"
            )
    return found


def _cpu_problems(rollout: RolloutConfig, architecture: Architecture) -> list[str]:
    """Shapes that vLLM's CPU kernels do not have."""
    found = []
    if rollout.quantization.kv_cache is not None and architecture.head_dim % 32:
        found.append(
            f"rollout.quantization.kv_cache: fp8 with a head_dim of {architecture.head_dim}; vLLM on a CPU has it for "
            "multiples of 32"
        )
    if architecture.head_dim not in CPU_HEAD_DIMS:
        found.append(
            f"model.path: head_dim is {architecture.head_dim}; vLLM on a CPU has attention for {CPU_HEAD_DIMS}"
        )
    if (architecture.moe_ffn_hidden_size // rollout.tensor_parallel) % CPU_EXPERT_MULTIPLE:
        found.append(
            f"model.path: experts are {architecture.moe_ffn_hidden_size} wide over rollout.tensor_parallel "
            f"{rollout.tensor_parallel}; vLLM on a CPU can update expert weights only in multiples of "
            f"{CPU_EXPERT_MULTIPLE} (it pads others after loading)"
        )
    return found


def routing_problems(routing: RoutingConfig, architecture: Architecture) -> list[str]:
    """Why the `routing` section cannot be used with the model; empty where it can."""
    if routing.is_on and not architecture.is_moe:
        key = f"routing.replay: {routing.replay}" if routing.replay != "off" else "routing.telemetry: true"
        return [f"{key}, but the model ({architecture.model_type}) has no experts; remove it for a dense model"]
    return []


def lora_problems(architecture: Architecture, parallel: ParallelConfig) -> list[str]:
    """Why adapters cannot be used; empty where they can."""
    if architecture.is_moe and parallel.expert_tensor > 1:
        return [
            f"learner.lora: with learner.parallel.expert_tensor {parallel.expert_tensor}; adapters of one expert are "
            "not cut, use expert_tensor: 1 and spread experts by learner.parallel.expert"
        ]
    return []


def precision_problems(recipe: RecipeSections, architecture: Architecture) -> list[str]:
    """Differences that make mu another policy than pi, in the recipe's keys; empty where there are none."""
    rollout, precision, found = recipe.rollout, recipe.precision, []
    if (precision.fp32_router or precision.rollout_router) and not architecture.is_moe:
        found.append(f"precision.fp32_router: true, but the model ({architecture.model_type}) has no router; use false")
    if precision.allow_asymmetric:
        return found
    if rollout.top_p < 1.0:
        found.append(
            f"rollout.top_p: {rollout.top_p} cuts the tail off mu but not off pi, a mismatch that no correction "
            "removes; use 1.0 for training, or set precision.allow_asymmetric: true for an ablation"
        )
    if rollout.top_k > 0:
        found.append(
            f"rollout.top_k: {rollout.top_k} cuts mu but not pi; use 0 (off) for training, or set "
            "precision.allow_asymmetric: true for an ablation"
        )
    return found
