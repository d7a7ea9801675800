"""Seconds of a step's phases by arithmetic, each with a range.

The time of a part is work over rate, and the largest of computation, memory traffic and the host's. Each rate is a
data-sheet figure times a constant of `plan.hardware`; `hardware.ERRORS` says by what factor published phases differed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from megatron_rl.config.model_rules import stage_layers
from megatron_rl.instruments.plan import hardware as hw
from megatron_rl.instruments.plan.generation import (
    EngineMemory,
    exact_generation,
    flops_forward,
    generation_seconds,
    prefill_seconds,
)
from megatron_rl.instruments.plan.learner import (
    BYTES,
    GRADIENT_BYTES,
    active_parameters,
    key_value_width,
    stage_parameters,
    total_parameters,
)
from megatron_rl.instruments.plan.memory import exact_cache, learner_stages, second_weights
from megatron_rl.instruments.plan.workload import Workload
from megatron_rl.model.architecture import Architecture
from megatron_rl.model.families import FAMILIES
from megatron_rl.model.families.weights import EXPERT

RECOMPUTED = {"none": 0.0, "selective": 0.5, "full": 1.0}
"""Forward passes repeated in the backward pass; selective: of an MoE."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of the phases of one rollout step."""

    generate: float
    old_logprobs: float
    update: float  # forward and backward of all mini-batches
    optimizer: float
    refit: float
    switch: float = 0.0  # fixed parts of sleep and wake of an engine beside the learner
    offload: float = 0.0  # offload copies in both directions
    scores: float = 0.0  # a pass of each response alone: objective.advantage min_variance
    second_models: float = 0.0  # log-probs under models beside the policy
    teachers: float = 0.0  # the same of engines beside the learner
    acceptance: float = 0.0  # responses that judge an update, their log-probs, and the weights sent once more
    samples_ahead: bool = False  # rollout.max_staleness > 0: servers generate the next batch meanwhile

    @property
    def learning(self) -> float:
        others = self.second_models + self.teachers + self.scores
        return self.old_logprobs + others + self.update + self.optimizer

    @property
    def hidden(self) -> float:
        """Seconds in which generating and learning overlap, if they have separate GPUs."""
        return min(self.generate, self.learning) if self.samples_ahead else 0.0

    @property
    def total(self) -> float:
        return sum(self.phases.values()) - self.hidden

    @property
    def phases(self) -> dict[str, float]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "samples_ahead"}

    @property
    def range(self) -> tuple[float, float]:
        """Lowest and highest seconds of the step. Errors of phases are independent, so that their squares add up; of
        two phases that overlap the longer one counts."""
        spans = {name: phase_range(name, value) for name, value in self.phases.items()}
        if self.samples_ahead:
            learns = self.learning > self.generate
            spans = {name: span for name, span in spans.items() if name in AT_THE_END or (name == "generate") != learns}
        middle = self.total
        below, above = (
            math.sqrt(sum((span[side] - self.phases[name]) ** 2 for name, span in spans.items())) for side in (0, 1)
        )
        return max(0.0, middle - below), middle + above


AT_THE_END = ("refit", "switch", "offload", "acceptance")  # phases in which neither servers nor the learner go on


def phase_range(name: str, seconds: float) -> tuple[float, float]:
    """Return the lowest and the highest seconds of a phase by the error of its fit."""
    return seconds / hw.ERRORS[name], seconds * hw.ERRORS[name]


def step_time(work: Workload, engine: EngineMemory | None) -> StepTime:
    """Return the seconds of a step. ``engine`` None: the learner itself generates (exact)."""
    recipe, updates = work.recipe, work.recipe.batch.minibatches
    beside = recipe.rollout.engine == "vllm"
    refit = 0.0 if engine is None else _refit(work)
    forward, again = _pass_seconds(work), RECOMPUTED[recipe.learner.recompute]
    scored = recipe.objective.advantage == "min_variance"
    return StepTime(
        generate=_sampling(work, work, engine),
        old_logprobs=forward.of(1) if recipe.makes_old_logprobs else 0.0,
        update=forward.of(3 + again),
        optimizer=updates * _optimizer(work),
        refit=refit,
        switch=2 * hw.SWITCH_S * beside,
        offload=_offload(work),
        # Responses go through the pipeline one after the other, so that each stage waits for the others.
        scores=forward.of(3 + again) * work.parallel.pipeline if scored else 0.0,
        second_models=_second_models(work),
        teachers=_teachers(work),
        acceptance=_acceptance(work, engine, refit),
        samples_ahead=recipe.rollout.max_staleness > 0,
    )


