"""New weights for the servers, by broadcast or through files, in the order of batches and updates: the trainer's side.

`Broadcaster` sends weights to the workers of all servers at once (`weight_broadcast`). Its group is kept from update to
update while the same servers are there, and made anew when one goes, comes or fails. While rank 0 sends, each server's
update request is under way; its answer says how much arrived. The first request that fails ends the broadcast for all.
The servers that are left stay closed until they get the whole set again, in a new group. Where a new group fails and no
server was lost by it, the network is taken to allow none, and weights go through files. Servers that come later wait
for the next update.

`WeightFolder` writes safetensors files in a folder that both sides see. Tensors have the dtype that the learner
exports. Servers convert them as the in-process engine does, so that nothing is rounded twice. A file holds as many
tensors as fit in its size, so that no rank needs the whole model in memory.

`WeightUpdates` chooses between the two.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.errors import InputError
from megatron_rl.rollout.generator import RolloutError
from megatron_rl.rollout.servers.client import ServerLost, UpdateInterrupted, Weights
from megatron_rl.rollout.servers.pool import Member, ServerPool
from megatron_rl.rollout.servers.run_servers import MainRank, RunServers
from megatron_rl.rollout.servers.weight_broadcast import Amount, GroupError, Sender, WeightGroup, address_for
from megatron_rl.rollout.weights import checked

Stream = Iterable[tuple[str, torch.Tensor]]
Checked = Callable[[Stream], Iterator[tuple[str, torch.Tensor]]]
LOOK_S = 0.5  # between looks whether a broadcast was given up, while servers are at work
GRACE_S = 10.0  # for servers to say so, once it was
STALL_S = 60.0  # a broadcast in which nothing moves for this long is given up
DONE, AGAIN = "done", "again"


class Broadcaster:
    """The same object on every rank; `push` is collective. ``pool``: rank 0's, from `use` on.

    ``checked``: wraps a stream in `weights.checked`. ``refused``: why weights go through files; "" where they do
    not.
    """

    def __init__(self, main: MainRank, checked: Checked, refused: str = "", stall_s: float = STALL_S) -> None:
        self._main, self._checked, self._stall_s, self.refused = main, checked, stall_s, refused
        self._pool: ServerPool | None = None
        self._sender: Sender | None = None
        self._group: WeightGroup | None = None
        self._joined: list[int] = []  # numbers of the members that the group has

    def use(self, pool: ServerPool) -> None:
        """On rank 0."""
        self._pool = pool

    # ---------------------------------------------------------------- collective

    def push(self, weights: Stream, version: int) -> bool:
        """Every server gets ``weights``; those that fail are lost, and with none left it waits for one to come back.

        Returns whether all servers that are left hold them; if not, `refused` says why, and the caller has to write
        files. ``weights`` are iterated over once for each attempt. Raises `RolloutError` on all ranks where no server
        comes in time.
        """
        self._wait(self._announce, version)
        while True:
            tried = self._wait(self._someone)
            outcome = self._attempt(weights, version, tried) if tried else DONE
            if outcome == DONE:
                return True
            if outcome != AGAIN:
                self.refused = outcome
                return False

    def _wait(self, work: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> Any:
        return self._main.wait(self._main.submit(work(*arguments)) if self._main.is_this else None)

    def close(self) -> None:
        """Leave the group."""
        group, self._group, self._joined = self._group, None, []
        if group is not None:
            group.close()

    # ---------------------------------------------------------------- one attempt

    def _attempt(self, weights: Stream, version: int, numbers: list[int]) -> str:
        """Send ``weights`` to the members of ``numbers``. `DONE`, `AGAIN`, or why no group can be formed.
        Collective."""
        stream = self._checked(weights)
        ended = self._send(stream, version, numbers) if self._main.is_this else None
        for _ in stream:  # every rank takes part in collecting a tensor, even if rank 0 has no use for it
            pass
        return self._main.wait(ended)

    def _send(
        self, stream: Iterator[tuple[str, torch.Tensor]], version: int, numbers: list[int]
    ) -> concurrent.futures.Future[str]:
        members = [member for member in list(self._pool.members.values()) if member.number in numbers]
        try:
            group, sender = self._group_of(members)
        except GroupError as error:
            return self._main.submit(_said(str(error)))
        delivery = self._main.submit(self._deliver(group, members, version))
        was_kept = group.is_formed
        try:
            if not was_kept:
                group.form()
            group.sent = sender.send(stream)
        except GroupError as error:
            group.close(str(error))
        except BaseException:
            group.close("the learner failed")
            raise
        return self._main.submit(self._settle(group, members, delivery, version, was_kept))

    def _group_of(self, members: list[Member]) -> tuple[WeightGroup, Sender]:
        numbers = [member.number for member in members]
        if self._group is not None and not self._group.give_up and self._joined == numbers:
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
        self.close()
        self._group, self._sender, self._joined = group, Sender(group), numbers
        return group, self._sender

    # ---------------------------------------------------------------- in rank 0's event loop

    async def _announce(self, version: int) -> None:
        pool = self._pool
        pool.weights = Weights(version, files=None)
        for member in pool.members.values():
            member.version = None
        pool.note()

    async def _someone(self) -> list[int]:
        """Numbers of the members that lack the weights, as soon as there is a server."""
        pool = self._pool
        version = pool.weights.version
        await pool.wait_for(lambda: bool(pool.ready or pool.lacking), f"a server to take policy version {version}")
        return [member.number for member in pool.lacking]

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
            elif answer != group.sent:
                await pool.give_up(member, f"weight update {version}: {answer} of {group.sent} arrived")
            else:
                pool.took(member, version)
        pool.note()
        if group.give_up:
            self.close()
        lacking = [member for member in members if not member.lost and member.version != version]
        if not lacking and pool.ready:
            return DONE
        return AGAIN if was_kept or len(lacking) < len(members) else group.give_up


async def _ask(member: Member, weights: Weights) -> Amount:
    async with member.updating:
        return await member.client.push(weights)


def _outcome(task: asyncio.Task) -> Any:
    if task.cancelled():
        return ServerLost(f"no answer within {GRACE_S:g} s after the broadcast was given up")
    error = task.exception()
    return task.result() if error is None else error


async def _said(text: str) -> str:
    return text


FILE_BYTES = 2 << 30


class WeightFolder:
    """A run's own subfolder of ``parent``, with one folder for each write.

    The name holds a hash of ``run_dir``, so that several runs can share ``parent``. Whatever else ``parent`` holds is
    left alone. The subfolder of a run that was killed is removed when the run starts again; its lock ensures that no
    other process is using it. Raises `InputError` where ``parent`` cannot be used.
    """

    def __init__(self, parent: Path, run_dir: Path) -> None:
        run = str(run_dir.resolve())
        self._written = 0
        self.root = parent / f"megatron_rl-{run_dir.name}-{hashlib.sha256(run.encode()).hexdigest()[:12]}"
        try:
            parent.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(self.root):
                shutil.rmtree(self.root)
            self.root.mkdir()
        except OSError as error:
            raise InputError(
                f"rollout.servers.weights_dir: {parent} cannot be used ({error}); name a folder that this run can "
                "write to, such as /dev/shm"
            ) from error

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> Weights:
        """Put all ``tensors`` on disk. A version may come twice, after an update that was skipped."""
        self._written += 1
        folder = self.root / f"{self._written:06d}_version_{version}"
        folder.mkdir()
        files: list[str] = []
        part: dict[str, torch.Tensor] = {}
        size = num_tensors = num_bytes = 0

        def flush() -> None:
            nonlocal part, size
            path = folder / f"part_{len(files):04d}.safetensors"
            save_file(part, path)
            files.append(str(path.resolve()))
            part, size = {}, 0

        for name, tensor in tensors:
            # A copy: exported tensors may be views of one buffer that the next one overwrites.
            part[name] = tensor.detach().to("cpu", copy=True).contiguous()
            size += part[name].nbytes
            num_tensors, num_bytes = num_tensors + 1, num_bytes + part[name].nbytes
            if size >= FILE_BYTES:
                flush()
        if part:
            flush()
        return Weights(version, tuple(files), amount=Amount(num_tensors, num_bytes))

    def remove_before(self, weights: Weights) -> None:
        """Remove what was written before ``weights``: no server is given it any more. Later ones may wait already."""
        first = Path(weights.files[0]).parent.name
        with contextlib.suppress(OSError):  # what cannot be listed now is removed after the next update
            for folder in self.root.iterdir():
                if folder.is_dir() and folder.name < first:
                    shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove the run's own subfolder."""
        shutil.rmtree(self.root, ignore_errors=True)


