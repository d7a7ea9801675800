"""Handing the requests of one call to the servers that are ready, so that each is answered exactly once.

A request waits in the queue, is with one server, is answered, or is given up; it is never in two of these states.
Requests that a dead, hanging or outdated server has not answered go back to the front of the queue. An answer to a
request that was taken back is dropped with its task. A response that a weight update cut goes back likewise, and keeps
the legs that it has.

Several calls may be under way (`rollout.in_flight`). Room on a server goes to the one that is first in `Line`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from megatron_rl.rollout.generator import RolloutError
from megatron_rl.rollout.servers.balance import Balance
from megatron_rl.rollout.servers.client import RequestRefused, ServerError, ServerLost, StaleServer
from megatron_rl.rollout.servers.legs import Legs
from megatron_rl.rollout.servers.members import Member, Members
from megatron_rl.rollout.servers.wire import Answer


class Line:
    """The calls of one rank that have requests to make, in the order in which they are served."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, Dispatch]] = []

    def join(self, place: int, call: Dispatch) -> None:
        self._calls.append((place, call))
        self._calls.sort(key=lambda entry: entry[0])

    def leave(self, call: Dispatch) -> None:
        self._calls = [entry for entry in self._calls if entry[1] is not call]

    def first(self) -> Dispatch | None:
        """The first call with a request that waits."""
        return next((call for _, call in self._calls if call.is_waiting), None)