def _second_models(work: Workload) -> float:
    """Return the seconds of the passes of other models on the learner's ranks; `scoring` has one every few steps."""
    shapes = [replace(work, architecture=shape or work.architecture) for shape in work.second_models]
    scored = 0.0 if work.scoring is None else _pass_seconds(work.scoring).of(1) / work.recipe.scoring.every
    return sum(_pass_seconds(one).of(1) for one in shapes) + scored


def _teachers(work: Workload) -> float:
    """Return the seconds in which each rank's engines read its responses; of several teachers, with equal shares."""
    if not work.teachers:
        return 0.0
    length = work.mean_square / work.mean_sequence
    each = [prefill_seconds(replace(one, mean_prompt=length)) for one in work.teachers]
    return work.trained_tokens / work.ranks * sum(each) / len(each)


def _sampling(work: Workload, step: Workload, engine: EngineMemory | None) -> float:
    """Return the seconds in which the engine of ``work`` samples what ``step`` asks for."""
    return exact_generation(step, exact_cache(work)) if engine is None else generation_seconds(step, engine)


def _acceptance(work: Workload, engine: EngineMemory | None, refit: float) -> float:
    """Return the seconds of judging an update: responses to held-out prompts, their log-probs, and the weights that
    are sent after it, whether it was kept or undone."""
    config = work.recipe.acceptance
    if config is None:
        return 0.0
    judged = work.with_keys(
        "batch", prompts=config.prompts, filter_groups=False, max_generations=1, generation_prompts=None
    ).with_keys("rollout", num_samples=config.num_samples)
    return _sampling(work, judged, engine) + _pass_seconds(judged).of(1) + refit


# -- learning


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of a forward pass over a step's tokens on the slowest pipeline stage."""

    products: float  # with attention
    exchange: float  # tensor-, context- and expert-parallel
    host: float  # launches, and waits for the host
    bubble: float  # time of the pipeline over that of a stage

    def of(self, passes: float) -> float:
        """Return the seconds of work that takes as long as ``passes`` forward passes. A backward pass takes two; it
        exchanges as much as a forward pass."""
        exchanges = passes if passes == 1 else passes - 1
        return max(passes * self.host, passes * self.products + exchanges * self.exchange) * self.bubble


def _pass_seconds(work: Workload) -> PassSeconds:
    a, p = work.architecture, work.parallel
    layers = max(stage_layers(a.num_layers, p.pipeline))
    host = hw.LAYER_HOST_S[work.recipe.learner.token_dispatcher] * sum(a.moe_layers) + hw.LAYER_HOST_S[
        "dense"
    ] * a.moe_layers.count(False)
    microbatches = work.microbatches * work.recipe.batch.minibatches
    return PassSeconds(
        products=_products(work) * _slowest_stage(work),
        exchange=_exchange(work),
        host=microbatches * host * layers / a.num_layers,
        bubble=1.0 + (p.pipeline - 1) / work.microbatches,
    )


def _slowest_stage(work: Workload) -> float:
    """Return the work of the slowest stage over that of the mean one; all stages wait for it. One with the head has
    fewer layers where the layers do not divide."""
    a, layers = work.architecture, stage_layers(work.architecture.num_layers, work.parallel.pipeline)
    head, total = a.vocab_size * a.hidden_size, active_parameters(a)
    layer = (total - head) / a.num_layers
    return max(max(layers) * layer, layers[-1] * layer + head) * len(layers) / total


def _products(work: Workload) -> float:
    """Return the seconds of a forward pass's products; the busiest rank of experts has more of theirs."""
    a = work.architecture
    rate = work.gpu.flops(work.recipe.learner.dtype) * work.gpu.fitted(hw.LEARNER_SHARE) * work.ranks
    flops = flops_forward(a, work.trained_tokens, work.mean_square / work.mean_sequence, work.gpu.attention_cost)
    if a.is_moe and work.parallel.expert > 1:
        experts = sum(a.moe_layers) * 3 * a.hidden_size * a.moe_ffn_hidden_size * a.experts_per_token
        flops += 2 * work.trained_tokens * experts * (work.imbalance - 1)
    return flops / rate


