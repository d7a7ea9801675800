"""Which ranks fetch responses from servers, and how all ranks learn which groups of a batch are complete.

One rank of each node fetches, in an event loop of its own, and keeps the arrays until the learner's replicas take them
(`learner.passes`). Requests are dealt by prompt: one rank fetches all samples of a prompt and can send them to the
server that has computed the prompt. All ranks learn every response's length and how it ended. No array passes through
a rank that neither fetched it nor learns from it.

A rank's event loop has one event a group, whatever the number of tokens. Ranks tell each other of groups alone.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_rl.errors import InputError
from megatron_rl.process.ranks import any_rank, gather_objects, world_rank
from megatron_rl.rollout.generator import Arrival, LegCounts, Listener, RolloutError, RolloutInterrupted
from megatron_rl.rollout.requests import Request, known_everywhere
from megatron_rl.rollout.servers.dispatch import Dispatch
from megatron_rl.types import Group, Prompt, Rollout

# Ranks wait for the slowest in a collective that has a time limit, so this often they tell each other that they live.
HEARTBEAT_S = 60.0
REPORT_S = 2.0  # and whether a server that came back can be given the weights while all wait for responses


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
    places = gather_objects((is_first, socket.gethostname()))
    here = places[0][1]
    ranks = [rank for rank, (first, host) in enumerate(places) if first and (host == here or not on_this_machine)]
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
        is_done = own is None or bool(concurrent.futures.wait([own], REPORT_S).done)
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
    """Return ``error`` as all ranks raise it: a fault or a wrong input as it is, anything else as a `RolloutError`."""
    if error is None or isinstance(error, RolloutError | InputError):
        return error
    fault = RolloutError(f"rollout servers: {type(error).__name__}: {' '.join(str(error).split())}")
    fault.__cause__ = error
    return fault


GROUPS_S = 0.1  # where several ranks fetch, each waits this long for groups of its own before it asks the others


@dataclass(frozen=True)
class Taken:
    """A complete group."""

    age_s: float  # since its last response was complete
    counts: LegCounts
    rollouts: list[Rollout]  # in the order of their samples


class Arrivals:
    """One rank's share of a batch, group by group: filled by the event loop's thread, emptied by the main thread.

    ``news`` is notified of every complete group. ``listener`` gets every response, or only ``whole_groups``.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        news: threading.Condition,
        listener: Listener | None = None,
        whole_groups: bool = False,
    ) -> None:
        self._news, self._listener, self._announces_groups = news, listener, whole_groups
        self._prompts = {request.row: request.prompt for request in requests}
        self._missing = Counter(request.row for request in requests)
        self._fetched: dict[int, list[Rollout]] = {place: [] for place in self._missing}
        self._counts: dict[int, LegCounts] = {place: LegCounts() for place in self._missing}
        self._complete: deque[tuple[int, float]] = deque()  # place, clock
        self._dispatch: Dispatch | None = None
        self._is_cancelled = False

    # ---------------------------------------------------------------- in the event loop

    def asks(self, dispatch: Dispatch) -> None:
        """The batch's turn has come, and ``dispatch`` asks for its responses."""
        self._dispatch = dispatch
        if self._is_cancelled:
            dispatch.give_up_all()

    async def cancel(self) -> None:
        """Ask for nothing more, now and when the batch's turn comes."""
        self._is_cancelled = True
        if self._dispatch is not None:
            self._dispatch.give_up_all()

    def fetched(self, place: int, counts: LegCounts, rollout: asyncio.Future[Rollout]) -> None:
        """A response of group ``place`` is there, and its ``counts``. An error in it is the batch's to raise."""
        if rollout.cancelled() or rollout.exception() is not None:
            return
        with self._news:
            self._fetched[place].append(rollout.result())
            self._counts[place] += counts
            self._missing[place] -= 1
            is_whole = not self._missing[place]
            if self._listener is not None and (is_whole or not self._announces_groups):
                announced = self._fetched[place] if self._announces_groups else [rollout.result()]
                self._listener(self._prompts[place], list(announced))
            if is_whole:
                self._complete.append((place, time.perf_counter()))
                self._news.notify_all()

    # ---------------------------------------------------------------- in the main thread

    def __bool__(self) -> bool:
        """Whether a complete group waits to be taken."""
        return bool(self._complete)

    def take(self, now: float) -> dict[int, Taken]:
        """By place: complete groups that were not taken, in the order of their completion. ``now``: on the clock
        `time.perf_counter`, the same for all batches, whose groups are compared by age."""
        with self._news:
            complete, self._complete = self._complete, deque()
            return {
                place: Taken(
                    now - at, self._counts.pop(place), sorted(self._fetched.pop(place), key=lambda r: r.sample)
                )
                for place, at in complete
            }

    @property
    def num_requeued(self) -> int:
        return self._dispatch.num_requeued if self._dispatch is not None else 0

    @property
    def num_tokens_left(self) -> int:
        """Tokens of complete responses in groups that were not taken."""
        with self._news:
            return sum(rollout.length for rollouts in self._fetched.values() for rollout in rollouts)


