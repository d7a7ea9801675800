"""Memory of the rollout engine on one GPU, and the capacity of its key/value cache.

Symbols: L layers, d head width, b bytes of an element, tp `rollout.tensor_parallel`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config import Recipe
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.instruments.plan import hardware as hw
from megatron_rl.instruments.plan.hardware import GIB, GRAPHS_GIB, Gpu
from megatron_rl.instruments.plan.learner import (
    BYTES,
    active_parameters,
    key_value_width,
    query_width,
    total_parameters,
    vocabulary,
)
from megatron_rl.instruments.plan.workload import Workload
from megatron_rl.model.architecture import Architecture

ROUNDED_BYTES = {"fp8": 1.0, "int8": 1.0, "int4": 0.5}  # bytes per rounded weight
SCALE_BYTES = 4
SAMPLER_COPIES = 4  # copies of [max_num_seqs, V] in fp32: logits, log-probs, probabilities, noise


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on one GPU of one engine."""

    weights: float
    activations: float  # peak of its profiling run: a full prefill batch and the sampler
    graphs: float
    cache: float  # keys and values; negative if the budget is too small for the rest
    token_bytes: float  # bytes of the cache per token
    longest: int  # tokens of the longest prompt plus the longest response

    @property
    def total(self) -> float:
        return self.weights + self.activations + self.graphs + max(self.cache, 0.0)

    @property
    def tokens(self) -> int:
        """Number of tokens that fit in the cache."""
        return max(0, int(self.cache // self.token_bytes))


def engine_memory(recipe: Recipe, a: Architecture, gpu: Gpu, utilization: float) -> EngineMemory:
    """Return the memory of a vLLM engine that may use ``utilization`` of a GPU or has `rollout.kv_cache_gib`."""
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
    """Return the bytes of the whole model in an engine: rounded weights with scales, others in `rollout.dtype`."""
    total = total_parameters(a)
    if rollout.quantization.weights is None:
        return total * BYTES[rollout.dtype]
    unquantized = vocabulary(a, 1) * (2 - a.tie_embeddings) + sum(a.moe_layers) * a.hidden_size * a.num_experts
    return unquantized * BYTES[rollout.dtype] + (total - unquantized) * weight_size(rollout)


def weight_size(rollout: RolloutConfig) -> float:
    """Return the bytes per weight of a linear layer or expert in an engine; norms and biases count the same.

    The scale of a whole row or matrix is neglected.
    """
    quantization = rollout.quantization
    if quantization.weights is None:
        return BYTES[rollout.dtype]
    rows, columns = quantization.of_weights
    scale = SCALE_BYTES / (rows * columns) if rows and columns else 0.0
    return ROUNDED_BYTES[quantization.weights] + scale


def route_bytes(recipe: Recipe, a: Architecture, tokens: float) -> float:
    """Return the host memory of the routes of ``tokens`` tokens on every rank; 0 if none are recorded."""
    if not recipe.routing.needs_engine_routes:
        return 0.0
    return tokens * sum(a.moe_layers) * a.experts_per_token * (1 if a.num_experts <= 256 else 2)


def _activations(a: Architecture, tokens: int, b: int, tp: int) -> float:
    """Return a layer's peak over ``tokens`` tokens: stream, residual, and attention or feed-forward."""
    attention = (query_width(a) + 2 * key_value_width(a)) / tp + query_width(a) / tp
    feed_forward = 3 * a.ffn_hidden_size / tp
    if a.is_moe:
        f = a.moe_ffn_hidden_size / tp
        feed_forward = a.experts_per_token * (max(2 * f, a.hidden_size) + f) + 3 * a.shared_ffn_hidden_size / tp
    return tokens * b * (3 * a.hidden_size + max(attention, feed_forward))


# Seconds of an engine's decoding step and prefill: overhead plus the larger of memory traffic and computation.


@dataclass(frozen=True)
class Decoding:
    """Unit costs of one engine in seconds."""

    architecture: Architecture
    overhead: float  # per step
    weights: float  # bytes of the weights on all GPUs
    expert_weight: float  # bytes per weight of an expert
    read_byte: float  # seconds per byte of the weights
    read_token: float  # per token of context
    compute: float  # per sequence

    @classmethod
    def of(cls, work: Workload, engine: EngineMemory) -> Decoding:
        a, rollout, tp = work.architecture, work.recipe.rollout, work.recipe.rollout.tensor_parallel
        overhead = hw.EAGER_OVERHEAD_S if rollout.enforce_eager else hw.STEP_OVERHEAD_S
        overhead += 2 * a.num_layers * hw.ALLREDUCE_S * (tp > 1)
        bandwidth = work.gpu.bandwidth * hw.DECODE_BANDWIDTH
        return cls(
            architecture=a,
            overhead=overhead,
            weights=weight_bytes(a, rollout),
            expert_weight=weight_size(rollout),
            read_byte=1 / tp / bandwidth,
            read_token=engine.token_bytes / bandwidth,
            compute=2 * active_parameters(a) / tp / (work.gpu.flops(rollout.dtype) * hw.DECODE_FLOPS),
        )

    def read(self, sequences: float) -> float:
        """Return the seconds of reading weights in a step; in an MoE, of the experts for ``sequences`` tokens."""
        a = self.architecture
        moe = sum(a.moe_layers) * 3 * a.hidden_size * a.moe_ffn_hidden_size * a.num_experts
        idle = (1 - a.experts_per_token / a.num_experts) ** sequences if a.is_moe else 0.0
        return (self.weights - moe * self.expert_weight * idle) * self.read_byte

    def step(self, sequences: float, context: float) -> float:
        """Return the seconds of one step of ``sequences`` with ``context`` tokens in total."""
        return self.overhead + max(self.read(sequences) + self.read_token * context, self.compute * sequences)


def prefill_costs(work: Workload) -> tuple[float, float]:
    """Return an engine's seconds per token of a prompt, and per square of its length (causal attention)."""
    a, rollout = work.architecture, work.recipe.rollout
    rate = rollout.tensor_parallel * work.gpu.flops(rollout.dtype) * hw.PREFILL_MFU[a.is_moe]
    attention = work.gpu.attention_cost * 2 * a.num_layers * query_width(a)
    return 2 * active_parameters(a) / rate, attention / rate
