"""Seconds of a step by arithmetic: work over rate, the larger of compute and memory traffic where both bind.

Every rate is a data-sheet figure times a constant of `plan.hardware`; treat the result as a guide to what dominates and
which layout is faster, not as a promise.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.checkpoint.architecture import Architecture
from megatron_rl.plan import hardware as hw
from megatron_rl.plan.activations import BYTES
from megatron_rl.plan.decoding import Decoding, prefill_costs
from megatron_rl.plan.exact import exact_generation
from megatron_rl.plan.generation import EngineMemory
from megatron_rl.plan.learner import GRADIENT_BYTES
from megatron_rl.plan.memory import exact_cache, learner_stages
from megatron_rl.plan.parameters import (
    active_parameters,
    key_value_width,
    query_width,
    stage_parameters,
    total_parameters,
)
from megatron_rl.plan.workload import Workload

RECOMPUTED = {
    "none": 0.0,
    "selective": 0.5,
    "full": 1.0,
}  # forward passes repeated in the backward pass; selective: MoE


@dataclass(frozen=True)
class StepTime:
    """Seconds of the phases of one rollout step."""

    generate: float
    old_logprobs: float
    update: float  # forward and backward of all mini-batches, communication inside them included
    communication: float  # the part of `update` and `old_logprobs` that is communication
    optimizer: float
    refit: float
    offload: float = 0.0  # copies of what leaves the GPU, both ways
    samples_ahead: bool = False  # rollout.max_staleness: servers generate the next batch meanwhile

    @property
    def hidden(self) -> float:
        """Seconds of generating or learning that pass while the other does, where both have GPUs of their own."""
        learning = self.old_logprobs + self.update + self.optimizer
        return min(self.generate, learning) if self.samples_ahead else 0.0

    @property
    def total(self) -> float:
        return (
            self.generate + self.old_logprobs + self.update + self.optimizer + self.refit + self.offload - self.hidden
        )


def step_time(work: Workload, engine: EngineMemory | None) -> StepTime:
    """``engine`` None: the learner generates by itself (exact)."""
    recipe, updates = work.recipe, work.recipe.batch.minibatches
    generate = exact_generation(work, exact_cache(work)) if engine is None else _generation(work, engine)
    forward = _forward_seconds(work)
    talk = _talk(work)  # of one forward pass over the step's tokens
    again = RECOMPUTED[recipe.learner.recompute]
    bubble = (1.0 + (work.parallel.pipeline - 1) / work.microbatches) * _slowest_stage(work)
    update = ((3 + again) * forward + (2 + again) * talk) * bubble
    needs_old = recipe.routing.replay == "r2" or recipe.objective.needs_old_logprobs(updates)
    old = (
        forward * hw.LEARNER_MFU[work.architecture.is_moe] / hw.PREFILL_MFU[work.architecture.is_moe] + talk
    ) * bubble
    return StepTime(
        generate=generate,
        old_logprobs=old if needs_old else 0.0,
        update=update,
        communication=(2 + again + needs_old) * talk * bubble,
        optimizer=updates * _optimizer(work),
        refit=0.0 if engine is None else _refit(work),
        offload=_offload(work),
        samples_ahead=recipe.rollout.max_staleness > 0,
    )


# -- learning


def flops_forward(a: Architecture, tokens: float, length: float) -> float:
    """Two per active parameter and token, and causal attention over sequences of ``length`` tokens."""
    return tokens * (2 * active_parameters(a) + 2 * a.num_layers * query_width(a) * length)


def _slowest_stage(work: Workload) -> float:
    """Work of the stage with the head over the mean stage's: all wait for it."""
    a, stages = work.architecture, work.parallel.pipeline
    head = a.vocab_size * a.hidden_size
    return ((active_parameters(a) - head) / stages + head) / (active_parameters(a) / stages)


def _forward_seconds(work: Workload) -> float:
    rate = work.gpu.flops(work.recipe.learner.dtype) * hw.LEARNER_MFU[work.architecture.is_moe] * work.ranks
    return flops_forward(work.architecture, work.trained_tokens, work.mean_sequence) / rate


def _talk(work: Workload) -> float:
    """Tensor-, context- and expert-parallel exchanges of one forward pass over the step's tokens, none of it hidden.

    Per layer, tensor parallelism gathers twice and reduces twice; context parallelism gives every rank all keys and
    values; an MoE block sends k rows a token and gets them back.
    """
    a, p, b = work.architecture, work.parallel, BYTES[work.recipe.learner.dtype]
    tokens = work.trained_tokens / work.data_parallel / p.context  # of one rank
    row = a.hidden_size * b
    tensor = 4 * a.num_layers / p.pipeline * tokens * row * (p.tensor - 1) / p.tensor
    others = 2 * a.num_layers / p.pipeline * tokens * (p.context - 1) * key_value_width(a) * b / p.tensor
    rows = tokens / p.tensor * a.experts_per_token * p.expert_tensor
    expert = 2 * sum(a.moe_layers) / p.pipeline * rows * row * (p.expert - 1) / p.expert
    return (
        tensor / _link(work, p.tensor)
        + others / _link(work, p.tensor * p.context)
        + expert / _link(work, p.expert * p.expert_tensor)
    )


