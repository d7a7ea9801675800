"""The phases of a step on one GPU, added up and compared with what the GPU has.

colocated (`rollout.engine: vllm`): while learning, the engine sleeps and leaves its graphs; while generating, what
`learner.offload` leaves of the learner's weights, gradient buffer and optimizer states is beside the engine. In between
the learner hands over its weights: they are there, the engine's cache is not yet.
servers (`vllm_server`): learner and engine on GPUs of their own.
exact: the learner generates; a second copy of the weights only where a dose samples from others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_rl.config.learner import OffloadConfig
from megatron_rl.plan.activations import BYTES, Activations
from megatron_rl.plan.exact import cache_beside
from megatron_rl.plan.generation import EngineMemory, engine_memory
from megatron_rl.plan.hardware import (
    BROADCAST_BYTES,
    EXPERT_IMBALANCE,
    FRAGMENTATION,
    GIB,
    GRAPHS_GIB,
    RUNTIME_GIB,
    SERVER_UTILIZATION,
)
from megatron_rl.plan.learner import LearnerMemory, learner_memory
from megatron_rl.plan.workload import Workload


@dataclass(frozen=True)
class Phase:
    """What lies on one GPU in one phase: (what, bytes), of at most ``capacity`` bytes."""

    name: str
    items: tuple[tuple[str, float], ...]
    capacity: float

    @property
    def total(self) -> float:
        return sum(size for _, size in self.items)

    @property
    def missing(self) -> float:
        """Bytes beyond the capacity; negative where it fits."""
        return self.total - self.capacity


@dataclass(frozen=True)
class MemoryPlan:
    placement: str  # colocated, servers or exact
    learner: LearnerMemory  # of the stage with the highest peak
    engine: EngineMemory | None
    phases: tuple[Phase, ...]
    own_cache: EngineMemory | None = None  # of an exact engine, which has nothing else of its own

    @property
    def cache(self) -> EngineMemory:
        return self.engine or self.own_cache

    @property
    def holds_longest(self) -> bool:
        """Whether the engine's cache holds one longest sequence."""
        return self.cache.tokens >= self.cache.longest

    @property
    def fits(self) -> bool:
        return self.holds_longest and all(phase.missing <= 0 for phase in self.phases)


PLACEMENT = {"vllm": "colocated", "vllm_server": "servers", "exact": "exact"}


def learner_stages(work: Workload) -> list[LearnerMemory]:
    recipe, spread = work.recipe, work.parallel.expert > 1
    return learner_memory(
        work.architecture,
        recipe.learner,
        work.ranks,
        work.microbatch_tokens,
        work.microbatches,
        fp32_head=recipe.precision.fp32_head,
        imbalance=EXPERT_IMBALANCE if spread else 1.0,
        gradient_noise=recipe.monitor.gradient_noise,
    )


def memory_plan(work: Workload, placement: str | None = None, utilization: float | None = None) -> MemoryPlan:
    """Memory of ``work``. ``placement`` and ``utilization`` default to the recipe's own."""
    placement = placement or PLACEMENT[work.recipe.rollout.engine]
    offload = work.recipe.learner.offload
    learner = max(learner_stages(work), key=lambda stage: sum(size for _, size in _learning(stage, offload)))
    capacity, runtime = work.gpu.memory_gib * GIB, ("runtime", RUNTIME_GIB * GIB)
    learning = [*_learning(learner, offload), runtime]
    at_rest = ("learner at rest", learner.at_rest(offload))

    def phase(name: str, items: list[tuple[str, float]]) -> Phase:
        return Phase(name, tuple(items), capacity)

    if placement == "exact":
        own = exact_cache(work)
        cache = ("key/value cache", max(own.cache, 0.0))
        generating = [at_rest, ("forward pass", _forward(work)), cache, runtime]
        if work.samples_other_weights:
            generating.append(("its own weights, while others sample", learner.weights))
        phases = (phase("learning", learning), phase("generating", generating))
        return MemoryPlan(placement, learner, None, phases, own)
    if utilization is None:
        own = placement == PLACEMENT[work.recipe.rollout.engine]
        alone = placement == "servers" and not own
        utilization = SERVER_UTILIZATION if alone else work.recipe.rollout.gpu_memory_utilization
    engine = engine_memory(work.recipe, work.architecture, work.gpu, utilization)
    if placement == "servers":
        if placement == PLACEMENT[work.recipe.rollout.engine] and not work.recipe.rollout.why_files:
            learning.append(("weights on their way to servers", float(BROADCAST_BYTES)))
        phases = (phase("learning", learning), phase("generating", _engine_items(engine)))
        return MemoryPlan(placement, learner, engine, phases)
    learning.append(("engine asleep", GRAPHS_GIB * GIB))
    sent = ("learner at rest, weights included", learner.at_rest(offload.model_copy(update={"weights": False})))
    handover = [*_engine_items(replace(engine, activations=0.0, cache=0.0)), sent, ("on their way", _handover(work))]
    phases = (
        phase("learning", learning),
        phase("generating", [*_engine_items(engine), at_rest, runtime]),
        phase("handing over the weights", [*handover, runtime]),
    )
    return MemoryPlan(placement, learner, engine, phases)


