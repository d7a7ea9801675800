"""The servers of a run, launched or found, and what this rank knows about them.

Rank 0 looks after them (`pool`) and tells the other ranks that ask them (`following`). Everything between start and
close happens in the event loop of `main_rank`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.errors import InputError
from megatron_rl.process.ranks import world_rank
from megatron_rl.rollout.servers.client import ServerClient
from megatron_rl.rollout.servers.fetching import fetching_ranks
from megatron_rl.rollout.servers.following import Follower, Publisher, StoreBoard
from megatron_rl.rollout.servers.local import LocalServers
from megatron_rl.rollout.servers.main_rank import MainRank
from megatron_rl.rollout.servers.members import Members, PoolLimits
from megatron_rl.rollout.servers.pool import ServerPool
from megatron_rl.rollout.servers.rendezvous import Address, discover, read_token, require_token
from megatron_rl.rollout.servers.settings import differences
from megatron_rl.rollout.servers.table import table, write_table

LAUNCH_CHECK_S = 1.0  # between looks whether a launched server has ended


@dataclass(frozen=True)
class Started:
    """What rank 0 tells the others when there are servers. The token stays in memory."""

    precision: dict[str, str]
    token: str
    board: str  # prefix of the texts in the store


class RunServers:
    """The same object on every rank. On rank 0 `start`, then on all others `follow`, then on rank 0 `publish`.

    ``agreed``: the settings that every server must share (`settings.agreed_settings`). ``main``: runs the event loop on
    ranks that ask. See `generator.ServerGenerator` for ``run_dir``, ``say`` and ``stop``.
    """

    def __init__(
        self,
        config: RolloutConfig,
        agreed: dict[str, Any],
        run_dir: Path,
        say: Callable[[str], None],
        stop: Callable[[], bool],
    ) -> None:
        self._config, self._agreed, self._run_dir, self._say, self._stop = config, agreed, run_dir, say, stop
        self.concurrency = config.servers.concurrency or config.max_num_seqs  # requests in flight to one server
        self.fetchers = fetching_ranks(bool(config.servers.launch), at_most=self.concurrency)
        self.main = MainRank(works=world_rank() in self.fetchers)
        self.pool: ServerPool | None = None  # rank 0's
        self.members: Members | None = None  # of ranks that fetch: the servers as they know them
        self.turn: asyncio.Lock  # of those ranks, first come, first served: batches and weights keep their order
        self._publisher: Publisher | None = None  # rank 0's, where others follow it
        self._local: LocalServers | None = None
        self._relaunches = False  # at the start, a server that ends is an error

    def token(self) -> str:
        """On rank 0: that of the environment or file, or a new one for servers of our own."""
        servers = self._config.servers
        return (read_token(servers) or secrets.token_hex(32)) if servers.launch else require_token(servers)

    def start(self, token: str, recipe_file: Path | None) -> Started:
        """On rank 0: launch servers where the recipe says so, find them, and learn what they compute."""
        servers = self._config.servers
        if servers.launch:
            assert recipe_file is not None, "servers are launched from the run's resolved recipe"
            self._local = LocalServers(servers.launch, recipe_file, self._run_dir, token)
        started = self.main.submit(self._find(token))
        while not concurrent.futures.wait([started], LAUNCH_CHECK_S).done:
            if self._local is not None:
                self._local.check()
        started.result()
        described = list(self._described.values())
        if any(one != described[0] for one in described):
            raise InputError(f"the servers do not compute alike: {self._described}")
        self.members, prefix = self.pool, f"servers {secrets.token_hex(8)}"
        if len(self.fetchers) > 1:
            board, followers = StoreBoard(prefix), [rank for rank in self.fetchers if rank]
            self._publisher = Publisher(self.pool, board, followers, self._stop)
        return Started(described[0], token, prefix)

    def follow(self, started: Started) -> None:
        """On the other ranks that fetch: see the servers as rank 0 does."""
        if not self.main.works or self.main.is_this:
            return
        board, servers = StoreBoard(started.board), self._config.servers

        async def follow() -> Follower:
            follower = Follower(
                PoolLimits(servers.wait_s, servers.health_every_s),
                board,
                world_rank(),
                connect=partial(self._client, started.token),
                stop=self._stop,
            )
            self.turn = asyncio.Lock()
            follower.start()
            return follower

        self.members = self.main.submit(follow()).result()

    def publish(self) -> None:
        """On rank 0, when all followers are there."""
        if self._publisher is not None:
            self.main.submit(self._publisher.start()).result()

    async def _find(self, token: str) -> None:
        servers = self._config.servers
        self.turn = asyncio.Lock()
        self._described: dict[str, dict[str, str]] = {}

        def problems(settings: dict[str, Any]) -> list[str]:
            if self._local is not None:
                self._local.came_up(settings["name"])
            self._described[settings["name"]] = settings["precision"]
            return differences(self._agreed, settings["agreed"])

        self.pool = ServerPool(
            PoolLimits(servers.wait_s, servers.health_every_s),
            discover=self._discover,
            connect=partial(self._client, token),
            problems=problems,
            say=self._say,
            stop=self._stop,
        )
        await self.pool.start(servers.num_expected)
        self._relaunches = self._local is not None

    def _client(self, token: str, address: Address) -> ServerClient:
        return ServerClient(address, token, self._config.servers.request_deadline_s, self._config.in_flight.mode)

    def _discover(self) -> list[Address]:
        """The servers there are; those of our own that have ended are started again first.

        The pool asks every `health_every_s`, so the run directory tells of servers as often.
        """
        self._tell_of_servers()
        if self._relaunches:
            self._local.relaunch(self._say)
        return discover(self._config.servers, self._run_dir)

    async def batches_ended(self, num_begun: int) -> None:
        """Ranks that follow have been answered all they asked for the first ``num_begun`` batches."""
        if self._publisher is not None:
            await self._publisher.all_ended(num_begun)

    def close(self) -> None:
        """Cancel what still runs, and end the event loop."""
        self.main.close(self._end() if self.main.works else None)

    def end_launched(self) -> None:
        """End the servers of our own, after `close`."""
        if self._local is not None:
            self._local.close()
            self._local = None

    def _tell_of_servers(self, ended: bool = False) -> None:
        """On rank 0, for `megatron-rl servers`. A full disk costs the table, not the run."""
        if self.pool is not None:
            with contextlib.suppress(OSError):
                write_table(self._run_dir, table(self.pool, self.pool.refused, ended))

    async def _end(self) -> None:
        self._tell_of_servers(ended=True)
        if self._publisher is not None:
            await self._publisher.close()
        if self.members is not None:
            await self.members.close()
