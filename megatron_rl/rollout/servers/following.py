"""How ranks of other nodes follow rank 0's servers: two small texts in the job's store, and no collective.

Rank 0 writes the *table*: which weights are due, which servers there are and which of them hold what. Every other rank
that asks servers (a *follower*) writes a *note*: which batches it has no more requests of. Both are states, not
messages, so nothing is lost or in the wrong order; each side looks every `LOOK_S` seconds. A server that failed a
follower is not asked by it until rank 0 has looked at the server. Responses and weights never pass through here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from megatron_rl.rollout.generator import RolloutError
from megatron_rl.rollout.servers.client import ServerClient
from megatron_rl.rollout.servers.pool import Member, Members, PoolLimits
from megatron_rl.rollout.servers.rendezvous import Address

LOOK_S = 0.05
CHECK_S = 1.0  # between looks whether the exchange of texts still goes on
TABLE = "table"


class StoreBoard:
    """Texts for other ranks, in the store through which the ranks of the job found each other. ``prefix``: of one
    generator.

    A connection of its own: it is used by another thread than the one that makes collectives.
    """

    def __init__(self, prefix: str) -> None:
        from torch.distributed import PrefixStore, TCPStore

        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = PrefixStore(prefix, TCPStore(host, port, is_master=False, wait_for_workers=False))

    def write(self, name: str, content: dict[str, Any]) -> None:
        self._store.set(name, json.dumps(content))

    def read(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """What was written last under each name; all of them have been written."""
        return [json.loads(text) for text in self._store.multi_get(list(names))]


def note_of(rank: int) -> str:
    return f"note of rank {rank}"


class Publisher:
    """Rank 0's side. ``start`` when every follower has written its first note."""

    def __init__(self, members: Members, board: StoreBoard, followers: Sequence[int], stop: Callable[[], bool]) -> None:
        self._members, self._board, self._followers, self._stop = members, board, list(followers), stop
        self._ended = dict.fromkeys(self._followers, 0)  # batches that a follower has no more requests of
        self._progress = asyncio.Event()
        self._task: asyncio.Task | None = None
        self.write_table()

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def all_ended(self, number: int) -> None:
        """Wait until no follower has a request of batch ``number``, or of one before, to make."""
        while min(self._ended.values(), default=number) < number:
            if self._task is not None and self._task.done():
                self._task.result()
                raise RolloutError("rank 0 does not hear of the other ranks any more")
            self._progress.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    await self._progress.wait()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def table(self) -> dict[str, Any]:
        keeper, failed = self._members.keeper, ""
        if keeper is not None and keeper.done() and not keeper.cancelled() and keeper.exception() is not None:
            failed = str(keeper.exception())
        return {
            "due": self._members.due,
            "stop": self._stop(),
            "failed": failed,
            "members": [
                {
                    "number": m.number,
                    "version": m.version,
                    "updates": m.updates,
                    "looks": m.looks,
                    "lost": m.lost,
                    "address": asdict(m.address),
                }
                for m in self._members.members.values()
            ],
        }

    def write_table(self) -> None:
        self._written = self.table()
        self._board.write(TABLE, self._written)

    async def _run(self) -> None:
        names = [note_of(rank) for rank in self._followers]
        while True:
            notes = await asyncio.to_thread(self._board.read, names)
            for rank, note in zip(self._followers, notes, strict=True):
                if note["ended"] > self._ended[rank]:
                    self._ended[rank] = note["ended"]
                    self._progress.set()
            if self.table() != self._written:
                await asyncio.to_thread(self.write_table)
            await asyncio.sleep(LOOK_S)


class Follower(Members):
    """The servers as rank 0 knows them. ``rank``: this one's. ``connect``: a client for a server."""

    def __init__(
        self,
        limits: PoolLimits,
        board: StoreBoard,
        rank: int,
        connect: Callable[[Address], ServerClient],
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(limits, lambda: stop() or self._table["stop"])
        self._board, self._name, self._connect = board, note_of(rank), connect
        self._ended = 0
        (self._table,) = board.read([TABLE])
        board.write(self._name, {"ended": 0})

    @property
    def due(self) -> int:
        return self._table["due"]

    def start(self) -> None:
        self.keeper = asyncio.create_task(self._follow())

    def share_ended(self, number: int) -> None:
        self._ended = max(self._ended, number)

    async def _follow(self) -> None:
        written = 0
        try:
            while True:
                if (ended := self._ended) != written:
                    await asyncio.to_thread(self._board.write, self._name, {"ended": ended})
                    written = ended
                (table,) = await asyncio.to_thread(self._board.read, [TABLE])
                await self._take(table)
                await asyncio.sleep(LOOK_S)
        finally:
            self.note()

    async def _take(self, table: dict[str, Any]) -> None:
        """The state is rank 0's from now on."""
        is_new, self._table = table != self._table or not self.members, table
        if table["failed"]:
            raise RolloutError(table["failed"])
        if not is_new:
            return
        known = {member.number: member for member in self.members.values()}
        for item in table["members"]:
            member = known.get(item["number"])
            if member is None:
                address = Address(**item["address"])
                replaced = self.members.get(address.name)
                member = Member(address, self._connect(address), item["number"])
                self.members[address.name] = member
                if replaced is not None:
                    await self.drop(replaced, "another came in its place")
            member.version, member.updates, member.looks = item["version"], item["updates"], item["looks"]
            self.reconsider(member)
            if item["lost"]:
                await self.drop(member, item["lost"])
        self.note()
