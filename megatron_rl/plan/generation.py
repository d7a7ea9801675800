"""Memory of the rollout engine on one GPU, and what its key/value cache holds.

Symbols: L layers, d head width, b bytes of an element, tp `rollout.tensor_parallel`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.checkpoint.architecture import Architecture
from megatron_rl.config import Recipe
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.plan.activations import BYTES
from megatron_rl.plan.hardware import GIB, GRAPHS_GIB, Gpu
from megatron_rl.plan.parameters import key_value_width, query_width, total_parameters, vocabulary

ROUNDED_BYTES = {"fp8": 1.0, "int8": 1.0, "int4": 0.5}  # of a code
SCALE_BYTES = 4
SAMPLER_COPIES = 4  # of [max_num_seqs, V] in fp32: logits, log-probs, probabilities, noise


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on one GPU of one engine."""

    weights: float
    activations: float  # largest of its profiling run: a full prefill batch and the sampler
    graphs: float
    cache: float  # of keys and values; negative where the budget does not even hold the rest
    token_bytes: float  # of the cache, per token
    longest: int  # tokens of the longest prompt with the longest response

    @property
    def total(self) -> float:
        return self.weights + self.activations + self.graphs + max(self.cache, 0.0)

    @property
    def tokens(self) -> int:
        """That the cache holds at once."""
        return max(0, int(self.cache // self.token_bytes))


def engine_memory(recipe: Recipe, a: Architecture, gpu: Gpu, utilization: float) -> EngineMemory:
    """A vLLM engine that may fill ``utilization`` of a GPU, or has the cache that `rollout.kv_cache_gib` names."""
    rollout, b, tp = recipe.rollout, BYTES[recipe.rollout.dtype], recipe.rollout.tensor_parallel
    weights = weight_bytes(a, rollout) / tp
    activations = _activations(a, gpu.batched_tokens, b, tp)
    activations += SAMPLER_COPIES * 4 * rollout.max_num_seqs * a.vocab_size
    graphs = 0.0 if rollout.enforce_eager else GRAPHS_GIB * GIB
    if rollout.kv_cache_gib is not None:
        cache = rollout.kv_cache_gib * GIB
    else:
        cache = utilization * gpu.memory_gib * GIB - weights - activations - graphs
    stored = 1 if rollout.quantization.kv_cache else b
    per_token = 2 * a.num_layers * max(1, a.num_kv_heads // tp) * a.head_dim * stored
    longest = recipe.data.prompt.max_length + rollout.max_response_length
    return EngineMemory(weights, activations, graphs, cache, per_token, longest)


def weight_bytes(a: Architecture, rollout: RolloutConfig) -> float:
    """Of the whole model in an engine: rounded weights as codes with their scales, the others in `rollout.dtype`."""
    total = total_parameters(a)
    if rollout.quantization.weights is None:
        return total * BYTES[rollout.dtype]
    kept = vocabulary(a, 1) * (2 - a.tie_embeddings) + sum(a.moe_layers) * a.hidden_size * a.num_experts
    return kept * BYTES[rollout.dtype] + (total - kept) * weight_size(rollout)


def weight_size(rollout: RolloutConfig) -> float:
    """Bytes of one weight of a linear layer or an expert in an engine; norms and biases count as such.

    A scale of a whole row or matrix counts nothing.
    """
    wanted = rollout.quantization
    if wanted.weights is None:
        return BYTES[rollout.dtype]
    rows, columns = wanted.of_weights
    scale = SCALE_BYTES / (rows * columns) if rows and columns else 0.0
    return ROUNDED_BYTES[wanted.weights] + scale


def route_bytes(recipe: Recipe, a: Architecture, tokens: float) -> float:
    """Host memory of the recorded routes of ``tokens`` tokens, on every rank; 0 where none are recorded."""
    if not recipe.routing.needs_engine_routes:
        return 0.0
    return tokens * sum(a.moe_layers) * a.experts_per_token * (1 if a.num_experts <= 256 else 2)


def _activations(a: Architecture, tokens: int, b: int, tp: int) -> float:
    """The widest moment of a layer over ``tokens`` tokens: stream and residual, and attention or feed-forward."""
    attention = (query_width(a) + 2 * key_value_width(a)) / tp + query_width(a) / tp
    feed_forward = 3 * a.ffn_hidden_size / tp
    if a.is_moe:
        f = a.moe_ffn_hidden_size / tp
        feed_forward = a.experts_per_token * (max(2 * f, a.hidden_size) + f)
    return tokens * b * (3 * a.hidden_size + max(attention, feed_forward))
