"""Memory of the phases of a step on one GPU, compared with its capacity.

colocated (`rollout.engine: vllm`): while learning, the engine sleeps but keeps its graphs; while generating, the parts
of the learner's weights, gradient buffer and optimizer states that `learner.offload` does not move stay beside the
engine. In between the learner hands over its weights, while the engine has no cache yet.
servers (`vllm_server`): learner and engine have separate GPUs.
exact: the learner generates; there is a second copy of the weights only if a dose samples from other weights.

The cost of this project's own code is added to that of the engines: seconds, bytes and host memory of a step, sockets.
`own_units.json` has the unit costs, and the commit whose tools/bench/scale.py measured them: functions of this package
on ranks that are processes, their costs fitted to `DRIVERS` by least squares.

`parity_memory` is what a comparison of operators takes. One model is in memory at a time. Beside it lie, on the host:
the taps of all witnesses, and the model in float64, whose weights are read one tensor at a time. On a GPU no more than
one tap is put together of the parts of ranks at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from megatron_rl.config.learner import OffloadConfig
from megatron_rl.instruments.plan import hardware as hw
from megatron_rl.instruments.plan.generation import (
    EngineMemory,
    cache_beside,
    engine_memory,
    route_bytes,
    runtime_bytes,
)
from megatron_rl.instruments.plan.hardware import (
    ALLOCATOR,
    BROADCAST_BYTES,
    EXPERT_IMBALANCE,
    GIB,
    PROCESS_GIB,
    SERVER_UTILIZATION,
)
from megatron_rl.instruments.plan.learner import BYTES, Activations, LearnerMemory, checkpoint_cost, learner_memory
from megatron_rl.instruments.plan.workload import Workload
from megatron_rl.model.architecture import Architecture
from megatron_rl.model.names import stored_tensors

DRIVERS = ("token", "route byte", "own sequence", "sequence", "rank")
"""Drivers of costs: tokens, bytes of routes and sequences of one rank; sequences of the step; ranks of the job."""
OF_OWNER = frozenset(
    {"responses", "rewards", "metrics"}
)  # driven by a rank's samples; the others by the batch of its replica
FETCHED = "answers of servers"
"""Replaces `responses` with rollout servers: one rank per node fetches their answers while they sample."""
JOINED = "turns of conversations"
"""Only with `rollout.function`. A rank joins the turns of its responses; with rollout servers, while they sample."""
OF_A_PASS = frozenset({"pack", "routes"})  # measured per pass over the step's sequences
RECORD = Path(__file__).with_name("own_units.json")
RECORDER = "recorder"  # a part of every step if `recorder` writes each batch
PER_TOKEN = 8  # bytes of a recorded token of prompt or response
PER_RESPONSE_TOKEN = 4 + 4 + 1 + 4  # its log-probs of engine and learner, its place in the loss, its policy version

Record = Mapping[str, Any]
"""``stages``: stage → seconds, received, peak → cost per driver; ``reward_s``: seconds per response in a worker;
``fetch``: seconds of the fetching rank per response, token and byte of routes; ``turns``: the same of joining
`TURNS` turns; ``sockets``: sockets of a rank,
[constant, per rank]; ``origin``: where the costs were measured."""


@dataclass(frozen=True)
class StageTime:
    """Cost of a stage in one step, on the busiest rank."""

    name: str
    seconds: float  # processor and network
    received: float  # bytes from other ranks
    peak: float  # bytes of host memory, above those before the step
    ranks_of_node: int  # ranks of a node with the same work
    while_sampling: bool = False  # servers sample meanwhile, so that it is no part of the step


@dataclass(frozen=True)
class OwnCode:
    stages: list[StageTime]
    aside: list[StageTime]  # stages that only some recipes have
    sockets: float  # sockets of one rank

    @property
    def seconds(self) -> float:
        """Seconds on the critical path of a step."""
        return sum(stage.seconds for stage in self.stages if not stage.while_sampling)

    @property
    def host_rank(self) -> float:
        """Peak host memory of one rank in bytes."""
        return max(stage.peak for stage in self.stages)

    @property
    def host_node(self) -> float:
        return max(stage.peak * stage.ranks_of_node for stage in self.stages)


@cache
def on_record() -> Record:
    """Return the recorded unit costs that `plan` uses."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def drivers(
    stage: str,
    tokens: float,
    route_bytes: float,
    sequences: float,
    ranks: int,
    replicas: int,
    owners: int | None = None,
) -> tuple[float, ...]:
    """Return the five drivers of a stage's costs. Tokens, route bytes and sequences are those of the whole step.

    ``owners``: number of ranks that have samples; None: all.
    """
    holders = (owners or ranks) if stage in OF_OWNER else replicas
    return (tokens / holders, route_bytes / holders, sequences / holders, sequences, float(ranks))


