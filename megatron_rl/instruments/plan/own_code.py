"""Cost of this project's own code in addition to the engines: seconds, bytes and host memory of a step, sockets.

`python -m tools.bench.scale` measures the unit costs (`own_units.json`): it runs functions of this package on ranks
that are processes, and fits their costs to `DRIVERS` by least squares.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatron_rl.instruments.plan import hardware as hw
from megatron_rl.instruments.plan.generation import route_bytes
from megatron_rl.instruments.plan.workload import Workload

DRIVERS = ("token", "route byte", "own sequence", "sequence", "rank")
"""Drivers of costs: tokens, bytes of routes and sequences of one rank; sequences of the step; ranks of the job."""
OF_OWNER = frozenset(
    {"responses", "rewards", "metrics"}
)  # driven by a rank's samples; the others by the batch of its replica
FETCHED = "answers of servers"
"""Replaces `responses` with rollout servers: one rank per node fetches their answers while they sample."""
OF_A_PASS = frozenset({"pack", "routes"})  # measured per pass over the step's sequences
RECORD = Path(__file__).with_name("own_units.json")
RECORDER = "recorder"  # a part of every step if `recorder` writes each batch
PER_TOKEN = 8  # bytes of a recorded token of prompt or response
PER_RESPONSE_TOKEN = 4 + 4 + 1 + 4  # its log-probs of engine and learner, its place in the loss, its policy version

Record = Mapping[str, Any]
"""``stages``: stage → seconds, received, peak → cost per driver; ``reward_s``: seconds per response in a worker;
``fetch``: seconds of the fetching rank per response, token and byte of routes; ``sockets``: sockets of a rank,
[constant, per rank]; ``origin``: where the costs were measured."""


@dataclass(frozen=True)
class StageTime:
    """Cost of a stage in one step, on the busiest rank."""

    name: str
    seconds: float  # processor and network
    received: float  # bytes from other ranks
    peak: float  # bytes of host memory, above those before the step
    ranks_of_node: int  # ranks of a node with the same work


@dataclass(frozen=True)
class OwnCode:
    stages: list[StageTime]
    aside: list[StageTime]  # stages that only some recipes have
    sockets: float  # sockets of one rank

    @property
    def seconds(self) -> float:
        """Seconds on the critical path of a step."""
        return sum(stage.seconds for stage in self.stages if stage.name != FETCHED)

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
    passes = 1 + recipe.objective.needs_old_logprobs(recipe.batch.minibatches)
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
            name, seconds = FETCHED, _fetching(work, costs_record) / nodes
        stage = StageTime(name, seconds + received / hw.HOST_NETWORK, received, peak, same)
        (aside if name == RECORDER and not recipe.recorder.is_every_step else stages).append(stage)
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
    has_old = recipe.objective.needs_old_logprobs(recipe.batch.minibatches)
    size += sequences * work.mean_response * (PER_RESPONSE_TOKEN + 4 * has_old)
    if recipe.routing.is_on:
        layers = sum(a.moe_layers)
        row = layers * a.experts_per_token * (1 if a.num_experts <= 256 else 2) + 8  # and its checksum
        size += (work.trained_tokens - sequences) * row + sequences * 8 * layers
    return size


def _fetching(work: Workload, known: Record) -> float:
    """Return the processor seconds of all fetching ranks together."""
    tokens = work.sampled_sequences * work.mean_response
    routes = route_bytes(work.recipe, work.architecture, tokens)
    by = (work.sampled_sequences, tokens, routes)
    return sum(unit * amount for unit, amount in zip(known["fetch"], by))


def _is_math(recipe: Any) -> bool:
    return recipe.reward.name == "math" or "math" in recipe.reward.by_source.values()
