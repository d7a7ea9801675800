"""What this project's own code takes on top of the engines: seconds, bytes and host memory of a step, sockets.

`python -m tools.bench.scale` measures the unit costs (`own_units.json`): functions of this package on ranks that are
processes, fitted by least squares to what they go by (`DRIVERS`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatron_rl.plan import hardware as hw
from megatron_rl.plan.generation import route_bytes
from megatron_rl.plan.workload import Workload

DRIVERS = ("token", "route byte", "own sequence", "sequence", "rank")
"""What costs are of: tokens, bytes of routes and sequences of one rank; sequences of the step; ranks of the job."""
OF_OWNER = frozenset({"responses", "rewards", "metrics"})  # by what a rank sampled; the rest by what its replica learns
FETCHED = "answers of servers"
"""In place of `responses` with rollout servers: one rank a node takes their answers, while they sample."""
OF_A_PASS = frozenset({"pack", "routes"})  # measured for one pass over the step's sequences
RECORD = Path(__file__).with_name("own_units.json")
ASIDE = frozenset({"recorder"})  # not part of every step

Record = Mapping[str, Any]
"""``stages``: stage → seconds, received, peak → cost of each driver; ``reward_s``: of one response in a worker;
``fetch``: seconds of the rank that fetches for a response, a token and a byte of routes; ``sockets``: of a rank,
[constant, per rank]; ``origin``."""


@dataclass(frozen=True)
class StageTime:
    """Of one step, on the rank that has most to do."""

    name: str
    seconds: float  # processor and network
    received: float  # bytes from other ranks
    peak: float  # bytes of host memory, above what was there before the step
    ranks_of_node: int  # that have as much to do


@dataclass(frozen=True)
class OwnCode:
    stages: list[StageTime]
    aside: list[StageTime]  # where the recipe asks for them
    sockets: float  # of one rank

    @property
    def seconds(self) -> float:
        """On the critical path of a step."""
        return sum(stage.seconds for stage in self.stages if stage.name != FETCHED)

    @property
    def host_rank(self) -> float:
        """Bytes of host memory of one rank, at the peak."""
        return max(stage.peak for stage in self.stages)

    @property
    def host_node(self) -> float:
        return max(stage.peak * stage.ranks_of_node for stage in self.stages)


@cache
def on_record() -> Record:
    """The unit costs that `plan` goes by."""
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
    """[5] what the costs of a stage go by. Tokens, route bytes and sequences are those of the whole step.

    ``owners``: ranks that hold what was sampled; None: all.
    """
    holders = (owners or ranks) if stage in OF_OWNER else replicas
    return (tokens / holders, route_bytes / holders, sequences / holders, sequences, float(ranks))


def own_code(work: Workload, record: Record | None = None) -> OwnCode:
    """Every stage of one step. ``record``: other unit costs than those on record."""
    recipe, known = work.recipe, record or on_record()
    routes = route_bytes(recipe, work.architecture, work.trained_tokens)
    passes = 1 + recipe.objective.needs_old_logprobs(recipe.batch.minibatches)
    has_servers, node = recipe.rollout.engine == "vllm_server", work.gpus_per_node
    nodes = -(-work.ranks // node)
    owners, found, aside = nodes if has_servers else work.ranks, [], []
    for name, costs in known["stages"].items():
        of_step = (work.trained_tokens, routes, recipe.num_sequences)
        by = drivers(name, *of_step, work.ranks, work.data_parallel, owners)
        seconds, received, peak = (
            sum(unit * amount for unit, amount in zip(costs[what], by)) for what in ("seconds", "received", "peak")
        )
        seconds *= passes if name in OF_A_PASS else 1
        same = 1 if has_servers and name in OF_OWNER else node
        if has_servers and name == "responses":
            name, seconds = FETCHED, _fetching(work, known) / nodes
        stage = StageTime(name, seconds + received / hw.HOST_NETWORK, received, peak, same)
        (aside if name in ASIDE else found).append(stage)
    scoring = recipe.num_sequences / work.ranks / recipe.reward.num_workers
    found.append(StageTime("reward workers", known["reward_s"] * -(-scoring // 1) * _is_math(recipe), 0.0, 0.0, node))
    sockets = sum(unit * amount for unit, amount in zip(known["sockets"], (1.0, float(work.ranks))))
    return OwnCode(found, aside, sockets)


def _fetching(work: Workload, known: Record) -> float:
    """Processor seconds of the ranks that fetch, together."""
    tokens = work.sampled_sequences * work.mean_response
    routes = route_bytes(work.recipe, work.architecture, tokens)
    by = (work.sampled_sequences, tokens, routes)
    return sum(unit * amount for unit, amount in zip(known["fetch"], by))


def _is_math(recipe: Any) -> bool:
    return recipe.reward.name == "math" or "math" in recipe.reward.by_source.values()
