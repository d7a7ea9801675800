"""Seconds of a step by arithmetic: work over rate, and the larger of computation and memory traffic.

Each rate is a data-sheet figure times a constant of `plan.hardware`. Use the result to find the dominant part and to
compare layouts; it is not a promise.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.instruments.plan import hardware as hw
from megatron_rl.instruments.plan.generation import Decoding, EngineMemory, exact_generation, prefill_costs
from megatron_rl.instruments.plan.learner import (
    BYTES,
    GRADIENT_BYTES,
    active_parameters,
    key_value_width,
    query_width,
    stage_parameters,
    total_parameters,
)
from megatron_rl.instruments.plan.memory import exact_cache, learner_stages
from megatron_rl.instruments.plan.workload import Workload
from megatron_rl.model.architecture import Architecture

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
    update: float  # forward and backward of all mini-batches, with their communication
    communication: float  # the part of `update` and `old_logprobs` that is communication
    optimizer: float
    refit: float
    offload: float = 0.0  # offload copies in both directions
    samples_ahead: bool = False  # rollout.max_staleness > 0: servers generate the next batch meanwhile

    @property
    def hidden(self) -> float:
        """Seconds in which generating and learning overlap, if they have separate GPUs."""
        learning = self.old_logprobs + self.update + self.optimizer
        return min(self.generate, learning) if self.samples_ahead else 0.0

    @property
    def total(self) -> float:
        return (
            self.generate + self.old_logprobs + self.update + self.optimizer + self.refit + self.offload - self.hidden
        )


def step_time(work: Workload, engine: EngineMemory | None) -> StepTime:
    """Return the seconds of a step. ``engine`` None: the learner itself generates (exact)."""
    recipe, updates = work.recipe, work.recipe.batch.minibatches
    generate = exact_generation(work, exact_cache(work)) if engine is None else _generation(work, engine)
    forward = _forward_seconds(work)
    talk = _talk(work)  # communication of one forward pass over the step's tokens
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


def flops_forward(a: Architecture, tokens: float, length: float, attention_cost: float = 1.0) -> float:
    """Return the operations of a forward pass: two per active parameter and token, and causal attention.

    Those of attention count ``attention_cost`` times.
    """
    return tokens * (2 * active_parameters(a) + attention_cost * 2 * a.num_layers * query_width(a) * length)


def _slowest_stage(work: Workload) -> float:
    """Return the work of the stage with the head over that of the mean stage; all stages wait for it."""
    a, stages = work.architecture, work.parallel.pipeline
    head = a.vocab_size * a.hidden_size
    return ((active_parameters(a) - head) / stages + head) / (active_parameters(a) / stages)


def _forward_seconds(work: Workload) -> float:
    rate = work.gpu.flops(work.recipe.learner.dtype) * hw.LEARNER_MFU[work.architecture.is_moe] * work.ranks
    cost = work.gpu.attention_cost
    return flops_forward(work.architecture, work.trained_tokens, work.mean_sequence, cost) / rate


def _talk(work: Workload) -> float:
    """Return the seconds of tensor-, context- and expert-parallel exchanges in a forward pass, without overlap.

    Per layer, tensor parallelism gathers twice and reduces twice; context parallelism sends all keys and values to
    every rank; an MoE block sends k rows per token and gets them back.
    """
    a, p, b = work.architecture, work.parallel, BYTES[work.recipe.learner.dtype]
    tokens = work.trained_tokens / work.data_parallel / p.context  # of one rank
    row = a.hidden_size * b
    tensor = 4 * a.num_layers / p.pipeline * tokens * row * (p.tensor - 1) / p.tensor
    context_bytes = 2 * a.num_layers / p.pipeline * tokens * (p.context - 1) * key_value_width(a) * b / p.tensor
    rows = tokens / p.tensor * a.experts_per_token * p.expert_tensor
    expert = 2 * sum(a.moe_layers) / p.pipeline * rows * row * (p.expert - 1) / p.expert
    return (
        tensor / _link(work, p.tensor)
        + context_bytes / _link(work, p.tensor * p.context)
        + expert / _link(work, p.expert * p.expert_tensor)
    )


def _optimizer(work: Workload) -> float:
    """Return the seconds of reducing gradients and gathering weights over data-parallel ranks, and of Adam's pass."""
    p, stage = work.parallel, stage_parameters(work.architecture, work.parallel)[0]
    seconds = 0.0
    expert_dp = max(1, work.ranks // (p.expert * p.expert_tensor * p.pipeline))
    for number, replicas in ((stage.dense, work.data_parallel * p.context), (stage.expert, expert_dp)):
        moved = number * (GRADIENT_BYTES + BYTES[work.recipe.learner.dtype]) * (replicas - 1) / replicas
        seconds += moved / _link(work, work.ranks if replicas > 1 else 1)
        seconds += number / replicas * hw.ADAM_BYTES / work.gpu.bandwidth
    return seconds


def _link(work: Workload, group: int) -> float:
    """Return the bytes per second of a collective among ``group`` ranks, neighbours first."""
    return hw.LINK * (work.gpu.nvlink if group <= work.nvlink_gpus else work.gpu.network)


# -- generating


def _generation(work: Workload, engine: EngineMemory) -> float:
    """Return the seconds of decoding at the concurrency of the cache, the longest response alone, and prefill."""
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
    """Return the seconds of a decoding step with all sequences at half of the mean response."""
    context = sequences * (work.mean_prompt + work.mean_response / 2)
    return Decoding.of(work, engine).step(sequences, context)


def _refit(work: Workload) -> float:
    """Return the seconds of a weight update: to local engines, or to servers by broadcast (overlapped) or by files."""
    gathered, handling = weights_seconds(work)
    if work.recipe.rollout.engine != "vllm_server":
        return gathered + handling
    model_bytes = total_parameters(work.architecture) * BYTES[work.recipe.rollout.dtype]
    if not work.recipe.rollout.why_files:
        return max(gathered, model_bytes / (hw.LINK * work.gpu.network)) + handling
    return gathered + handling + 2 * model_bytes / hw.DISK  # once written, once read


def weights_seconds(work: Workload) -> tuple[float, float]:
    """Return the seconds of a weight update on the links, and of handling its tensors.

    Every rank gathers the whole model, tensor by tensor. A sleeping engine drops its old weights without a copy.
    """
    a = work.architecture
    model_bytes = total_parameters(a) * BYTES[work.recipe.rollout.dtype]
    gathered = model_bytes / _link(work, work.ranks) if work.ranks > 1 else 0.0
    matrices = num_expert_matrices(a)
    handling = (num_tensors(a) - matrices) * hw.TENSOR_OVERHEAD_S + matrices * hw.EXPERT_OVERHEAD_S
    return gathered, handling


def _offload(work: Workload) -> float:
    """Return the seconds of offload copies.

    Each part leaves and returns once per step; Adam's states do so in every update if they are away during passes. If
    sampling uses older weights, the current ones leave and older ones return once per step.
    """
    offload, updates = work.recipe.learner.offload, work.recipe.batch.minibatches
    stages = learner_stages(work)
    states, weights = (max(getattr(stage, part) for stage in stages) for part in ("states", "weights"))
    rounds = updates if offload.during_passes else 1
    kept_weights = offload.weights + (work.earlier_weights > 0)
    moved = 2 * (rounds * states * offload.optimizer + weights * kept_weights)
    return moved / (hw.HOST_LINK * work.gpu.host_link)


def num_tensors(a: Architecture) -> int:
    """Return the number of tensors of a Hugging Face checkpoint."""
    attention = 6 + 2 * a.qk_layernorm + 3 * a.qkv_bias
    if a.latent is not None:
        attention = 7 + 2 * (a.latent.query_rank is not None)
    moe = sum(a.moe_layers)
    shared = 3 * (a.shared_ffn_hidden_size > 0) + a.shared_expert_gate + a.sigmoid_router
    dense = a.num_layers * attention + moe * (1 + shared) + 3 * (a.num_layers - moe) + 3 - a.tie_embeddings
    return dense + num_expert_matrices(a)


def num_expert_matrices(a: Architecture) -> int:
    """Return the number of tensors that belong to single experts."""
    return sum(a.moe_layers) * 3 * a.num_experts
