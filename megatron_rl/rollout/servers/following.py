"""How ranks of other nodes follow rank 0's servers: two small texts in the job's store, and no collective.

Rank 0 writes the *table*: which weights are due, which servers there are and which of them hold what. Every other rank
that asks servers (a *follower*) writes a *note*: which batches it has no more requests of, and its complaints about
servers that failed it. Both are states, not messages, so nothing is lost or in the wrong order; each side looks every
`LOOK_S` seconds. Responses and weights never pass through here.
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
from megatron_rl.rollout.servers.client import ServerClient, ServerError, ServerLost
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
        self._settled: dict[int, list[int]] = {rank: [] for rank in self._followers}  # complaints that are dealt with
        self._open: dict[tuple[int, int], asyncio.Task] = {}
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
        tasks = [task for task in (self._task, *self._open.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def table(self) -> dict[str, Any]:
        keeper, failed = self._members.keeper, ""
        if keeper is not None and keeper.done() and not keeper.cancelled() and keeper.exception() is not None:
            failed = str(keeper.exception())
        return {
            "due": self._members.due,
            "stop": self._stop(),
            "failed": failed,
            "settled": {str(rank): list(numbers) for rank, numbers in self._settled.items()},
            "members": [
                {
                    "number": m.number,
                    "version": m.version,
                    "updates": m.updates,
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
                self._hear(rank, note)
            if self.table() != self._written:
                await asyncio.to_thread(self.write_table)
            await asyncio.sleep(LOOK_S)

    def _hear(self, rank: int, note: dict[str, Any]) -> None:
        if note["ended"] > self._ended[rank]:
            self._ended[rank] = note["ended"]
            self._progress.set()
        complaints = {item["id"]: item for item in note["complaints"]}
        self._settled[rank] = [number for number in self._settled[rank] if number in complaints]
        for number, item in complaints.items():
            if number not in self._settled[rank] and (rank, number) not in self._open:
                self._open[rank, number] = asyncio.create_task(self._deal_with(rank, item))

    async def _deal_with(self, rank: int, complaint: dict[str, Any]) -> None:
        try:
            members = self._members.members.values()
            member = next((m for m in members if m.number == complaint["member"]), None)
            if member is not None and complaint["kind"] == "stale":
                self._members.mark_stale(member, complaint["version"])
            elif member is not None:
                await self._members.suspect(member, ServerLost(complaint["error"], complaint["is_final"]))
        finally:
            self._settled[rank].append(complaint["id"])
            self._open.pop((rank, complaint["id"]), None)


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
        self._board, self._name, self._rank, self._connect = board, note_of(rank), str(rank), connect
        self._ended, self._numbers = 0, 0
        self._complaints: dict[int, dict[str, Any]] = {}
        self._waiting: dict[int, asyncio.Future] = {}
        (self._table,) = board.read([TABLE])
        board.write(self._name, self._note())

    @property
    def due(self) -> int:
        return self._table["due"]

    def start(self) -> None:
        self.keeper = asyncio.create_task(self._follow())

    async def suspect(self, member: Member, error: ServerError) -> None:
        if not member.lost:
            await self._until_settled(self._complain(member, kind="failed", error=str(error), is_final=error.is_final))

    def mark_stale(self, member: Member, version: int) -> None:
        if member.version == version:
            settled = self._until_settled(self._complain(member, kind="stale", version=version))
            task = asyncio.ensure_future(settled)
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # the keeper's error says why

    def share_ended(self, number: int) -> None:
        self._ended = max(self._ended, number)

    def _complain(self, member: Member, **what: Any) -> tuple[Member, int]:
        """From this moment on ``member`` is not used; await `_until_settled` with what this returns."""
        self._numbers += 1
        self._complaints[self._numbers] = {"id": self._numbers, "member": member.number, **what}
        self._waiting[self._numbers] = asyncio.get_running_loop().create_future()
        member.doubts += 1
        return member, self._numbers

    async def _until_settled(self, complaint: tuple[Member, int]) -> None:
        """Wait until rank 0 has looked into it; the server may be used then, if it still can."""
        member, number = complaint
        try:
            await self._waiting[number]
        finally:
            member.doubts -= 1
            self._complaints.pop(number, None)
            self._waiting.pop(number, None)

    def _note(self) -> dict[str, Any]:
        return {"ended": self._ended, "complaints": list(self._complaints.values())}

    async def _follow(self) -> None:
        written = None
        try:
            while True:
                note = self._note()
                if note != written:
                    await asyncio.to_thread(self._board.write, self._name, note)
                    written = note
                (table,) = await asyncio.to_thread(self._board.read, [TABLE])
                await self._take(table)
                await asyncio.sleep(LOOK_S)
        except BaseException as error:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(RolloutError(f"following rank 0's servers ended: {error}"))
                    future.exception()  # whoever waits gets it; with nobody left it is no news
            raise
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
            member.version = item["version"]
            if item["lost"]:
                await self.drop(member, item["lost"])
        for number in table["settled"].get(self._rank, []):
            if (future := self._waiting.get(number)) is not None and not future.done():
                future.set_result(None)
        self.note()
