"""Handing the requests of one call to the servers that are ready, so that each is answered exactly once.

A request waits in the queue, is with one server, or is answered; it is never in two of these states. The server with
the fewest requests in flight is asked next. Requests that a dead, hanging or outdated server has not answered go back
to the front of the queue. An answer to a request that was given up is dropped with its task.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from megatron_rl.rollout.generator import RolloutError
from megatron_rl.rollout.servers.client import RequestRefused, ServerError, ServerLost, StaleServer
from megatron_rl.rollout.servers.pool import Member, ServerPool
from megatron_rl.rollout.servers.wire import Answer


class Dispatch:
    """One call's requests. ``names`` say in errors which request it was."""

    def __init__(
        self, pool: ServerPool, bodies: Sequence[dict[str, Any]], names: Sequence[str], concurrency: int, retries: int
    ) -> None:
        self._pool, self._bodies, self._names = pool, bodies, names
        self._concurrency, self._retries = concurrency, retries
        self._waiting = deque(range(len(bodies)))
        self._asked: dict[int, tuple[asyncio.Task, Member]] = {}
        self._answers: dict[int, Answer] = {}
        self._failures = [0] * len(bodies)
        self._ended: asyncio.Queue[int] = asyncio.Queue()  # requests whose task is done
        self.num_requeued = 0

    async def run(self) -> list[Answer]:
        """All answers, in the order of the requests.

        Raises `RolloutError` where a request failed more than `retries` times or was refused, or where no server is
        left and none comes back in time.
        """
        try:
            while len(self._answers) < len(self._bodies):
                self._ask()
                if not self._asked:
                    left = f"{len(self._waiting)} of {len(self._bodies)} responses are not there yet"
                    await self._pool.wait_for(lambda: bool(self._pool.ready), f"a server to sample from ({left})")
                    continue
                await self._take_one()
        finally:
            for task, member in self._asked.values():
                task.cancel()
                member.in_flight -= 1
        return [self._answers[index] for index in range(len(self._bodies))]

    def _ask(self) -> None:
        """Hand waiting requests to servers that have room."""
        while self._waiting:
            free = [member for member in self._pool.ready if member.in_flight < self._concurrency]
            if not free:
                return
            member = min(free, key=lambda member: member.in_flight)
            index = self._waiting.popleft()
            member.in_flight += 1
            task = asyncio.create_task(member.client.generate(self._bodies[index], member.version))
            task.add_done_callback(lambda _, index=index: self._ended.put_nowait(index))
            self._asked[index] = task, member

    async def _take_one(self) -> None:
        """Wait for the next request to end, or for a change among the servers that may give room for more."""
        ended, changed = asyncio.create_task(self._ended.get()), asyncio.create_task(self._pool.change())
        done, _ = await asyncio.wait([ended, changed], return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()
        if ended in done:
            await self._settle(ended.result())
        else:
            ended.cancel()

    async def _settle(self, index: int) -> None:
        task, member = self._asked.pop(index)
        member.in_flight -= 1
        try:
            self._answers[index] = task.result()
            return
        except RequestRefused as error:
            raise RolloutError(f"{self._names[index]}: {member.address.name} refused it: {error}") from error
        except StaleServer as error:
            self._pool.mark_stale(member)
            failure: ServerError = error
        except ServerLost as error:
            await self._pool.suspect(member, error)
            failure = error
        self._waiting.appendleft(index)
        self.num_requeued += 1
        self._failures[index] += 1
        if self._failures[index] > self._retries:
            raise RolloutError(
                f"{self._names[index]}: failed {self._failures[index]} times (rollout.servers.retries), last on "
                f"{member.address.name}: {failure}"
            )
