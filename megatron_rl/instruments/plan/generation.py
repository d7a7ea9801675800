"""Time and memory of generation on GPUs: by vLLM, with its key/value cache, and by the exact engine.

Exact generation has the learner's layout, `exact.schedule` and the kernels of `exact.kernels`.

Exactness has a price: products have tiles of 64 rows and are not split along K; sums over ranks are gathered in full
and added in order.

Symbols: b bytes of an element, tp `rollout.tensor_parallel`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush

import numpy as np

from megatron_rl.config import Recipe
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.instruments.plan import delta_net
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
from megatron_rl.instruments.plan.workload import Lengths, Workload
from megatron_rl.model.architecture import Architecture

ROUNDED_BYTES = {"fp8": 1.0, "int8": 1.0, "int4": 0.5}  # bytes per rounded weight
SCALE_BYTES = 4
SAMPLER_COPIES = 4  # copies of [max_num_seqs, V] in fp32: logits, log-probs, probabilities, noise


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on one GPU of one engine."""

    weights: float
    activations: float  # peak of its profiling run: a full prefill batch and the sampler
    graphs: float  # CUDA graphs, and workspaces of exchanges and attention; they stay while it sleeps
    cache: float  # keys and values; negative if the budget is too small for the rest
    token_bytes: float  # bytes of the cache per token
    longest: int  # tokens of the longest prompt plus the longest response
    sequence_bytes: float = 0.0  # bytes of the cache per sequence, whatever its length

    def sequences(self, length: float) -> float:
        """Return how many sequences of ``length`` tokens fit in the cache."""
        return self.tokens / (length + self.sequence_bytes / self.token_bytes)

    @property
    def tokens(self) -> int:
        """Number of tokens that fit in the cache, if no sequence had more."""
        return max(0, int(self.cache // self.token_bytes))


def engine_memory(recipe: Recipe, a: Architecture, gpu: Gpu, utilization: float) -> EngineMemory:
    """Return the memory of a vLLM engine that may use ``utilization`` of a GPU or has `rollout.kv_cache_gib`."""
    rollout, b, tp = recipe.rollout, BYTES[recipe.rollout.dtype], recipe.rollout.tensor_parallel
    weights = weight_bytes(a, rollout) / tp
    activations = _activations(a, rollout.max_num_batched_tokens or gpu.batched_tokens, b, tp)
    activations += SAMPLER_COPIES * 4 * rollout.max_num_seqs * a.vocab_size
    graphs = gpu.fitted(hw.FLASHINFER_GIB) * GIB + (0.0 if rollout.enforce_eager else GRAPHS_GIB * GIB)
    graphs += (hw.EXCHANGE_GIB + hw.GROUP_GIB) * GIB * (tp > 1)
    if rollout.kv_cache_gib is not None:
        cache = rollout.kv_cache_gib * GIB
    else:
        cache = utilization * gpu.memory_gib * GIB - weights - activations - graphs
    stored = 1 if rollout.quantization.kv_cache else b
    width = 2 * max(1, a.num_kv_heads // tp) * a.head_dim
    if a.latent is not None:  # every rank of an engine keeps the whole latent vector
        width = a.latent.rank + a.latent.rotary_width
    per_token = (a.num_layers - delta_net.layers(a)) * width * stored
    longest = recipe.data.prompt.max_length + rollout.max_response_length
    of_sequence = delta_net.sequence_bytes(a, b, tp)
    return EngineMemory(weights, activations, graphs, cache, per_token, longest, of_sequence)


def runtime_bytes(work: Workload) -> float:
    """Return the bytes of a learner's process on a GPU that PyTorch does not allocate: CUDA's context, and NCCL's
    buffers of the groups that have several ranks."""
    p, replicas = work.parallel, work.data_parallel
    of_experts = work.ranks // (p.expert * p.expert_tensor * p.pipeline)
    sizes = [p.tensor, p.pipeline, p.context, replicas, p.expert, p.expert_tensor, of_experts, work.ranks]
    return (hw.CONTEXT_GIB + hw.GROUP_GIB * sum(size > 1 for size in sizes)) * GIB


def weight_bytes(a: Architecture, rollout: RolloutConfig) -> float:
    """Return the bytes of the whole model in an engine: rounded weights with scales, others in `rollout.dtype`."""
    total = total_parameters(a)
    if rollout.quantization.weights is None:
        return total * BYTES[rollout.dtype]
    unquantized = vocabulary(a, 1) * (2 - a.tie_embeddings) + sum(a.moe_layers) * a.hidden_size * a.num_experts
    unquantized += sum(a.moe_layers) * a.hidden_size * a.shared_expert_gate
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


def _activations(a: Architecture, tokens: int, b: int, tp: int) -> float:
    """Return a layer's peak over ``tokens`` tokens: stream, residual, and attention or feed-forward."""
    attention = ((2 + a.output_gate) * query_width(a) + 2 * key_value_width(a)) / tp
    attention = max(attention, delta_net.activations(a, b) / b / tp)
    feed_forward = 3 * a.ffn_hidden_size / tp
    if a.is_moe:
        f = a.moe_ffn_hidden_size / tp
        feed_forward = a.experts_per_token * (max(2 * f, a.hidden_size) + f) + 3 * a.shared_ffn_hidden_size / tp
    return tokens * b * (3 * a.hidden_size + max(attention, feed_forward))


# Seconds of an engine. A decoding step has a fixed part for each layer, reads weights and cache, and handles sequences.


@dataclass(frozen=True)
class Decoding:
    """Unit costs of one engine in seconds."""

    fixed: float  # per step: launches and exchanges of all layers
    weights: float  # bytes of the weights on one GPU
    experts: float  # the part of them that belongs to experts
    idle: float  # share of the experts that one token does not take
    bandwidth: float  # bytes per second
    token_bytes: float  # of the cache, on one GPU
    products: float  # per sequence
    sequence: float  # per sequence: sampling, and the stream of tokens
    sequence_bytes: float = 0.0  # of the cache per sequence, on one GPU: read and written

    @classmethod
    def of(cls, work: Workload, engine: EngineMemory) -> Decoding:
        a, rollout, tp = work.architecture, work.recipe.rollout, work.recipe.rollout.tensor_parallel
        layer = hw.EAGER_LAYER_S if rollout.enforce_eager else work.gpu.fitted(hw.DECODE_LAYER_S)
        if tp > 1 and not rollout.enforce_eager:
            across = hw.ACROSS_NODES if tp > work.nvlink_gpus else 1.0
            layer += work.gpu.fitted(hw.DECODE_EXCHANGE_S) * across
        if rollout.quantization.weights is not None:
            layer += hw.ROUNDED_LAYER_S
        expert = sum(a.moe_layers) * 3 * a.hidden_size * a.moe_ffn_hidden_size * a.num_experts
        return cls(
            fixed=a.num_layers * layer,
            weights=weight_bytes(a, rollout) / tp,
            experts=expert * weight_size(rollout) / tp,
            idle=1 - a.experts_per_token / a.num_experts if a.is_moe else 0.0,
            bandwidth=work.gpu.bandwidth * hw.DECODE_BANDWIDTH,
            token_bytes=engine.token_bytes,
            sequence_bytes=2 * engine.sequence_bytes,
            products=2 * active_parameters(a) / tp / (work.gpu.flops(rollout.dtype) * hw.DECODE_FLOPS),
            sequence=hw.SERVED_S if work.served or rollout.engine == "vllm_server" else hw.SAMPLED_S,
        )

    def step(self, sequences: float, context: float) -> float:
        """Return the seconds of one step of ``sequences`` with ``context`` tokens in total."""
        read = self.weights - self.experts * self.idle**sequences + self.token_bytes * context
        read += self.sequence_bytes * sequences
        return self.fixed + max(read / self.bandwidth, self.products * sequences) + self.sequence * sequences


GROUPS = 256  # into which the responses of an engine are gathered; those of a group run and end together


@lru_cache(maxsize=4096)
def decode_seconds(law: Decoding, lengths: Lengths, number: float, slots: float, prompt: float) -> float:
    """Return the seconds until ``number`` responses of these lengths have ended, with ``slots`` of them at a time.

    A response that ends makes room for the next. Lengths are in no order.
    """
    groups = max(1, min(GROUPS, round(number)))
    each = number / groups
    waiting = np.random.default_rng(0).permutation(lengths.quantiles(groups)).tolist()
    room, ends, clock, context, seconds = max(1, int(slots / each)), [], 0.0, 0.0, 0.0
    while waiting or ends:
        while waiting and len(ends) < room:
            heappush(ends, (clock + waiting[-1], waiting.pop()))
            context += each * prompt
        running, steps = each * len(ends), ends[0][0] - clock
        seconds += steps * law.step(running, context + running * steps / 2)
        clock, context = ends[0][0], context + running * steps
        while ends and ends[0][0] <= clock:
            context -= each * (prompt + heappop(ends)[1])
    return seconds


def generation_seconds(work: Workload, engine: EngineMemory) -> float:
    """Return the seconds of sampling a step's responses: prompts, and decoding of responses of unequal lengths.

    Servers that sample ahead (`rollout.max_staleness`, but for the mode `finish`) are kept full by the next steps'
    responses: their seconds are those of a step's tokens at the number of responses that run at a time.
    """
    rollout = work.recipe.rollout
    beside = rollout.engine == "vllm"
    engines = max(1, work.ranks // rollout.tensor_parallel) if beside else rollout.servers.num_expected
    number, law = work.sampled_sequences / engines, Decoding.of(work, engine)
    slots = max(1.0, min(rollout.max_num_seqs, engine.sequences(work.mean_sequence)))
    prompts = number / rollout.num_samples
    prefill = prompts * work.mean_prompt * prefill_seconds(work)
    if not rollout.max_staleness or rollout.in_flight.mode == "finish":
        return prefill + decode_seconds(law, work.lengths, number, slots, work.mean_prompt)
    longest = work.lengths.quantiles(max(1, round(work.sampled_sequences)))[-1]
    ahead = number * (1 + rollout.max_staleness) * work.mean_response / longest  # mean number of those in flight
    running = max(1.0, min(slots, ahead))
    context = running * (work.mean_square - work.mean_prompt**2) / 2 / work.mean_response
    return prefill + number * work.mean_response / running * law.step(running, context)


def flops_forward(a: Architecture, tokens: float, length: float, attention_cost: float = 1.0) -> float:
    """Return the operations of a forward pass: two per active parameter and token, causal attention, and delta nets.

    Those of attention count ``attention_cost`` times.
    """
    attention = attention_cost * 2 * (a.num_layers - delta_net.layers(a)) * query_width(a) * length
    return tokens * (2 * active_parameters(a) + attention + delta_net.flops(a))


def prefill_seconds(work: Workload) -> float:
    """Return an engine's seconds per token of a mean prompt, with causal attention."""
    a, rollout = work.architecture, work.recipe.rollout
    rate = rollout.tensor_parallel * work.gpu.flops(rollout.dtype) * hw.PREFILL_MFU[a.is_moe]
    return flops_forward(a, 1.0, work.mean_prompt, work.gpu.attention_cost) / rate


TILE = 64  # rows of a product's tile: exact/kernels
KERNELS = 29
"""Kernels of a layer on one GPU, as `tests/unit/exact/test_step_without_waits.py` counts them: products, norms,
rotations, copies of their inputs, two writes to the cache, two of attention, sums with the residual, router, order of
the experts, two grouped products with SiLU between, sum over experts."""
KERNELS_OF_EXPERTS = 5  # further kernels if ranks share experts: sending, and the places of others' results


def cache_beside(work: Workload, at_rest: float) -> EngineMemory:
    """Return the cache beside a learner that takes ``at_rest`` bytes of a GPU.

    It has the size that `rollout.kv_cache_gib` or `rollout.gpu_memory_utilization` leaves, but no more than the
    sequences of a replica can fill.
    """
    a, rollout = work.architecture, work.recipe.rollout
    heads = max(1, a.num_kv_heads // work.parallel.tensor)
    token = 2.0 * a.num_layers * heads * a.head_dim * BYTES[work.recipe.learner.dtype]
    room = rollout.gpu_memory_utilization * work.gpu.memory_gib * hw.GIB - at_rest - runtime_bytes(work)
    if rollout.kv_cache_gib is not None:
        room = rollout.kv_cache_gib * hw.GIB
    needed = min(rollout.max_num_seqs, math.ceil(work.sampled_sequences / work.data_parallel)) * work.longest * token
    return EngineMemory(0.0, 0.0, 0.0, min(room, needed), token, work.longest)


def exact_generation(work: Workload, cache: EngineMemory) -> float:
    """Return the seconds of generation: prompts once per replica that samples them, decoding steps at the concurrency
    that the cache allows, then the longest response alone."""
    recipe, a, replicas = work.recipe, work.architecture, work.data_parallel
    num = work.sampled_sequences / replicas
    concurrency = max(1.0, min(num, recipe.rollout.max_num_seqs, cache.tokens / work.mean_sequence))
    steps, longest = num * work.mean_response / concurrency, recipe.rollout.max_response_length
    tail = max(0.0, longest - steps)
    prompts = num / max(1.0, recipe.rollout.num_samples / replicas)  # `requests.share_of` assigns samples to replicas
    rate = work.parallel.tensor * work.gpu.flops(recipe.learner.dtype) * work.gpu.fitted(hw.LEARNER_SHARE)
    flops = flops_forward(a, 1.0, work.mean_prompt)
    return (
        steps * exact_step(work, concurrency, cache.token_bytes * (work.mean_prompt + work.mean_response / 2))
        + tail * exact_step(work, 1.0, cache.token_bytes * (work.mean_prompt + (steps + longest) / 2))
        + prompts * work.mean_prompt * flops / rate
    )


def exact_step(work: Workload, sequences: float, cached: float) -> float:
    """Return the seconds of one step of ``sequences`` per replica with ``cached`` bytes of keys and values each.

    Dense weights and those of the experts that a token chose are read or multiplied, whichever takes longer; the cache
    is read; kernels are launched; ranks exchange sums, and the rows of experts with all ranks of their group.
    """
    a, p, gpu = work.architecture, work.parallel, work.gpu
    moe, expert = sum(a.moe_layers), 3 * a.hidden_size * a.moe_ffn_hidden_size
    dense = (active_parameters(a) - moe * expert * a.experts_per_token) / p.tensor
    rows = _whole(sequences)
    seconds = _multiplied(work, "dense", dense, rows) + sequences * cached / (gpu.bandwidth * hw.EXACT_CACHE)
    row, messages = rows * a.hidden_size * BYTES[work.recipe.learner.dtype], 0
    if p.tensor > 1:
        messages = 2 * a.num_layers
        seconds += messages * (p.tensor - 1) * row / work.link(p.tensor)
    if moe:
        tokens = sequences * max(1.0, p.expert * p.expert_tensor / p.tensor)  # of all replicas of an expert group
        seen = a.num_experts / p.expert * (1.0 - (1.0 - a.experts_per_token / a.num_experts) ** tokens)
        each = _whole(tokens * a.experts_per_token / a.num_experts)
        seconds += _multiplied(work, "experts", moe * seen * expert / p.expert_tensor, each)
    if p.expert > 1:
        messages += 2 * moe
        received = (p.expert - 1) * row / p.tensor * (1 + a.experts_per_token)
        seconds += moe * received / work.link(p.expert * p.expert_tensor)
    return seconds + messages * hw.ALLREDUCE_S + _launches(work)


def _multiplied(work: Workload, kind: str, weights: float, rows: int) -> float:
    dtype = work.recipe.learner.dtype
    traffic = weights * BYTES[dtype] / (work.gpu.bandwidth * hw.EXACT_BANDWIDTH[kind])
    return max(traffic, 2.0 * rows * weights / (work.gpu.flops(dtype) * hw.EXACT_FLOPS[BYTES[dtype]][kind]))


def _launches(work: Workload) -> float:
    """Return the seconds of a step's kernels: in a graph, or single launches without one (`exact.step`)."""
    a, p = work.architecture, work.parallel
    through_modules = max(p.pipeline, p.expert_tensor) > 1 or work.recipe.learner.lora is not None
    if work.recipe.rollout.enforce_eager or through_modules:
        return hw.EXACT_EAGER_S
    sums = (2 * a.num_layers - sum(a.moe_layers)) * (p.tensor + 1) if p.tensor > 1 else 0
    of_experts = sum(a.moe_layers) * KERNELS_OF_EXPERTS if p.expert > 1 else 0
    return (a.num_layers * KERNELS + sums + of_experts) * hw.KERNEL_S


def _whole(rows: float) -> int:
    return TILE * max(1, math.ceil(rows / TILE))