def exact_cache(work: Workload) -> EngineMemory:
    """Of an exact engine beside the learner at rest."""
    offload, twice = work.recipe.learner.offload, work.samples_other_weights
    return cache_beside(work, max(stage.at_rest(offload) + stage.weights * twice for stage in learner_stages(work)))


def _learning(learner: LearnerMemory, offload: OffloadConfig) -> list[tuple[str, float]]:
    """What is there at the worst moment of learning: a pass or the update."""

    def moment(states: float, added: float) -> list[tuple[str, float]]:
        return [
            ("weights", learner.weights),
            ("gradients", learner.gradients),
            ("optimizer states", states),
            ("activations and temporaries", added),
            ("fragmentation", added * FRAGMENTATION),
        ]

    moments = [moment(0.0 if offload.during_passes else learner.states, learner.passes)]
    moments.append(moment(learner.states, learner.optimizer))
    return max(moments, key=lambda items: sum(size for _, size in items))


def largest_utilization(work: Workload) -> float:
    """`rollout.gpu_memory_utilization`, in steps of 0.05, that a colocated engine could have; 0 where none."""
    at_rest = max(stage.at_rest(work.recipe.learner.offload) for stage in learner_stages(work))
    free = work.gpu.memory_gib - RUNTIME_GIB - at_rest / GIB
    return max(0.0, int(20 * free / work.gpu.memory_gib) / 20)


def _engine_items(engine: EngineMemory) -> list[tuple[str, float]]:
    return [
        ("engine weights", engine.weights),
        ("engine activations", engine.activations),
        ("engine graphs", engine.graphs),
        ("key/value cache", max(engine.cache, 0.0)),
    ]


def _handover(work: Workload) -> float:
    """What a weight update holds at its worst moment beside the weights of learner and engine.

    Either two copies of the table of the vocabulary: its shards as they were gathered, and joined. Or the experts of a
    layer, which vLLM loads when it has all of them: their three stacks, the last one's matrices, which it is made of
    (`rollout.expert_stacks`), and the layer that they are loaded into before it is copied to its old place.
    """
    a, rollout = work.architecture, work.recipe.rollout
    size = max(BYTES[work.recipe.learner.dtype], BYTES[rollout.dtype])
    vocabulary = 2.0 * a.vocab_size * a.hidden_size * size
    if not a.is_moe:
        return vocabulary
    projection = a.num_experts * a.moe_ffn_hidden_size * a.hidden_size
    layer = 3 * projection * BYTES[rollout.dtype] / rollout.tensor_parallel
    return max(vocabulary, 4.0 * projection * size + layer)


def _forward(work: Workload) -> float:
    """A forward pass without gradient over one microbatch: one layer at a time, and the logits with their chunk."""
    recipe = work.recipe
    kept = Activations(
        work.architecture,
        work.parallel,
        recipe.learner.dtype,
        -(-work.microbatch_tokens // work.parallel.context),
        recipe.precision.fp32_head,
        recipe.learner.fused_head,
    )
    return max(kept.layer(moe) for moe in set(work.architecture.moe_layers)) + kept.head_peak()
