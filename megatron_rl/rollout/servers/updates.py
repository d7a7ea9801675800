"""New weights for the servers, by broadcast or through files, in the order of batches and updates.

The trainer's side of `broadcaster` and `weight_files`, and the choice between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.rollout.generator import RolloutError
from megatron_rl.rollout.servers.broadcaster import Broadcaster
from megatron_rl.rollout.servers.client import Weights
from megatron_rl.rollout.servers.run_servers import RunServers
from megatron_rl.rollout.servers.weight_files import WeightFolder
from megatron_rl.rollout.weight_check import checked


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
        self.broadcaster = Broadcaster(
            self._main, partial(checked, shapes=shapes), config.servers.weights_stall_s, config.why_files
        )

    def open_folder(self) -> None:
        """On rank 0. Raises `InputError` where the folder cannot be used."""
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