def own_code(work: Workload, record: Record | None = None) -> OwnCode:
    """Return the costs of all stages of one step. ``record``: unit costs instead of the recorded ones."""
    recipe, costs_record = work.recipe, record or on_record()
    routes = route_bytes(recipe, work.architecture, work.trained_tokens)
    passes = 1 + recipe.makes_old_logprobs
    has_servers, node = recipe.rollout.engine == "vllm_server", work.gpus_per_node
    nodes = -(-work.ranks // node)
    owners, stages, aside = nodes if has_servers else work.ranks, [], []
    for name, costs in costs_record["stages"].items():
        of_step = (work.trained_tokens, routes, recipe.num_sequences)
        by = drivers(name, *of_step, work.ranks, work.data_parallel, owners)
        seconds, received, peak = (
            sum(unit * amount for unit, amount in zip(costs[what], by)) for what in ("seconds", "received", "peak")
        )
        seconds *= passes if name in OF_A_PASS else 1
        same = 1 if has_servers and name in OF_OWNER else node
        if has_servers and name == "responses":
            name, seconds = FETCHED, _per_answer(work, costs_record["fetch"]) / nodes
        stage = StageTime(name, seconds + received / hw.HOST_NETWORK, received, peak, same, name == FETCHED)
        (aside if name == RECORDER and not recipe.recorder.is_every_step else stages).append(stage)
    if recipe.rollout.function is not None:
        joining = _per_answer(work, costs_record["turns"]) / owners
        stages.append(StageTime(JOINED, joining, 0.0, 0.0, 1 if has_servers else node, has_servers))
    scored = math.ceil(recipe.num_sequences / work.ranks / recipe.reward.num_workers) if _is_math(recipe) else 0
    stages.append(StageTime("reward workers", costs_record["reward_s"] * scored, 0.0, 0.0, node))
    sockets = sum(unit * amount for unit, amount in zip(costs_record["sockets"], (1.0, float(work.ranks))))
    return OwnCode(stages, aside, sockets)


@dataclass(frozen=True)
class EvidenceCost:
    """Cost of `recorder.evidence` in bytes and seconds; all 0 where it is off."""

    batch: float  # a batch on disk
    batches: int  # that are on disk at any time
    after_alarm: float  # bytes that stay from alarms on: two alarms' batches at most, and a checkpoint
    seconds: float  # of each step: copying, hashing, writing

    @property
    def disk(self) -> float:
        """Bytes of the newest batches."""
        return self.batch * self.batches


def evidence_cost(work: Workload, own: OwnCode, checkpoint: float, disk: float = hw.DISK) -> EvidenceCost:
    """Return the cost of the evidence. ``checkpoint``: bytes of one; ``disk``: bytes/s that one node writes."""
    recorder = work.recipe.recorder
    if recorder.evidence is None:
        return EvidenceCost(0.0, 0, 0.0, 0.0)
    kept = checkpoint if work.recipe.checkpoint.every and work.recipe.checkpoint.keep_last else 0.0
    if not recorder.is_every_step:
        return EvidenceCost(0.0, 0, kept, 0.0)
    size = batch_size(work)
    batches = max(1, min(recorder.evidence.batches, int(recorder.evidence.max_gib * hw.GIB / size)))
    writers = min(work.data_parallel, -(-work.ranks // work.gpus_per_node))
    seconds = sum(stage.seconds for stage in own.stages if stage.name == RECORDER) + size / writers / disk
    return EvidenceCost(size, batches, 2 * size * batches + kept, seconds)


def batch_size(work: Workload) -> float:
    """Return the bytes of a recorded batch, all parts together, without their descriptions."""
    recipe, a, sequences = work.recipe, work.architecture, work.recipe.num_sequences
    size = work.trained_tokens * PER_TOKEN + sequences * 16  # where each sequence and response ends
    has_old = recipe.makes_old_logprobs
    size += sequences * work.mean_response * (PER_RESPONSE_TOKEN + 4 * has_old)
    size += kept_set_size(work)
    if recipe.routing.is_on:
        layers = sum(a.moe_layers)
        row = layers * a.experts_per_token * (1 if a.num_experts <= 256 else 2) + 8  # and its checksum
        size += (work.trained_tokens - sequences) * row + sequences * 8 * layers
    return size


def kept_set_size(work: Workload) -> float:
    """Return the bytes of a step's kept sets (`rollout.kept_sets`): int32 per token of a response and candidate."""
    return work.recipe.num_sequences * work.mean_response * work.recipe.rollout.candidates * 4


def _per_answer(work: Workload, units: list[float]) -> float:
    """Return seconds of all owners of answers together. ``units``: per response, per token and per byte of routes."""
    tokens = work.sampled_sequences * work.mean_response
    routes = route_bytes(work.recipe, work.architecture, tokens)
    return sum(unit * amount for unit, amount in zip(units, (work.sampled_sequences, tokens, routes)))


def _is_math(recipe: Any) -> bool:
    return recipe.reward.name == "math" or "math" in recipe.reward.by_source.values()


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

    @property
    def cache(self) -> EngineMemory:
        return self.engine or self.own_cache

    @property
    def holds_longest(self) -> bool:
        """Whether the longest possible sequence fits in the engine's cache."""
        return self.cache.tokens >= self.cache.longest

    @property
    def fits(self) -> bool:
        """Whether every phase fits with its margin."""
        return self.holds_longest and all(phase.is_sure for phase in self.phases)


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


def memory_plan(work: Workload, placement: str | None = None, utilization: float | None = None) -> MemoryPlan:
    """Return the memory of ``work``. ``placement`` and ``utilization`` default to the recipe's."""
    placement = placement or PLACEMENT[work.recipe.rollout.engine]
    offload = work.recipe.learner.offload
    learner = max(learner_stages(work), key=lambda stage: sum(size for _, size in _learning(stage, offload)))
    balanced = learner_stages(work, 1.0)[learner.stage]
    margin = sum(size for _, size in _learning(learner, offload)) - sum(
        size for _, size in _learning(balanced, offload)
    )
    margin += (ALLOCATOR[2] - ALLOCATOR[1]) * (learner.static + learner.dynamic)
    capacity, runtime = work.gpu.memory_gib * GIB, ("runtime: CUDA, NCCL", runtime_bytes(work))
    learning = [*_learning(learner, offload), runtime]
    at_rest = ("learner at rest", learner.at_rest(offload))

    def phase(name: str, items: list[tuple[str, float]]) -> Phase:
        return Phase(name, tuple(items), capacity, margin * (name == "learning"))

    if placement == "exact":
        cache_memory = exact_cache(work)
        cache = ("key/value cache", max(cache_memory.cache, 0.0))
        generating = [at_rest, ("forward pass", _forward(work)), cache, runtime]
        if work.samples_other_weights:
            generating.append(("its own weights, while others sample", learner.weights))
        phases = (phase("learning", learning), phase("generating", generating))
        return MemoryPlan(placement, learner, None, phases, cache_memory)
    if utilization is None:
        cache_memory = placement == PLACEMENT[work.recipe.rollout.engine]
        alone = placement == "servers" and not cache_memory
        utilization = SERVER_UTILIZATION if alone else work.recipe.rollout.gpu_memory_utilization
    engine = engine_memory(work.recipe, work.architecture, work.gpu, utilization)
    if placement == "servers":
        if placement == PLACEMENT[work.recipe.rollout.engine] and not work.recipe.rollout.why_files:
            learning.append(("weights on their way to servers", float(BROADCAST_BYTES)))
        phases = (phase("learning", learning), phase("generating", _engine_items(engine)))
        return MemoryPlan(placement, learner, engine, phases)
    learning.append(("engine asleep", engine.graphs))
    sent = ("learner at rest, weights included", learner.at_rest(offload.model_copy(update={"weights": False})))
    handover = [*_engine_items(replace(engine, activations=0.0, cache=0.0)), sent, ("on their way", _handover(work))]
    phases = (
        phase("learning", learning),
        phase("generating", [*_engine_items(engine), at_rest, runtime]),
        phase("handing over the weights", [*handover, runtime]),
    )
    return MemoryPlan(placement, learner, engine, phases)


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


def largest_utilization(work: Workload) -> float:
    """Return the largest `rollout.gpu_memory_utilization` of a colocated engine, in steps of 0.05; 0 if none fits."""
    at_rest = max(stage.at_rest(work.recipe.learner.offload) for stage in learner_stages(work))
    free = work.gpu.memory_gib - (runtime_bytes(work) + at_rest) / GIB
    return max(0.0, int(20 * free / work.gpu.memory_gib) / 20)


def _engine_items(engine: EngineMemory) -> list[tuple[str, float]]:
    return [
        ("engine weights", engine.weights),
        ("engine activations", engine.activations),
        ("engine graphs and workspaces", engine.graphs),
        ("key/value cache", max(engine.cache, 0.0)),
    ]


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
    return max(activations.layer(moe) for moe in set(work.architecture.moe_layers)) + activations.head_peak()


# Memory of one node's host.


def _kept_sets(work: Workload) -> float:
    """Return the bytes of kept sets on a node: each rank has those of the responses that its replica learns from."""
    return kept_set_size(work) / work.data_parallel * work.gpus_per_node


def _router_scores(work: Workload) -> float:
    """Return the bytes of `Rollout.old_experts` (int16) and `old_scores` (float32) on a node, for router_shift."""
    a = work.architecture
    by_token = (2 + 4) * sum(a.moe_layers) * a.experts_per_token if work.recipe.objective.router_shift else 0
    return work.trained_tokens * by_token / work.data_parallel * work.gpus_per_node


def host_phase(work: Workload, plan: MemoryPlan) -> Phase:
    """Return the contents of one node's host memory at its peak, with the node's capacity."""
    offload, ranks = work.recipe.learner.offload, work.gpus_per_node
    items = (
        ("processes", ranks * PROCESS_GIB * GIB),
        ("Adam's states, page-locked", ranks * plan.learner.states * offload.optimizer),
        ("weights, page-locked", ranks * plan.learner.weights * offload.weights),
        ("weights of earlier updates", ranks * plan.learner.weights * work.earlier_weights),
        (
            "the learner before a proposed update (acceptance)",
            ranks * (plan.learner.weights + plan.learner.states) * (work.recipe.acceptance is not None),
        ),
        ("a checkpoint on its way", ranks * checkpoint_cost(work).host),
        ("responses, routes, packed rows", own_code(work).host_node),
        (f"kept sets, {kept_set_size(work) / 1e9:.1f} GB a step (rollout.kept_sets)", _kept_sets(work)),
        ("routers' scores before the update (objective.router_shift)", _router_scores(work)),
    )
    return Phase("host memory", tuple(item for item in items if item[1]), work.host_gib * GIB)


SPARE_HOST_GIB = 3.0
"""Python, and the code of both engines."""
BOUNDED_BYTES = 16
"""Bytes a number in float64: the value, and its bound."""


def numbers_in_layer(a: Architecture, layer: int) -> dict[str, int]:
    """Numbers that one token has at each tap of ``layer``; of `expert`, inputs and outputs of its K experts."""
    h, m, q, kv = a.hidden_size, a.latent, a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    numbers = dict.fromkeys(("input_norm", "o_proj", "residual", "second_norm", "mlp", "output"), h)
    if m is None:
        numbers |= {"q": q, "k": kv, "v": kv, "q_rope": q, "k_rope": kv, "attention": q}
        numbers |= {"q_norm": q, "k_norm": kv} if a.qk_layernorm else {}
    else:
        numbers |= {"q_latent": m.query_rank, "q_latent_norm": m.query_rank} if m.query_rank else {}
        numbers |= {"kv_latent": m.rank + m.rotary_width, "kv_latent_norm": m.rank, "q": q}
        numbers |= {"k": a.num_heads * m.plain_width, "q_rope": a.num_heads * m.rotary_width, "k_rope": m.rotary_width}
        numbers |= dict.fromkeys(("v", "attention"), a.num_heads * m.value_width)
    if not a.moe_layers[layer]:
        return numbers | dict.fromkeys(("gate", "up", "activation"), a.ffn_hidden_size)
    chosen = a.experts_per_token
    numbers |= {"router_logits": a.num_experts, "chosen": chosen, "weights": chosen, "expert": 2 * h * chosen}
    return numbers | ({"shared": h} if a.shared_ffn_hidden_size else {})


@dataclass(frozen=True)
class ParityMemory:
    """Bytes. ``model``: weights of one witness on one rank. ``taps``: of one witness. ``definition``: the
    model in float64. ``largest``: its largest tensor with the absolute values beside it. ``gathered``: on the device,
    the largest tap twice: its parts and the whole."""

    model: int
    taps: int
    definition: int
    largest: int
    gathered: int

    def host(self, num_witnesses: int, model_on_host: bool = True) -> float:
        """Of the process that compares, all together."""
        of_model = self.model if model_on_host else 0
        return of_model + num_witnesses * self.taps + self.definition + self.largest + SPARE_HOST_GIB * GIB


def num_parameters(a: Architecture) -> int:
    """Parameters of a model, a tied head counted once."""
    return sum(math.prod(shape) for entry in stored_tensors(a) for shape in entry.hf_shapes)


def parity_memory(a: Architecture, num_tokens: int, dtype: str) -> ParityMemory:
    """Of a comparison over ``num_tokens`` tokens in all. ``dtype``: the wider one of the two engines."""
    size, layers = BYTES[dtype], [numbers_in_layer(a, layer) for layer in range(a.num_layers)]
    outside = 2 * a.hidden_size + a.vocab_size + 1  # embedding, last norm, logits, log-prob
    of_taps = sum(sum(layer.values()) for layer in layers) + outside
    of_model = of_taps - sum(layer.get("expert", 0) for layer in layers)
    widest = max(a.vocab_size, *(max(layer.values()) for layer in layers))
    tensors = [math.prod(shape) for entry in stored_tensors(a) for shape in entry.hf_shapes]
    return ParityMemory(
        model=num_parameters(a) * size,
        taps=num_tokens * of_taps * size,
        definition=num_tokens * of_model * BOUNDED_BYTES,
        largest=max(tensors) * BOUNDED_BYTES,
        gathered=2 * num_tokens * widest * size,
    )