class WeightUpdates:
    """The same object on every rank. On rank 0 `open_folder` before there are servers, `use_pool` afterwards.

    ``shapes``: of the weights that servers hold. ``folder``: for files, below the run directory or `weights_dir`.
    """

    def __init__(
        self,
        config: RolloutConfig,
        shapes: dict[str, tuple[int, ...]],
        servers: RunServers,
        run_dir: Path,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._shapes, self._servers, self._run_dir, self._say = config, shapes, servers, run_dir, say
        self._overlaps = config.in_flight.mode != "finish"  # batches and weights do not wait for each other
        self._main = servers.main
        self._sent_version = -1
        self._folder: WeightFolder | None = None
        self.last_push: dict[str, float] = {}  # how long it took
        self.broadcaster = Broadcaster(self._main, partial(checked, shapes=shapes), config.why_files)

    def open_folder(self) -> None:
        """Open the folder on rank 0. Raises `InputError` if it cannot."""
        self._folder = WeightFolder(
            self._config.servers.weights_dir or self._run_dir / "servers" / "weights", self._run_dir
        )

    def use_pool(self) -> None:
        """On rank 0, when there are servers."""
        self.broadcaster.use(self._servers.pool)
        self._say_files()

    def send(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int, num_begun: int) -> bool:
        """The servers take the weights after the ``num_begun`` batches that are begun, or at once. Collective.

        Where batches and weights overlap, weights that the servers hold already, after an update of the learner that
        was skipped, are not sent again: responses would be cut for them.
        """
        if self._overlaps and policy_version == self._sent_version:
            for _ in checked(weights, self._shapes):
                pass
            return False
        if self.broadcaster.refused or not self._broadcast(weights, policy_version, num_begun):
            self._send_files(weights, policy_version, num_begun)
        self._sent_version = policy_version
        return True

    def _broadcast(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int, num_begun: int) -> bool:
        """Sends while the learner has them, so it waits for the servers' turn first. False: files are needed."""
        self._main.wait(self._main.submit(self._take_turn(num_begun)) if self._main.is_this else None)
        start = time.perf_counter()
        try:
            is_done = self.broadcaster.push(weights, policy_version)
        finally:
            self._main.share(self._end_turn)
        self.last_push = {"perf/push_s": time.perf_counter() - start}
        self._say_files()
        return is_done

    def _send_files(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int, num_begun: int) -> None:
        stream = checked(weights, self._shapes)
        written, failure = None, None
        if self._main.is_this:
            try:
                written = self._folder.write(stream, policy_version)
            except (OSError, SafetensorError) as error:
                failure = RolloutError(f"weights for the servers could not be written to {self._folder.root}: {error}")
        for _ in stream:  # every rank takes part in collecting a tensor, even if rank 0 has no use for it
            pass
        self._main.share(partial(_raise, failure))
        pushed = self._main.submit(self._push(written, num_begun)) if self._main.is_this else None
        if not self._config.max_staleness:
            self._main.wait(pushed)

    def _say_files(self) -> None:
        if self._main.is_this and self._config.servers.weights == "broadcast" and self.broadcaster.refused:
            self._say(f"weights go to the servers through files in {self._folder.root}: {self.broadcaster.refused}")

    async def _take_turn(self, num_begun: int) -> None:
        """From now on until `_end_turn` nothing else is done: see `_push`."""
        await self._servers.turn.acquire()
        try:
            await self._batches_ended(num_begun)
        except BaseException:
            self._servers.turn.release()
            raise

    def _end_turn(self) -> None:
        self._main.call(self._servers.turn.release)

    async def _batches_ended(self, num_begun: int) -> None:
        if not self._overlaps:
            await self._servers.batches_ended(num_begun)

    async def _push(self, weights: Weights, num_begun: int) -> None:
        """At once, or when all batches up to ``num_begun`` are sampled, on this rank and on those that follow."""
        async with self._servers.turn:
            await self._batches_ended(num_begun)
            start = time.perf_counter()
            await self._servers.pool.push(weights)
            self.last_push = {"perf/push_s": time.perf_counter() - start}
            self._folder.remove_before(weights)

    def close(self) -> None:
        """Leave the group, before the event loop ends."""
        self.broadcaster.close()

    def remove_files(self) -> None:
        """When no server reads them any more."""
        if self._folder is not None:
            self._folder.close()


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure
