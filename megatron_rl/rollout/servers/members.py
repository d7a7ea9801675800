"""The servers of a run as one rank sees them: which may be asked, waiting for some, and what to do about a failure.

Rank 0 keeps track of the servers (`pool.ServerPool`); ranks of other nodes that ask them follow it
(`following.Follower`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_rl.rollout.generator import RolloutError, RolloutInterrupted
from megatron_rl.rollout.servers.client import ServerError, Weights
from megatron_rl.rollout.servers.rendezvous import Address
from megatron_rl.rollout.servers.wire import Answer

STOP_POLL_S = 0.5  # between looks whether a stop was asked for, while nothing changes


class Client(Protocol):
    """What is asked of a server; `client.ServerClient` is the real one."""

    async def settings(self) -> dict[str, Any]: ...
    async def check_health(self) -> None: ...
    async def push(self, weights: Weights) -> None: ...
    async def generate(self, body: dict[str, Any], version: int) -> Answer: ...
    async def close(self) -> None: ...


@dataclass
class Member:
    """A server that has been let in."""

    address: Address
    client: Client
    number: int = 0  # of its joining, counted over the run: one that comes back has another
    version: int | None = None  # of the weights that it serves; None: it is not used
    updates: int = 0  # that it took
    in_flight: int = 0  # requests of this rank
    missed: int = 0
    lost: str = ""  # why it is not used
    workers: int = 1  # processes of it that take weights
    backend: str = "gloo"  # of a broadcast to them
    doubts: int = 0  # complaints about it that are being looked into; it is not used meanwhile
    updating: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def queue(self) -> int:
        """Requests under way there: of this rank now, of others as the server last said."""
        return self.in_flight + getattr(self.client, "elsewhere", 0)


@dataclass
class PoolLimits:
    """See `ServersConfig`, whose names these are."""

    wait_s: float
    health_every_s: float


class Members:
    """Lives in one event loop. ``stop``: whether waiting is to be given up."""

    def __init__(self, limits: PoolLimits, stop: Callable[[], bool]) -> None:
        self._limits, self._stop = limits, stop
        self.members: dict[str, Member] = {}  # by name, lost ones too
        self.changes = 0  # counts up
        self._changed = asyncio.Event()
        self.keeper: asyncio.Task | None = None  # keeps all this true; its error ends every waiting

    @property
    def due(self) -> int:
        """Version of the weights that a server must hold before it is asked."""
        raise NotImplementedError

    @property
    def ready(self) -> list[Member]:
        """Servers that hold the newest policy and may be used."""
        return [m for m in self.members.values() if not m.lost and not m.doubts and m.version == self.due]

    async def reach(self, version: int, exactly: bool = True) -> None:
        """Wait until the weights of ``version`` are those that are due; without ``exactly``, or newer ones."""
        await self.until(lambda: self.due >= version, f"policy version {version}")
        if exactly and self.due != version:
            raise RolloutError(f"policy version {self.due} was pushed before a batch of {version} was sampled")

    async def suspect(self, member: Member, error: ServerError) -> None:
        """A request to ``member`` failed. Find out whether the server did, and stop using it then."""
        raise NotImplementedError

    def mark_stale(self, member: Member) -> None:
        """Stop using a server that does not hold the newest weights. It gets them at the next look."""
        raise NotImplementedError

    def mark_updated(self, member: Member, version: int) -> None:
        """The server has had an update since it was asked for ``version``, and is not asked before that is known."""
        raise NotImplementedError

    def share_ended(self, number: int) -> None:
        """This rank asks nothing more for batch ``number``, nor for those before."""

    @staticmethod
    async def drop(member: Member, why: str) -> bool:
        """Use the server no more, until it comes back. False where it was lost before."""
        if member.lost:
            return False
        member.lost, member.version = why, None
        await member.client.close()  # its open requests fail now and go to other servers
        return True

    def note(self) -> None:
        """Something about the members is new."""
        self.changes += 1
        self._changed.set()

    async def change(self, since: int | None = None) -> None:
        """Wait until something about the members changes, or has changed since `changes` was ``since``."""
        if since is None or since == self.changes:
            self._changed.clear()
            await self._changed.wait()

    async def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until ``condition``, tested whenever a member changes. Raises `RolloutError` after `wait_s`."""
        try:
            async with asyncio.timeout(self._limits.wait_s):
                await self.until(condition, what)
        except TimeoutError:
            lost = [f"{m.address.name} is lost ({m.lost})" for m in self.members.values() if m.lost]
            there = "; ".join([f"{len(self.ready)} can be used", *lost])
            raise RolloutError(
                f"waited {self._limits.wait_s:g} s (rollout.servers.wait_s) for {what}: {there}"
            ) from None

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """As `wait_for`, without a limit. Raises what ended the keeper, `RolloutInterrupted` where a stop is asked."""
        assert self.keeper is not None
        while not condition():
            if self.keeper.done():
                self.keeper.result()  # raises what ended it
            if self._stop():
                raise RolloutInterrupted(f"a stop was asked for while waiting for {what}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_POLL_S):
                    await self.change()

    async def close(self) -> None:
        if self.keeper is not None:
            self.keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):  # the waiters have been given the error
                await self.keeper
        for member in self.members.values():
            await member.client.close()
