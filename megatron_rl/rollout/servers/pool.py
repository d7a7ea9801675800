"""Which servers there are, which weights each holds, and what happens when one fails.

A server is used only between a weight update that reached it completely and the next one. A server that comes late, or
comes back, gets the newest weights first. `dispatch` hands requests to the servers that are ready.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.rollout.servers.client import RequestRefused, ServerError, ServerLost, Weights
from megatron_rl.rollout.servers.members import Client, Member, Members, PoolLimits
from megatron_rl.rollout.servers.rendezvous import Address

MISSED_LOOKS = 3  # looks at a server's health without an answer before it counts as lost


class ServerPool(Members):
    """All servers of a run. Lives in one event loop; `start` first.

    ``discover``: the addresses there are now. ``connect``: a client for one. ``problems``: why a server's settings do
    not fit the recipe. ``say``: one line for the log. ``stop``: whether waiting is to be given up.
    """

    def __init__(
        self,
        limits: PoolLimits,
        discover: Callable[[], list[Address]],
        connect: Callable[[Address], Client],
        problems: Callable[[dict[str, Any]], list[str]],
        say: Callable[[str], None],
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(limits, stop)
        self._discover, self._connect, self._problems, self._say = discover, connect, problems, say
        self.weights = Weights(0)  # what every server must hold before it is used
        self.refused: dict[str, str] = {}  # why a server that was found does not fit, by name
        self._num_joined = 0

    # ---------------------------------------------------------------- who is there

    @property
    def due(self) -> int:
        return self.weights.version

    async def start(self, count: int) -> None:
        """Wait until ``count`` servers can be used.

        Raises `RolloutError` when that takes longer than `wait_s`, `InputError` for a server that does not fit.
        """
        self.keeper = asyncio.create_task(self._keep())
        await self.wait_for(lambda: len(self.ready) >= count or bool(self.refused), f"{count} servers")
        if self.refused:
            raise InputError("; ".join(f"server {name}: {why}" for name, why in self.refused.items()))

    async def _keep(self) -> None:
        """Let new servers in and check the health of members, until cancelled."""
        joining: dict[str, asyncio.Task] = {}  # in tasks of their own, because large weights take minutes to load
        try:
            while True:
                for name in [name for name, task in joining.items() if task.done()]:
                    joining.pop(name).result()
                for address in self._discover():
                    known = self.members.get(address.name)
                    if address.name not in joining and (known is None or known.lost):
                        joining[address.name] = asyncio.create_task(self._let_in(address))
                await asyncio.gather(*(self._look_after(m) for m in list(self.members.values()) if not m.lost))
                await asyncio.sleep(self._limits.health_every_s)
        finally:
            for task in joining.values():
                task.cancel()
            self.note()  # wakes the waiters, who find this task done, and its error

    async def _let_in(self, address: Address) -> None:
        """Give a server the newest weights and use it from now on. One that does not answer is tried again later."""
        member = Member(address, self._connect(address))
        try:
            settings = await member.client.settings()
            if settings.get("replacing"):
                raise ServerLost("an earlier weight update there has not ended")
            if problems := self._problems(settings):
                raise RequestRefused("; ".join(problems))
            member.workers, member.backend = settings.get("workers", 1), settings.get("backend", "gloo")
            await self._update(member)
        except RequestRefused as error:
            await member.client.close()
            if self.refused.get(address.name) != str(error):
                self.refused[address.name] = str(error)
                self._say(f"server {address.name} ({address.url}) is not used: {error}")
                self.note()
        except ServerError:
            await member.client.close()
        except BaseException:
            await member.client.close()
            raise
        else:
            self.refused.pop(address.name, None)
            self._num_joined += 1
            member.number, self.members[address.name] = self._num_joined, member
            how = "and waits for" if member.version is None else "with"
            self._say(f"server {address.name} ({address.url}) joined {how} policy version {self.weights.version}")
            self.note()

    async def _look_after(self, member: Member) -> None:
        try:
            await member.client.check_health()
            member.missed = 0
        except ServerError as error:
            member.missed += 1
            if error.is_final or member.missed >= MISSED_LOOKS:
                await self.give_up(member, str(error))
        if member.version is None and not member.lost and not member.updating.locked():
            await self._bring_up_to_date(member)

    async def give_up(self, member: Member, why: str) -> None:
        """Stop using a server until it comes back and gets the newest weights."""
        if await self.drop(member, why):
            self._say(f"server {member.address.name} is lost: {why}")
            self.note()

    async def suspect(self, member: Member, error: ServerError) -> None:
        if not member.lost and not error.is_final:
            try:
                await member.client.check_health()
                return
            except ServerError:
                pass
        await self.give_up(member, str(error))

    def mark_stale(self, member: Member) -> None:
        member.version = None

    def mark_updated(self, member: Member, version: int) -> None:
        if member.version == version:  # not by this pool: a push that was given up has arrived after all
            self.mark_stale(member)

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
        except ServerError as error:
            await self.give_up(member, f"weight update {self.weights.version}: {error}")
        self.note()

    async def _update(self, member: Member) -> None:
        async with member.updating:
            while member.version != self.weights.version:  # newer ones may come while it takes some
                weights = self.weights
                if weights.files is None:  # `broadcaster` has them
                    return
                await member.client.push(weights)
                self.took(member, weights.version)

    def took(self, member: Member, version: int) -> None:
        """All weights of ``version`` have arrived at ``member``."""
        member.version = version
        member.updates += 1
