"""Which servers there are, which weights each holds, and what happens when one fails.

A server is used only between a weight update that reached it completely and the next one. A server that comes late, or
comes back, gets the newest weights first. `dispatch` hands requests to the servers that are ready.

What answers at an address need not be a server of this run. It is not used then, and looked at again. Nothing that it
says ends the keeper: the run may have other servers.

`Members` is what every rank that uses servers knows of them. `ServerPool` is rank 0's, which keeps track of the
servers; ranks of other nodes follow it (`following.Follower`).

The table tells what a run knows of its servers, while it goes on and afterwards: a file in the run directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.process.host import write_whole
from megatron_rl.rollout.generator import RolloutError, RolloutInterrupted
from megatron_rl.rollout.servers.client import ServerClient, ServerError, Weights
from megatron_rl.rollout.servers.rendezvous import Address, ServerSettings, folder, printable
from megatron_rl.rollout.servers.wire import Load

STOP_POLL_S = 0.5  # between looks whether a stop was asked for, while nothing changes


@dataclass
class Member:
    """A server that has been let in."""

    address: Address
    client: ServerClient
    number: int = 0  # of its joining, counted over the run: one that comes back has another
    version: int | None = None  # of the weights that it serves; None: it is not used
    updates: int = 0  # that it took
    looks: int = 0  # at it, that it answered
    in_flight: int = 0  # requests of this rank
    missed: int = 0
    lost: str = ""  # why it is not used
    workers: int = 1  # processes of it that take weights
    backend: str = "gloo"  # of a broadcast to them
    doubt: tuple[int, int] | None = None  # updates and looks when a request to it failed: see `Members.suspect`
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
        return [m for m in self.members.values() if not m.lost and m.doubt is None and m.version == self.due]

    async def reach(self, version: int, exactly: bool = True) -> None:
        """Wait until the weights of ``version`` are those that are due; without ``exactly``, or newer ones."""
        await self.until(lambda: self.due >= version, f"policy version {version}")
        if exactly and self.due != version:
            raise RolloutError(f"policy version {self.due} was pushed before a batch of {version} was sampled")

    async def suspect(self, member: Member, error: ServerError) -> None:
        """A request to ``member`` failed. It is not asked before rank 0 has looked at it, or it took an update."""
        self.doubt(member)

    def mark_stale(self, member: Member, version: int) -> None:
        """The server does not hold ``version`` any more: it is not asked before it has had the newest weights."""
        if member.version == version:  # else it has been brought up to date meanwhile
            self.doubt(member)

    def doubt(self, member: Member) -> None:
        member.doubt = member.doubt or (member.updates, member.looks)

    def reconsider(self, member: Member) -> None:
        """Use ``member`` again where it took an update since a request failed, or a look at it began and ended."""
        if member.doubt is not None:
            updates, looks = member.doubt
            if member.updates > updates or member.looks > looks + 1:
                member.doubt = None
                self.note()

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
            there = "; ".join([f"{len(self.ready)} can be used", *self.reasons()])
            raise RolloutError(
                f"waited {self._limits.wait_s:g} s (rollout.servers.wait_s) for {what}: {there}"
            ) from None

    def reasons(self) -> list[str]:
        """Which servers are not used, and why."""
        return [f"{m.address.name} is lost ({m.lost})" for m in self.members.values() if m.lost]

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


class Unfit(ServerError):
    """A server of this run that differs from the recipe."""


MISSED_LOOKS = 3  # looks at a server's health without an answer before it counts as lost


class ServerPool(Members):
    """All servers of a run. Lives in one event loop; `start` first.

    ``discover``: the addresses there are now; an `OSError` of it is tried again later. ``connect``: a client for one.
    ``problems``: why a server's settings do not fit the recipe. ``say``: one line for the log. ``stop``: whether
    waiting is to be given up.
    """

    def __init__(
        self,
        limits: PoolLimits,
        discover: Callable[[], list[Address]],
        connect: Callable[[Address], ServerClient],
        problems: Callable[[ServerSettings], list[str]],
        say: Callable[[str], None],
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(limits, stop)
        self._discover, self._connect, self._problems, self._say = discover, connect, problems, say
        self.weights = Weights(0)  # what every server must hold before it is used
        self.refused: dict[str, str] = {}  # why what was found is not used, by name
        self._unfit: set[str] = set()  # of these, servers that differ from the recipe
        self._joining: dict[str, asyncio.Task] = {}
        self._updating: set[asyncio.Task] = set()
        self._num_joined = 0

    # ---------------------------------------------------------------- who is there

    @property
    def due(self) -> int:
        return self.weights.version

    async def start(self, count: int) -> None:
        """Wait until ``count`` servers can be used.

        Raises `RolloutError` when that takes longer than `wait_s`, `InputError` where there are servers and none fits.
        """
        self.keeper = asyncio.create_task(self._keep())
        await self.wait_for(lambda: len(self.ready) >= count or self._none_fits(), f"{count} servers")
        if len(self.ready) < count and self._none_fits():
            raise InputError(
                "; ".join(f"server {name}: {self.refused[name]}" for name in sorted(self._unfit & self.refused.keys()))
            )

    def _none_fits(self) -> bool:
        is_joining = any(not task.done() for task in self._joining.values())
        return bool(self._unfit & self.refused.keys()) and not self.members and not is_joining

    def reasons(self) -> list[str]:
        return [
            *super().reasons(),
            *(f"{name} is not used ({why})" for name, why in self.refused.items() if name not in self.members),
        ]

    async def _keep(self) -> None:
        """Let new servers in and check the health of members, until cancelled."""
        try:
            while True:
                for name in [name for name, task in self._joining.items() if task.done()]:
                    self._joining.pop(name).result()
                for address in self._found():
                    known = self.members.get(address.name)
                    if address.name not in self._joining and (known is None or known.lost):
                        # In tasks of their own, because large weights take minutes to load.
                        self._joining[address.name] = asyncio.create_task(self._let_in(address))
                await asyncio.gather(*(self._look_after(m) for m in list(self.members.values()) if not m.lost))
                await asyncio.sleep(self._limits.health_every_s)
        finally:
            for task in (*self._joining.values(), *self._updating):
                task.cancel()
            self.note()  # wakes the waiters, who find this task done, and its error

    def _found(self) -> list[Address]:
        try:
            addresses = self._discover()
        except OSError as error:  # of the run directory's disk
            self._say(f"looking for servers failed, and is tried again: {printable(str(error), 200)}")
            return []
        names = {address.name for address in addresses}
        self.refused = {name: why for name, why in self.refused.items() if name in names}
        return addresses

    async def _let_in(self, address: Address) -> None:
        """Give a server the newest weights and use it from now on. One that does not answer is tried again later."""
        member = Member(address, self._connect(address))
        try:
            settings = ServerSettings.of(await member.client.settings())
            if settings.replacing:
                raise ServerError("an earlier weight update there has not ended")
            if problems := self._problems(settings):
                raise Unfit("; ".join(problems))
            member.workers, member.backend = settings.workers, settings.backend
            await self._update(member)
        except Exception as error:  # noqa: BLE001 - whatever answers there, other servers go on
            await member.client.close()
            return self._refuse(address, error)
        except BaseException:
            await member.client.close()
            raise
        self.refused.pop(address.name, None)
        self._unfit.discard(address.name)
        self._num_joined += 1
        member.number, self.members[address.name] = self._num_joined, member
        how = "and waits for" if member.version is None else "with"
        self._say(f"server {address.name} ({address.url}) joined {how} policy version {self.weights.version}")
        self.note()

    def _refuse(self, address: Address, error: Exception) -> None:
        """The log says so once."""
        why = _reason(error)
        (self._unfit.add if isinstance(error, Unfit) else self._unfit.discard)(address.name)
        if self.refused.get(address.name) != why:
            self.refused[address.name] = why
            self._say(f"server {address.name} ({address.url}) is not used: {why}")
            self.note()

    async def _look_after(self, member: Member) -> None:
        version, updates = member.version, member.updates
        try:
            settings = ServerSettings.of(await member.client.settings())
            member.missed, member.looks = 0, member.looks + 1
            if settings.version != version and member.updates == updates:
                member.version = None  # it was started anew
            self.reconsider(member)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this server's
            member.missed += 1
            if getattr(error, "is_final", False) or member.doubt or member.missed >= MISSED_LOOKS:
                await self.give_up(member, _reason(error))
        if member.version is None and not member.lost and not member.updating.locked():
            # In a task of its own: the health of others is looked at meanwhile.
            task = asyncio.create_task(self._bring_up_to_date(member))
            self._updating.add(task)
            task.add_done_callback(self._updating.discard)

    async def give_up(self, member: Member, why: str) -> None:
        """Stop using a server until it comes back and gets the newest weights."""
        if await self.drop(member, why):
            self._say(f"server {member.address.name} is lost: {why}")
            self.note()

    async def suspect(self, member: Member, error: ServerError) -> None:
        self.doubt(member)
        if error.is_final:
            await self.give_up(member, str(error))

    def mark_stale(self, member: Member, version: int) -> None:
        if member.version == version:
            member.version = None

    # ---------------------------------------------------------------- weights

    @property
    def lacking(self) -> list[Member]:
        """Servers that are there and do not hold the newest weights."""
        return [m for m in list(self.members.values()) if not m.lost and m.version != self.weights.version]

    async def push(self, weights: Weights) -> None:
        """Give every server ``weights``; those that fail are lost, and with none left it waits for one to come back.

        From the first moment on, no server is asked that does not hold ``weights``. No request may be in flight.
        """
        self.weights = weights
        for member in self.members.values():
            member.version = None
        self.note()
        await asyncio.gather(*(self._bring_up_to_date(m) for m in list(self.members.values()) if not m.lost))
        await self.wait_for(lambda: bool(self.ready), f"a server to take policy version {weights.version}")

    async def _bring_up_to_date(self, member: Member) -> None:
        try:
            await self._update(member)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this server's
            await self.give_up(member, f"weight update {self.weights.version}: {_reason(error)}")
        self.note()

    async def _update(self, member: Member) -> None:
        async with member.updating:
            while member.version != self.weights.version:  # newer ones may come while it takes some
                weights = self.weights
                if weights.files is None:  # `Broadcaster` sends the next ones
                    return
                await member.client.push(weights)
                self.took(member, weights.version)

    def took(self, member: Member, version: int) -> None:
        """All weights of ``version`` have arrived at ``member``."""
        member.version, member.updates, member.doubt = version, member.updates + 1, None


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, ServerError) else f"{type(error).__name__}: {printable(str(error), 200)}"


def table_path(run_dir: Path) -> Path:
    """Not ….json: those are the servers' own files."""
    return folder(run_dir) / "table"


def row(name: str, url: str, version: int | None, state: str, load: Load, lost: str) -> dict[str, Any]:
    """One server, as JSON can hold it."""
    return {
        "name": name,
        "url": url,
        "version": version,
        "state": state,
        "running": load.running,
        "waiting": load.waiting,
        "kv_usage": load.kv_usage,
        "lost": lost,
    }


def table(pool: ServerPool, ended: bool = False) -> dict[str, Any]:
    """Return the table of servers: address, version, load, and why one is not used.

    ``ended``: the run needs them no more."""
    rows = []
    for member in pool.members.values():
        state = "lost" if member.lost else "ended" if ended else "ready" if member.version == pool.due else "updating"
        address = member.address
        now = pool.refused.get(address.name)
        lost = f"{member.lost}; now {now}" if member.lost and now else member.lost
        rows.append(row(address.name, address.url, member.version, state, _load(member), lost))
    others = {name: why for name, why in pool.refused.items() if name not in pool.members}
    rows += [row(name, "", None, "refused", Load(), why) for name, why in others.items()]
    return {"written": time.time(), "due": pool.due, "servers": rows}


def write_table(run_dir: Path, content: dict[str, Any]) -> None:
    """All of it at once."""
    path = table_path(run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=1) + "\n")


def read_table(run_dir: Path) -> dict[str, Any] | None:
    """Read the table; None: there is none."""
    try:
        return json.loads(table_path(run_dir).read_text())
    except (OSError, ValueError):
        return None


def load_metrics(members: Members) -> dict[str, float]:
    """`rollout/servers/*` of a batch, from what servers said last."""
    loads = [_load(member) for member in members.ready] or [Load()]
    return {
        "rollout/servers/running": sum(load.running for load in loads) / len(loads),
        "rollout/servers/waiting": sum(load.waiting for load in loads) / len(loads),
        "rollout/servers/kv_usage": max(load.kv_usage for load in loads),
        "rollout/servers/lost": float(sum(bool(member.lost) for member in members.members.values())),
    }


def _load(member: Member) -> Load:
    return getattr(member.client, "load", Load())
