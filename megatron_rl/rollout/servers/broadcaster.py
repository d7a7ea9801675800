"""New weights to all servers by broadcast, whatever becomes of some of them meanwhile: the trainer's side.

A group is kept from update to update while the same servers are there, and made anew when one goes, comes or fails.
While rank 0 sends, each server's update request is under way; its answer says how much arrived. The first request that
fails ends the broadcast for all, and the servers that are left stay closed until they get the whole set again, in a new
group. Where a new group fails and no server was lost by it, the network is taken to allow none, and weights go through
files. A server is in one group at a time: one that gets weights in a group of its own has left the kept one.

Servers that come later wait for the weights until the learner waits for responses, or sends newer ones: all its ranks
have to take part in collecting a tensor.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import secrets
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from megatron_rl.rollout.generator import RolloutError
from megatron_rl.rollout.servers.client import ServerLost, UpdateInterrupted, Weights
from megatron_rl.rollout.servers.main_rank import MainRank
from megatron_rl.rollout.servers.members import Member
from megatron_rl.rollout.servers.pool import ServerPool
from megatron_rl.rollout.servers.weight_broadcast import Amount, Sender
from megatron_rl.rollout.servers.weight_group import GroupError, WeightGroup, address_for

Stream = Iterable[tuple[str, torch.Tensor]]
Checked = Callable[[Stream], Iterator[tuple[str, torch.Tensor]]]
LOOK_S = 0.5  # between looks whether a broadcast was given up, while servers are at work
GRACE_S = 10.0  # for servers to say so, once it was
DONE, AGAIN = "done", "again"


class Broadcaster:
    """The same object on every rank; `push` and `fill` are collective. ``pool``: rank 0's, from `use` on.

    ``checked``: wraps a stream in `weight_check.checked`. ``refused``: why weights go through files; "" where they do
    not. ``amount``: what the last broadcast sent.
    """

    def __init__(self, main: MainRank, checked: Checked, stall_s: float, refused: str = "") -> None:
        self._main, self._checked, self._stall_s, self.refused = main, checked, stall_s, refused
        self._pool: ServerPool | None = None
        self._sender: Sender | None = None
        self._group: WeightGroup | None = None
        self._joined: list[int] = []  # numbers of the members that the group has
        self._tried: set[int] = set()  # that `fill` gave up on, until the next update
        self._source: Stream = ()
        self.amount = Amount(0, 0)

    def use(self, pool: ServerPool) -> None:
        """On rank 0."""
        self._pool = pool

    # ---------------------------------------------------------------- collective

    def push(self, weights: Stream, version: int) -> bool:
        """Every server gets ``weights``; those that fail are lost, and with none left it waits for one to come back.

        Returns whether all servers that are left hold them; if not, `refused` says why, and the caller has to write
        files. ``weights`` are iterated over once for each attempt; of an iterator there is one. Raises `RolloutError`
        on all ranks where no server got them then, or none comes in time.
        """
        once = iter(weights) is weights
        self._source = () if once else weights
        self._wait(self._announce, version)
        while True:
            tried = self._wait(self._someone)
            outcome = self._attempt(weights, version, tried, fresh=False) if tried else DONE
            if outcome not in (DONE, AGAIN):
                self.refused = outcome
            if outcome == DONE or (once and self._main.share(lambda: bool(self._pool.ready))):
                return True
            if once:
                raise RolloutError(f"no server got the weights, and they cannot be sent again ({outcome})")
            if self.refused:
                return False

    def fill(self) -> None:
        """Servers that lack the newest weights get them, in a group of their own. What fails now waits for `push`."""
        version, tried = self._main.share(lambda: (self._pool.weights.version, self._missing()))
        if tried:
            self._attempt(self._source, version, tried, fresh=True)
            self._tried |= set(tried)

    def may_fill(self) -> bool:
        """Whether this is rank 0 and `fill` has something to do. ``weights`` of `push` say with ``is_current`` whether
        they are still those of the learner."""
        return self._main.is_this and bool(self._missing()) and bool(getattr(self._source, "is_current", self._source))

    def _wait(self, work: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> Any:
        return self._main.wait(self._main.submit(work(*arguments)) if self._main.is_this else None)

    def close(self) -> None:
        """Leave the group."""
        group, self._group, self._joined = self._group, None, []
        if group is not None:
            group.close()

    # ---------------------------------------------------------------- one attempt

    def _attempt(self, weights: Stream, version: int, numbers: list[int], fresh: bool) -> str:
        """Send ``weights`` to the members of ``numbers``. `DONE`, `AGAIN`, or why no group can be formed. Collective.

        ``fresh``: in a group of their own.
        """
        stream = self._checked(weights)
        ended = self._send(stream, version, numbers, fresh) if self._main.is_this else None
        for _ in stream:  # every rank takes part in collecting a tensor, even if rank 0 has no use for it
            pass
        return self._main.wait(ended)

    def _send(
        self, stream: Iterator[tuple[str, torch.Tensor]], version: int, numbers: list[int], fresh: bool
    ) -> concurrent.futures.Future[str]:
        members = [member for member in list(self._pool.members.values()) if member.number in numbers]
        try:
            group, sender = self._group_of(members, fresh)
        except GroupError as error:
            return self._main.submit(_said(str(error)))
        delivery = self._main.submit(self._deliver(group, members, version))
        was_kept = group.is_formed
        try:
            if not was_kept:
                group.form()
            self.amount = group.sent = sender.send(stream)
        except GroupError as error:
            group.close(str(error))
        except BaseException:
            group.close("the learner failed")
            raise
        return self._main.submit(self._settle(group, members, delivery, version, was_kept))

    def _group_of(self, members: list[Member], fresh: bool) -> tuple[WeightGroup, Sender]:
        numbers = [member.number for member in members]
        if not fresh and self._group is not None and not self._group.give_up and self._joined == numbers:
            self._group.sent = None
            return self._group, self._sender
        on_devices = torch.accelerator.is_available() and all(member.backend == "nccl" for member in members)
        group = WeightGroup.open(
            address_for([member.address.url for member in members]),
            secrets.token_hex(8),
            1 + sum(member.workers for member in members),
            "nccl" if on_devices else "gloo",
            self._stall_s,
        )
        sender = Sender(group)
        if fresh and set(numbers) & set(self._joined):
            self.close()
        if not fresh:
            self.close()
            self._group, self._sender, self._joined = group, sender, numbers
        return group, sender

    # ---------------------------------------------------------------- in rank 0's event loop

    async def _announce(self, version: int) -> None:
        pool = self._pool
        pool.weights = Weights(version, files=None)
        self._tried.clear()
        for member in pool.members.values():
            member.version = None
        pool.note()

    async def _someone(self) -> list[int]:
        """Numbers of the members that lack the weights, as soon as there is a server."""
        pool = self._pool
        version = pool.weights.version
        await pool.wait_for(lambda: bool(pool.ready or pool.lacking), f"a server to take policy version {version}")
        return [member.number for member in pool.lacking]

    def _missing(self) -> list[int]:
        if self._pool.weights.files is not None:
            return []
        return [m.number for m in self._pool.lacking if m.number not in self._tried and not m.updating.locked()]

    async def _deliver(self, group: WeightGroup, members: list[Member], version: int) -> dict[int, Any]:
        """What every member answers to its update request, or the error, by number."""
        tasks, rank = {}, 1
        for member in members:
            weights = Weights(version, broadcast=replace(group.place, rank=rank))
            tasks[member.number] = asyncio.create_task(_ask(member, weights))
            rank += member.workers
        pending = set(tasks.values())
        while pending:
            done, pending = await asyncio.wait(pending, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            failures = [error for task in done if (error := task.exception()) is not None]
            if failures and not group.give_up:
                group.give_up = str(failures[0])
            if group.give_up and group.sent is None and pending:
                _, pending = await asyncio.wait(pending, timeout=GRACE_S)
                for task in pending:
                    task.cancel()
                await asyncio.gather(*pending, return_exceptions=True)
                pending = set()
        return {number: _outcome(task) for number, task in tasks.items()}

    async def _settle(
        self,
        group: WeightGroup,
        members: list[Member],
        delivery: concurrent.futures.Future,
        version: int,
        was_kept: bool,
    ) -> str:
        """Use who has everything, give up who is gone. ``was_kept``: the group is of an earlier update."""
        answers, pool = await asyncio.wrap_future(delivery), self._pool
        for member in members:
            answer = answers[member.number]
            if isinstance(answer, UpdateInterrupted) or member.lost:
                continue
            if isinstance(answer, Exception):
                await pool.give_up(member, f"weight update {version}: {answer}")
            elif group.sent is None or (answer["tensors"], answer["bytes"]) != (group.sent.tensors, group.sent.bytes):
                await pool.give_up(member, f"weight update {version}: {answer} of {group.sent} arrived")
            else:
                pool.took(member, version)
        pool.note()
        if group is not self._group or group.give_up:
            group.close()
            self._group = None if group is self._group else self._group
        lacking = [member for member in members if not member.lost and member.version != version]
        if not lacking and pool.ready:
            return DONE
        return AGAIN if was_kept or len(lacking) < len(members) else group.give_up


async def _ask(member: Member, weights: Weights) -> dict[str, int]:
    async with member.updating:
        return await member.client.push(weights)


def _outcome(task: asyncio.Task) -> Any:
    if task.cancelled():
        return ServerLost(f"no answer within {GRACE_S:g} s after the broadcast was given up")
    error = task.exception()
    return task.result() if error is None else error


async def _said(text: str) -> str:
    return text
