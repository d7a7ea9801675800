"""Memory of the phases of a step on one GPU, compared with its capacity.

colocated (`rollout.engine: vllm`): while learning, the engine sleeps but keeps its graphs; while generating, the parts
of the learner's weights, gradient buffer and optimizer states that `learner.offload` does not move stay beside the
engine. In between the learner hands over its weights, while the engine has no cache yet.
servers (`vllm_server`): learner and engine have separate GPUs.
exact: the learner generates; there is a second copy of the weights only if a dose samples from other weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_rl.config.learner import OffloadConfig
from megatron_rl.instruments.plan.generation import EngineMemory, cache_beside, engine_memory, runtime_bytes
from megatron_rl.instruments.plan.hardware import ALLOCATOR, BROADCAST_BYTES, EXPERT_IMBALANCE, GIB, PROCESS_GIB
from megatron_rl.instruments.plan.learner import (
    BYTES,
    Activations,
    LearnerMemory,
    checkpoint_cost,
    learner_memory,
    stage_parameters,
)
from megatron_rl.instruments.plan.workload import Workload
from megatron_rl.model.architecture import Architecture


@dataclass(frozen=True)
class Phase:
    """The contents of one GPU in one phase, as (what, bytes), with a limit of ``capacity`` bytes."""

    name: str
    items: tuple[tuple[str, float], ...]
    capacity: float
    margin: float = 0.0  # by which more or less may be needed: the allocator's overhead, and experts out of balance

    @property
    def total(self) -> float:
        return sum(size for _, size in self.items)

    @property
    def missing(self) -> float:
        """Bytes beyond the capacity; negative if it fits."""
        return self.total - self.capacity

    @property
    def is_sure(self) -> bool:
        """Whether it fits with its margin."""
        return self.missing + self.margin <= 0

    @property
    def is_refused(self) -> bool:
        """Whether it does not fit, even less its margin."""
        return self.missing > self.margin

    @property
    def state(self) -> str:
        if self.is_refused:
            return f"DOES NOT FIT by {self.missing / GIB:.1f} GiB (± {self.margin / GIB:.1f})"
        if self.is_sure:
            return f"fits, {(-self.missing - self.margin) / GIB:.1f} GiB to spare"
        return f"MAY NOT FIT: {-self.missing / GIB:+.1f} GiB to spare, ± {self.margin / GIB:.1f}"


@dataclass(frozen=True)
class MemoryPlan:
    placement: str  # colocated, servers or exact
    learner: LearnerMemory  # the stage with the highest peak
    engine: EngineMemory | None
    phases: tuple[Phase, ...]
    own_cache: EngineMemory | None = None  # cache of an exact engine, its only own memory
    teachers: tuple[EngineMemory, ...] = ()  # engines beside the learner

    @property
    def cache(self) -> EngineMemory:
        return self.engine or self.own_cache

    @property
    def holds_longest(self) -> bool:
        """Whether the longest possible sequence fits in the engine's cache."""
        return self.cache.sequences(self.cache.longest) >= 1

    @property
    def fits(self) -> bool:
        """Whether every phase fits with its margin."""
        teach = all(engine.sequences(engine.longest) >= 1 for engine in self.teachers)
        return self.holds_longest and teach and all(phase.is_sure for phase in self.phases)


PLACEMENT = {"vllm": "colocated", "vllm_server": "servers", "exact": "exact"}


def learner_stages(work: Workload, imbalance: float = EXPERT_IMBALANCE) -> list[LearnerMemory]:
    """Return the memory of a rank of each stage. ``imbalance``: tokens of the busiest rank of experts over the mean."""
    recipe, spread = work.recipe, work.parallel.expert > 1
    return learner_memory(
        work.architecture,
        recipe.learner,
        work.ranks,
        work.microbatch_tokens,
        work.microbatches,
        fp32_head=recipe.precision.fp32_head,
        imbalance=imbalance if spread else 1.0,
        gradient_noise=recipe.monitor.gradient_noise,
    )


