"""Which ranks ask servers, for what, and how all ranks hear that it has arrived.

One rank of each node asks, with an event loop of its own, and keeps what it is answered until the learner's replicas
take it (`learner.exchange`). Requests are dealt by prompt: samples of one prompt come through one rank, which can send
them to the server that has computed the prompt. All ranks hear of every response's length and end, and no array passes
through a rank that neither asked for it nor learns from it.
"""

from __future__ import annotations

import concurrent.futures
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_rl.errors import InputError
from megatron_rl.process.ranks import any_rank, gather_objects, world_rank
from megatron_rl.rollout.generator import LegCounts, RolloutError, RolloutInterrupted
from megatron_rl.rollout.requests import Request
from megatron_rl.types import Rollout

# Ranks wait for the slowest in a collective that has a time limit, so this often they tell each other that they live.
HEARTBEAT_S = 60.0
LOOK_S = 2.0  # and whether a server that came back can be given the weights while all wait for responses


@dataclass
class Share:
    """What one rank fetched of a batch."""

    rollouts: list[Rollout] = field(default_factory=list)  # in the order of the batch's requests
    seconds: float = 0.0  # that servers worked on them, without the wait for their turn
    stats: dict[str, float] = field(default_factory=dict)  # of the servers, as this rank sees them
    num_requeued: int = 0
    counts: LegCounts = field(default_factory=LegCounts)


def fetching_ranks(on_this_machine: bool, at_most: int) -> list[int]:
    """The first rank of every node, and rank 0; the same list on every rank. Collective.

    ``on_this_machine``: of rank 0's machine alone, because the servers listen on no other. ``at_most`` of them.
    """
    is_first = world_rank() == 0 or int(os.environ.get("LOCAL_RANK", "1")) == 0
    found = gather_objects((is_first, socket.gethostname()))
    here = found[0][1]
    ranks = [rank for rank, (first, host) in enumerate(found) if first and (host == here or not on_this_machine)]
    return ranks[:at_most]


def owners_by_prompt(requests: Sequence[Request], ranks: Sequence[int]) -> list[int]:
    """The rank that fetches and keeps each response: prompts are dealt to ``ranks`` in turn."""
    return [ranks[request.row % len(ranks)] for request in requests]


def wait_on_all(
    own: concurrent.futures.Future[Share] | None,
    wants: Callable[[], bool] = lambda: False,
    meanwhile: Callable[[], None] = lambda: None,
) -> Share:
    """This rank's share, once every rank has its own; an error of one is raised on all. Collective.

    ``meanwhile``: a collective that all ranks call while they wait, when ``wants`` is true on one of them.
    """
    while True:
        is_done = own is None or bool(concurrent.futures.wait([own], LOOK_S).done)
        if not any_rank(not is_done):
            break
        if any_rank(wants()):
            meanwhile()
    raise_any(None if own is None else own.exception())
    return Share() if own is None else own.result()


def raise_any(own: BaseException | None) -> None:
    """Raise on every rank what one of them has met; a fault before a request to stop. Collective."""
    error = as_fault(own)
    problems = [problem for problem in gather_objects(error) if problem is not None]
    if problems:
        raise min(problems, key=lambda problem: isinstance(problem, RolloutInterrupted)) from error


def as_fault(error: BaseException | None) -> Exception | None:
    """``error`` as all ranks raise it: a fault or a wrong input as it is, anything else as a `RolloutError`."""
    if error is None or isinstance(error, RolloutError | InputError):
        return error
    fault = RolloutError(f"rollout servers: {type(error).__name__}: {' '.join(str(error).split())}")
    fault.__cause__ = error
    return fault