def _optimizer(work: Workload) -> float:
    """Gradients reduced and weights gathered over data-parallel ranks, and Adam's pass over its shard."""
    p, stage = work.parallel, stage_parameters(work.architecture, work.parallel)[0]
    seconds = 0.0
    expert_dp = max(1, work.ranks // (p.expert * p.expert_tensor * p.pipeline))
    for number, replicas in ((stage.dense, work.data_parallel * p.context), (stage.expert, expert_dp)):
        moved = number * (GRADIENT_BYTES + BYTES[work.recipe.learner.dtype]) * (replicas - 1) / replicas
        seconds += moved / _link(work, work.ranks if replicas > 1 else 1)
        seconds += number / replicas * hw.ADAM_BYTES / work.gpu.bandwidth
    return seconds


def _link(work: Workload, group: int) -> float:
    """Bytes per second of a collective among ``group`` ranks, neighbours first."""
    return hw.LINK * (work.gpu.nvlink if group <= work.gpus_per_node else work.gpu.network)


# -- generating


def _generation(work: Workload, engine: EngineMemory) -> float:
    """Decoding at the concurrency that the cache allows, then the longest response alone, and prefill."""
    recipe, tp = work.recipe, work.recipe.rollout.tensor_parallel
    colocated = recipe.rollout.engine == "vllm"
    engines = max(1, work.ranks // tp) if colocated else recipe.rollout.servers.num_expected
    num = work.sampled_sequences / engines
    concurrency = max(1.0, min(num, recipe.rollout.max_num_seqs, engine.tokens / work.mean_sequence))
    steps = num * work.mean_response / concurrency
    tail = max(0.0, recipe.rollout.max_response_length - steps)
    prompts = num / (recipe.rollout.num_samples if recipe.rollout.enable_prefix_caching else 1)
    token, square = prefill_costs(work)
    prefill = prompts * work.mean_prompt * (token + square * work.mean_prompt)
    return steps * _decoding_step(work, engine, concurrency) + tail * _decoding_step(work, engine, 1.0) + prefill


def _decoding_step(work: Workload, engine: EngineMemory, sequences: float) -> float:
    """With every sequence half way through its mean response."""
    context = sequences * (work.mean_prompt + work.mean_response / 2)
    return Decoding.of(work, engine).step(sequences, context)


def _refit(work: Workload) -> float:
    """To engines in the ranks, or to servers: while it is gathered by broadcast from one rank, or after it by files."""
    gathered, handling = weights_seconds(work)
    if work.recipe.rollout.engine != "vllm_server":
        return gathered + handling
    whole = total_parameters(work.architecture) * BYTES[work.recipe.rollout.dtype]
    if not work.recipe.rollout.why_files:
        return max(gathered, whole / (hw.LINK * work.gpu.network)) + handling
    return gathered + handling + 2 * whole / hw.DISK  # written and read


def weights_seconds(work: Workload) -> tuple[float, float]:
    """Every rank gathers the whole model, tensor by tensor; a sleeping engine gives its old weights up uncopied.

    Seconds on the links, and of handling tensors.
    """
    a = work.architecture
    whole = total_parameters(a) * BYTES[work.recipe.rollout.dtype]
    gathered = whole / _link(work, work.ranks) if work.ranks > 1 else 0.0
    matrices = num_expert_matrices(a)
    handling = (num_tensors(a) - matrices) * hw.TENSOR_OVERHEAD_S + matrices * hw.EXPERT_OVERHEAD_S
    return gathered, handling


def _offload(work: Workload) -> float:
    """Each part leaves and comes back once a step; Adam's states in every update where they are away in passes. Weights
    that are sampled from later leave, and earlier ones come, once a step."""
    offload, updates = work.recipe.learner.offload, work.recipe.batch.minibatches
    stages = learner_stages(work)
    states, weights = (max(getattr(stage, part) for stage in stages) for part in ("states", "weights"))
    rounds = updates if offload.during_passes else 1
    kept_weights = offload.weights + (work.earlier_weights > 0)
    moved = 2 * (rounds * states * offload.optimizer + weights * kept_weights)
    return moved / (hw.HOST_LINK * work.gpu.host_link)


def num_tensors(a: Architecture) -> int:
    """Tensors of a Hugging Face checkpoint."""
    attention = 6 + 2 * a.qk_layernorm + 3 * a.qkv_bias
    moe = sum(a.moe_layers)
    dense = a.num_layers * attention + moe + 3 * (a.num_layers - moe) + 3 - a.tie_embeddings
    return dense + num_expert_matrices(a)


def num_expert_matrices(a: Architecture) -> int:
    """Those of them that belong to one expert."""
    return sum(a.moe_layers) * 3 * a.num_experts