def memory_plan(work: Workload, utilization: float | None = None) -> MemoryPlan:
    """Return the memory of ``work``. ``utilization``: of a vLLM engine; None: the recipe's."""
    placement = PLACEMENT[work.recipe.rollout.engine]
    offload = work.recipe.learner.offload
    learner = max(learner_stages(work), key=lambda stage: sum(size for _, size in _learning(stage, offload)))
    balanced = learner_stages(work, 1.0)[learner.stage]
    margin = sum(size for _, size in _learning(learner, offload)) - sum(
        size for _, size in _learning(balanced, offload)
    )
    margin += (ALLOCATOR[2] - ALLOCATOR[1]) * (learner.static + learner.dynamic)
    capacity, runtime = work.gpu.memory_gib * GIB, ("runtime: CUDA, NCCL", runtime_bytes(work))
    utilization = work.recipe.rollout.gpu_memory_utilization if utilization is None else utilization
    teachers = tuple(engine_memory(one.recipe, one.architecture, one.gpu, utilization) for one in work.teachers)
    stays = [("teachers' engines, which stay", sum(size for one in teachers for _, size in _engine_items(one)))]
    stays = [runtime, *stays] if teachers else [runtime]
    learning = [*_learning(learner, offload), *stays, *_heads_on_gpu(work)]
    at_rest = ("learner at rest", learner.at_rest(offload))

    def phase(name: str, items: list[tuple[str, float]]) -> Phase:
        return Phase(name, tuple(items), capacity, margin * (name == "learning"))

    sent = ("learner at rest, weights included", learner.at_rest(offload.model_copy(update={"weights": False})))

    def scoring(*beside: tuple[str, float]) -> tuple[Phase, ...]:
        others = [a for a in work.second_models if a is not None]
        peaks = [second_weights(work, a) + _forward(replace(work, architecture=a)) for a in others]
        if (other := work.scoring) is not None:
            peaks.append(second_weights(other, other.architecture) + _forward(other))
        items = [sent, ("its weights and forward pass", max(peaks, default=0.0)), *beside, *stays]
        return (phase("second model", items),) if peaks else ()

    def taught(*beside: tuple[str, float]) -> tuple[Phase, ...]:
        logits = ("logits of what a teacher reads", max(map(_read_logits, work.teachers), default=0.0))
        return (phase("teaching", [*beside, at_rest, logits, *stays]),) if teachers else ()

    if placement == "exact":
        cache_memory = exact_cache(work)
        cache = ("key/value cache", max(cache_memory.cache, 0.0))
        generating = [at_rest, ("forward pass", _forward(work)), cache, runtime]
        if work.samples_other_weights:
            generating.append(("its own weights, while others sample", learner.weights))
        phases = (phase("learning", learning), phase("generating", generating), *scoring())
        return MemoryPlan(placement, learner, None, phases, cache_memory)
    engine = engine_memory(work.recipe, work.architecture, work.gpu, utilization)
    if placement == "servers":
        if not work.recipe.rollout.why_files:
            learning.append(("weights on their way to servers", float(BROADCAST_BYTES)))
        phases = (phase("learning", learning), phase("generating", _engine_items(engine)), *scoring(), *taught())
        return MemoryPlan(placement, learner, engine, phases, teachers=teachers)
    learning.append(("engine asleep", engine.graphs))
    handover = [*_engine_items(replace(engine, activations=0.0, cache=0.0)), sent, ("on their way", _handover(work))]
    phases = (
        phase("learning", learning),
        phase("generating", [*_engine_items(engine), at_rest, *stays]),
        *scoring(("engine asleep", engine.graphs)),
        *taught(*_engine_items(engine)),
        phase("handing over the weights", [*handover, *stays]),
    )
    return MemoryPlan(placement, learner, engine, phases, teachers=teachers)


def exact_cache(work: Workload) -> EngineMemory:
    """Return the cache of an exact engine beside the learner at rest."""
    offload, twice = work.recipe.learner.offload, work.samples_other_weights
    return cache_beside(work, max(stage.at_rest(offload) + stage.weights * twice for stage in learner_stages(work)))


def _learning(learner: LearnerMemory, offload: OffloadConfig) -> list[tuple[str, float]]:
    """Return the contents of the GPU at the peak of learning, in a pass or in the update."""

    def moment(states: float, added: float) -> list[tuple[str, float]]:
        held = learner.weights + learner.gradients + states + added
        return [
            ("weights", learner.weights),
            ("gradients", learner.gradients),
            ("optimizer states", states),
            ("activations and temporaries", added),
            ("allocator's overhead", held * ALLOCATOR[1]),
        ]

    moments = [moment(0.0 if offload.during_passes else learner.states, learner.passes)]
    moments.append(moment(learner.states, learner.optimizer))
    return max(moments, key=lambda items: sum(size for _, size in items))


HEAD_BYTES = 8  # of a token of a head: its number and log mu
MICROBATCH_HEAD_BYTES, LOSS_HEAD_BYTES = (
    12,
    44,
)  # the same on the GPU in every microbatch; in the one at hand with its c_v


LOSS_SET_BYTES = 60  # of a token of a teacher's set in the microbatch at hand: log pi, log τ and what is made of both