@dataclass
class Ticket:
    """A requested batch. ``answers``: this rank's share of it, on ranks that fetch."""

    prompts: list[Prompt]
    num_samples: int
    requests: list[Request]
    owners: list[int]  # of each request, the rank that fetches and keeps the response
    policy_version: int
    answers: concurrent.futures.Future[Share] | None
    arrivals: Arrivals | None  # group by group, on ranks that fetch
    num_left: int  # groups that `completed` has not returned


def next_arrivals(
    tickets: Sequence[Ticket],
    news: threading.Condition,
    num_fetchers: int,
    wants: Callable[[], bool] = lambda: False,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[Arrival]:
    """Groups of ``tickets`` that have become complete on any rank, in the order of completion; waits for one.

    ``tickets``: with groups that were not returned yet. ``wants``, ``meanwhile``: see `wait_on_all`. Raises on
    every rank what ended one's fetching. Collective.
    """
    while True:
        here, problem = {}, None
        try:
            here = _complete_here(tickets, news, REPORT_S if num_fetchers == 1 else GROUPS_S)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks are waiting
            problem = error
        raise_any(problem)
        local_groups = [(-taken.age_s, number, place, taken.counts) for (number, place), taken in here.items()]
        complete = sorted(
            (group for share in gather_objects(local_groups) for group in share), key=lambda group: group[:3]
        )
        if complete:  # oldest first
            return _known(tickets, complete, {key: taken.rollouts for key, taken in here.items()})
        if any_rank(wants()):
            meanwhile()


def _complete_here(
    tickets: Sequence[Ticket], news: threading.Condition, patience_s: float
) -> dict[tuple[int, int], Taken]:
    """By number of the ticket and place: this rank's complete groups."""
    fetching = [(number, ticket) for number, ticket in enumerate(tickets) if ticket.arrivals is not None]
    if fetching:
        with news:
            news.wait_for(lambda: any(t.arrivals or _has_failed(t) for _, t in fetching), patience_s)
    for _, ticket in fetching:
        if _has_failed(ticket):
            ticket.answers.result()
    now = time.perf_counter()
    return {(number, place): group for number, ticket in fetching for place, group in ticket.arrivals.take(now).items()}


def _has_failed(ticket: Ticket) -> bool:
    return ticket.answers.done() and (ticket.answers.cancelled() or ticket.answers.exception() is not None)


def _known(
    tickets: Sequence[Ticket],
    complete: list[tuple[float, int, int, LegCounts]],
    here: dict[tuple[int, int], list[Rollout]],
) -> list[Arrival]:
    """The groups ``complete`` (minus age, ticket, place, counts), with what this rank holds of them."""
    requests, owners, held = [], [], []
    for _, number, place, _ in complete:
        ticket = tickets[number]
        rows = slice(place * ticket.num_samples, (place + 1) * ticket.num_samples)
        requests += ticket.requests[rows]
        owners += ticket.owners[rows]
        held += here.get((number, place), [])
    rollouts = iter(known_everywhere(requests, owners, held))
    return [
        Arrival(
            ticket := tickets[number],
            place,
            Group(ticket.prompts[place], [next(rollouts) for _ in range(ticket.num_samples)]),
            -minus_age_s,
            counts,
        )
        for minus_age_s, number, place, counts in complete
    ]