def _exchange(work: Workload) -> float:
    """Return the seconds of tensor-, context- and expert-parallel exchanges in a forward pass, without overlap.

    Per layer, tensor parallelism gathers twice and reduces twice; context parallelism sends all keys and values to
    every rank; an MoE block sends k rows per token and gets them back. The dispatcher `flex` sends a row to a node, and
    to a rank, once for all its experts there.
    """
    a, p, b = work.architecture, work.parallel, BYTES[work.recipe.learner.dtype]
    tokens = work.trained_tokens / work.data_parallel / p.context  # of one rank
    row = a.hidden_size * b
    tensor = 4 * a.num_layers / p.pipeline * tokens * row * (p.tensor - 1) / p.tensor
    context_bytes = 2 * a.num_layers / p.pipeline * tokens * (p.context - 1) * key_value_width(a) * b / p.tensor
    rows = 2 * sum(a.moe_layers) / p.pipeline * tokens / p.tensor * p.expert_tensor * work.imbalance
    group, once = p.expert * p.expert_tensor, work.recipe.learner.token_dispatcher == "flex"
    return (
        tensor / work.link(p.tensor)
        + context_bytes / work.link(p.tensor * p.context)
        + rows * row * _seconds_of_a_byte(work, group, a.experts_per_token, once)
    )


def _seconds_of_a_byte(work: Workload, group: int, copies: int, once: bool) -> float:
    """Return the seconds in which a row's byte gets to ``copies`` experts that are spread over ``group`` ranks."""
    if group == 1:
        return 0.0
    node = min(group, work.nvlink_gpus)
    nodes = group / node

    def received(places: float) -> float:  # of the row, by places other than its own
        number = places * (1 - (1 - 1 / places) ** copies) if once else copies
        return number * (places - 1) / places

    inside = received(node) if nodes == 1 else received(group) / nodes
    outside = received(nodes) if nodes > 1 else 0.0
    return (inside / work.gpu.nvlink + outside / work.gpu.network) / hw.LINK


def _optimizer(work: Workload) -> float:
    """Return the seconds of reducing gradients and gathering weights over data-parallel ranks, and of Adam's pass."""
    p, stage = work.parallel, stage_parameters(work.architecture, work.parallel)[0]
    seconds = 0.0
    expert_dp = max(1, work.ranks // (p.expert * p.expert_tensor * p.pipeline))
    for number, replicas in ((stage.dense, work.data_parallel * p.context), (stage.expert, expert_dp)):
        moved = number * (GRADIENT_BYTES + BYTES[work.recipe.learner.dtype]) * (replicas - 1) / replicas
        seconds += moved / work.link(work.ranks if replicas > 1 else 1)
        seconds += number / replicas * hw.ADAM_BYTES / work.gpu.bandwidth
    return seconds


# -- handing over


def _refit(work: Workload) -> float:
    """Return the seconds of a weight update: to local engines, or to servers by broadcast (overlapped) or by files."""
    gathered, handling = weights_seconds(work)
    beside = work.recipe.rollout.engine != "vllm_server"
    handling += hw.REFIT_S[beside]
    if beside:
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
    gathered = model_bytes / work.link(work.ranks) if work.ranks > 1 else 0.0
    matrices = num_expert_matrices(a)
    handling = (num_tensors(a) - matrices) * hw.TENSOR_OVERHEAD_S + matrices * hw.EXPERT_OVERHEAD_S
    return gathered, handling


def _offload(work: Workload) -> float:
    """Return the seconds of offload copies.

    Each part leaves and returns once per step; Adam's states do so in every update if they are away during passes. If
    sampling uses older weights, the current ones leave and older ones return once per step. Second models come.
    """
    offload, updates = work.recipe.learner.offload, work.recipe.batch.minibatches
    stages = learner_stages(work)
    states, weights = (max(getattr(stage, part) for stage in stages) for part in ("states", "weights"))
    rounds = updates if offload.during_passes else 1
    kept_weights = offload.weights + (work.earlier_weights > 0)
    moved = 2 * (rounds * states * offload.optimizer + weights * kept_weights)
    return (moved + second_weights(work)) / (hw.HOST_LINK * work.gpu.host_link)


def num_tensors(a: Architecture) -> int:
    """Return the number of tensors of a Hugging Face checkpoint."""
    rows = [weight for weight in FAMILIES[a.model_type].layer if EXPERT not in weight.hf[0]]
    in_layers = sum(len(w.hf) for layer in range(a.num_layers) for w in rows if w.is_of(a, layer))
    outside = 3 - a.tie_embeddings  # embedding, last norm, head
    return in_layers + outside + num_expert_matrices(a)


def num_expert_matrices(a: Architecture) -> int:
    """Return the number of tensors that belong to single experts."""
    rows = [weight for weight in FAMILIES[a.model_type].layer if EXPERT in weight.hf[0]]
    return sum(a.moe_layers) * sum(len(weight.hf) for weight in rows) * a.num_experts