class Dispatch:
    """One call's requests of one rank. ``names`` say in errors which request it was.

    ``concurrency``: most requests in flight to one server. ``share`` (i, n): this rank is number i of n that ask the
    same servers. Each has its part of every server's ``concurrency``, so that together they do not pass it.
    ``line``: of the rank's calls; this one's ``place`` in it, low ones first.
    """

    def __init__(
        self,
        members: Members,
        bodies: Sequence[dict[str, Any]],
        names: Sequence[str],
        concurrency: int,
        retries: int,
        share: tuple[int, int] = (0, 1),
        balance: Balance | None = None,
        line: Line | None = None,
        place: int = 0,
    ) -> None:
        assert share[1] <= concurrency, "a rank without a part of a server's room would wait for ever"
        self._members, self._names = members, names
        self.legs = [Legs(body) for body in bodies]
        self._line, self._place = line or Line(), place
        self._concurrency, self._retries, self._share = concurrency, retries, share
        self._balance = balance or Balance(range(len(bodies)), slack=0)
        self._waiting = deque(range(len(bodies)))
        self._asked: dict[int, tuple[asyncio.Task, Member, int]] = {}  # the version that was asked for
        self._left = set(range(len(bodies)))  # neither answered nor given up
        self._failures: dict[int, list[str]] = {}  # of each request, on which server and why
        self._overtaken: dict[int, set[tuple[int, int]]] = {}  # servers and versions that an update was quicker than
        self._ended: asyncio.Queue[asyncio.Task | None] = asyncio.Queue()  # tasks that are done; None: look again
        self._index_of: dict[asyncio.Task, int] = {}
        self.num_requeued = 0

    async def run(self) -> list[Answer]:
        """All answers, in the order of the requests; see `completions`."""
        answers = {index: answer async for index, answer in self.completions()}
        return [answers[index] for index in range(len(self.legs))]

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    async def completions(self) -> AsyncIterator[tuple[int, Answer]]:
        """Number and answer of each request as they come, until each was answered or given up.

        Raises `RolloutError` where a request failed more than `retries` times or was refused, or where no server is
        left and none comes back in time.
        """
        self._line.join(self._place, self)
        try:
            while self._left:
                seen = self._members.changes
                self._ask()
                if not self._asked:
                    await self._wait_to_ask()
                    continue
                task = await self._next_end(seen)
                if task in self._index_of:
                    index, answer = await self._settle(task)
                    if answer is not None:
                        yield index, answer
        finally:
            self.give_up_all()
            self._line.leave(self)

    async def _wait_to_ask(self) -> None:
        """Until a server can be asked. The time limit is for servers that are away, not for earlier calls' turn."""
        what = f"a server to sample from ({len(self._waiting)} of {len(self.legs)} responses are not there yet)"
        await self._members.wait_for(lambda: bool(self._members.ready) or not self._left, what)
        is_next = lambda: self._line.first() is self and bool(self._free())  # noqa: E731
        await self._members.until(lambda: is_next() or not self._members.ready or not self._left, what)

    def give_up(self, indices: Iterable[int]) -> None:
        """Ask for these no more. A server that is at one is told so; one that is answered stays so."""
        given_up = self._left.intersection(indices)
        self._left -= given_up
        self._waiting = deque(index for index in self._waiting if index not in given_up)
        for index in given_up & self._asked.keys():
            task, member, _ = self._asked.pop(index)
            del self._index_of[task]
            task.cancel()
            member.in_flight -= 1
        self._ended.put_nowait(None)
        self._members.note()

    def give_up_all(self) -> None:
        """Ask for nothing more."""
        self.give_up(self._left)

    def _room(self, member: Member) -> int:
        """Most requests of this rank to ``member``: its part, and of what does not divide evenly one in turn."""
        own, ranks = self._share
        return self._concurrency // ranks + ((own + member.number) % ranks < self._concurrency % ranks)

    def _free(self) -> list[Member]:
        return [member for member in self._members.ready if member.in_flight < self._room(member)]

    def _ask(self) -> None:
        """Hand waiting requests to servers that have room, unless calls before this one have some."""
        while self._line.first() is self:
            if not (free := self._free()):
                return
            index = self._waiting.popleft()
            member = self._balance.choose(free, index)
            member.in_flight += 1
            task = asyncio.create_task(member.client.generate(self.legs[index].request(), member.version))
            self._asked[index], self._index_of[task] = (task, member, member.version), index
            task.add_done_callback(self._ended.put_nowait)
            if not self._waiting and self._line.first() is not None:
                self._members.note()  # the next call may ask now

    async def _next_end(self, seen: int) -> asyncio.Task | None:
        """The next request to end; None where a change of the members may give room for more."""
        ended, changed = asyncio.create_task(self._ended.get()), asyncio.create_task(self._members.change(seen))
        try:
            await asyncio.wait([ended, changed], return_when=asyncio.FIRST_COMPLETED)
            return ended.result() if ended.done() else None
        finally:
            changed.cancel()
            ended.cancel()

    async def _settle(self, task: asyncio.Task) -> tuple[int, Answer | None]:
        """What became of a request: its answer, or None and it waits again."""
        index = self._index_of.pop(task)
        _, member, version = self._asked.pop(index)
        member.in_flight -= 1
        if self._line.first() not in (self, None):
            self._members.note()  # the room is another call's
        try:
            if self.legs[index].add(task.result()):
                self._left.discard(index)
                return index, self.legs[index].whole()
            self._members.mark_updated(member, version)
            self._waiting.appendleft(index)
            return index, None
        except RequestRefused as error:
            raise RolloutError(f"{self._names[index]}: {member.address.name} refused it: {error}") from error
        except StaleServer as error:
            if member.version == version:  # else it has been brought up to date meanwhile
                self._members.mark_stale(member)
            failure: ServerError = error
            # An update that was quicker than the request is no failure of it; it may be so at every server once.
            overtaken = self._overtaken.setdefault(index, set())
            counts = (member.number, version) in overtaken
            overtaken.add((member.number, version))
        except ServerLost as error:
            failure, counts = error, True
        self._waiting.appendleft(index)
        self.num_requeued += 1
        failures = self._failures.setdefault(index, [])
        if counts:
            failures.append(f"{member.address.name}: {failure}")
        if isinstance(failure, ServerLost):
            await self._members.suspect(member, failure)
        if len(failures) > self._retries and index in self._left:
            raise RolloutError(
                f"{self._names[index]}: failed {len(failures)} times (rollout.servers.retries), last on "
                f"{failures[-1]}; before on {', '.join(failures[:-1]) or 'none'}"
            )
        return index, None