def _heads_on_gpu(work: Workload) -> list[tuple[str, float]]:
    """Return heads and a teacher's sets of one update on a GPU (`rollout.sampled_head`, `teacher.top_k`)."""
    tokens = work.trained_tokens / work.recipe.batch.minibatches / work.data_parallel
    tokens *= work.mean_response / work.mean_sequence
    kept = MICROBATCH_HEAD_BYTES + _old_head_bytes(work)
    items = [
        ("heads", work.head_width * (kept * tokens + LOSS_HEAD_BYTES * work.microbatch_tokens)),
        ("sets", work.set_width * (MICROBATCH_HEAD_BYTES * tokens + LOSS_SET_BYTES * work.microbatch_tokens)),
    ]
    return [item for item in items if item[1]]


def _old_head_bytes(work: Workload) -> int:
    """Return the bytes of log po of a token of a head, where it is kept."""
    return 4 * (work.recipe.objective.centres_on_po and work.recipe.makes_old_logprobs)


def largest_utilization(work: Workload) -> float:
    """Return the largest `rollout.gpu_memory_utilization` of a colocated engine, and as much of each teacher beside it,
    in steps of 0.05; 0 if none fits."""
    at_rest = max(stage.at_rest(work.recipe.learner.offload) for stage in learner_stages(work))
    free = work.gpu.memory_gib - (runtime_bytes(work) + at_rest) / GIB
    free -= max(map(_read_logits, work.teachers), default=0.0) / GIB
    return max(0.0, int(20 * free / work.gpu.memory_gib / (1 + len(work.teachers))) / 20)


def _engine_items(engine: EngineMemory) -> list[tuple[str, float]]:
    return [
        ("engine weights", engine.weights),
        ("engine activations", engine.activations),
        ("engine graphs and workspaces", engine.graphs),
        ("key/value cache", max(engine.cache, 0.0)),
    ]


def _read_logits(teacher: Workload) -> float:
    """Return the bytes that vLLM takes, beside all else of an engine, for log-probs of what it reads: of one response's
    part that a step computes, logits and their log-softmax in fp32."""
    rollout, longest = teacher.recipe.rollout, teacher.longest + 1
    tokens = min(rollout.max_num_batched_tokens or teacher.gpu.batched_tokens, longest)
    return float(tokens * teacher.architecture.vocab_size * (BYTES[rollout.dtype] + 4))


def _handover(work: Workload) -> float:
    """Return the peak bytes of a weight update beside the weights of learner and engine.

    It is the larger of two moments. One has two copies of the vocabulary table: its gathered shards, and their join.
    The other has a layer's experts, which vLLM loads together: their three stacks, the matrices of the last stack
    (`rollout.weights`), and the loaded layer before it is copied to its old place.
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
    """Return the bytes of a forward pass without gradient: one layer at a time, and the logits with their chunk."""
    recipe = work.recipe
    activations = Activations(
        work.architecture,
        work.parallel,
        recipe.learner.dtype,
        -(-work.microbatch_tokens // work.parallel.context),
        recipe.precision.fp32_head,
        recipe.learner.fused_head,
    )
    return max(activations.widest(moe) for moe in set(work.architecture.moe_layers)) + activations.head_peak()


def second_weights(work: Workload, *shapes: Architecture | None) -> float:
    """Return the bytes of a rank's weights of second models; all of them where none is named."""
    stages = [stage_parameters(a, work.parallel) for a in shapes or work.second_models if a is not None]
    return float(sum(max(stage.total for stage in its) for its in stages) * BYTES[work.recipe.learner.dtype])


# Memory of one node's host.


def host_phase(work: Workload, plan: MemoryPlan) -> Phase:
    """Return the contents of one node's host memory at its peak, with the node's capacity."""
    offload, ranks = work.recipe.learner.offload, work.gpus_per_node
    each = (HEAD_BYTES + _old_head_bytes(work)) * work.head_width
    of_set = HEAD_BYTES * work.set_width
    tokens = work.sampled_sequences * work.mean_response / work.nodes
    items = (
        ("processes", ranks * PROCESS_GIB * GIB),
        ("Adam's states, page-locked", ranks * plan.learner.states * offload.optimizer),
        ("weights, page-locked", ranks * plan.learner.weights * offload.weights),
        ("weights of second models, page-locked", ranks * second_weights(work)),
        ("weights of earlier updates", ranks * plan.learner.weights * work.earlier_weights),
        (
            "the learner before a proposed update (acceptance)",
            ranks * (plan.learner.weights + plan.learner.states) * (work.recipe.acceptance is not None),
        ),
        ("a checkpoint on its way", ranks * checkpoint_cost(work).host),
        (f"heads of sampled tokens, {each:g} bytes each", each * tokens * (1 + work.recipe.rollout.max_staleness)),
        (f"a teacher's sets, {of_set} bytes a token", of_set * tokens),
    )
    return Phase("host memory", tuple(item for item in items if item[1]), work.host_gib * GIB)
