"""The servers of a run on one rank: launched or found, and used from an event loop in a thread.

One rank of each node asks servers (`fetching_ranks`). Rank 0 looks after the servers (`pool`) and informs the other
ranks that use them (`following`). Everything between start and close happens in the event loop of `MainRank`.
`LocalServers` are servers that a run starts on its own machine (`rollout.servers.launch`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megatron_rl.config.rollout import TOKEN_VARIABLE, RolloutConfig
from megatron_rl.errors import InputError
from megatron_rl.process.ranks import broadcast_object, gather_objects, world_rank
from megatron_rl.rollout.generator import RolloutError
from megatron_rl.rollout.servers.client import ServerClient
from megatron_rl.rollout.servers.following import Follower, Publisher, StoreBoard
from megatron_rl.rollout.servers.pool import Members, PoolLimits, ServerPool, table, write_table
from megatron_rl.rollout.servers.rendezvous import (
    Address,
    ServerSettings,
    differences,
    discover,
    folder,
    read_token,
    require_token,
)

END_S = 20.0  # for a server to leave after SIGTERM, before it is killed
LAST_LINES = 15
MAX_ENDS = 3  # of one server, in a row: another start would not help
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class LocalServers:
    """Runs ``count`` processes of `megatron-rl serve`, with their logs beside their addresses.

    ``recipe``: the resolved recipe, a YAML file. The token reaches them in their environment. ``command``: what starts
    one; the name is added to it.
    """

    def __init__(
        self, count: int, recipe: Path, run_dir: Path, token: str, command: Sequence[str] | None = None
    ) -> None:
        self._folder = folder(run_dir)
        self._folder.mkdir(parents=True, exist_ok=True)
        # The variables of this rank would make a server think that it is one.
        environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        environment |= {TOKEN_VARIABLE: token, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        self._environment = environment
        serve = [sys.executable, "-m", "megatron_rl", "serve", str(recipe), "--ends-with-parent"]
        self._command = list(command or [*serve, "--set", f"run_root={run_dir.resolve().parent}"])
        self._ended: dict[str, int] = {}  # how often a server ended since it could last be used
        self._processes: dict[str, subprocess.Popen] = {}
        for index in range(count):
            self._log(f"local-{index}").unlink(missing_ok=True)
            self._launch(f"local-{index}")

    def _launch(self, name: str) -> None:
        self._address(name).unlink(missing_ok=True)  # of a server that was killed
        with self._log(name).open("a") as out:
            self._processes[name] = subprocess.Popen(
                [*self._command, "--name", name],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the trainer, which needs them to finish its step
            )

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _address(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def check(self) -> None:
        """Raises `RolloutError` with a server's last words when it ended before it could be used."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise RolloutError(f"server {name} ended at its start ({self._last_words(name)}")

    def relaunch(self, say: Callable[[str], None]) -> None:
        """Start servers again that have ended. ``say``: one line for the log.

        A server that ended `MAX_ENDS` times and could not be used in between is left alone. Raises `RolloutError` with
        the last words of one where this is so of all.
        """
        for name, process in self._processes.items():
            if process.poll() is None or self._is_given_up(name):
                continue
            self._ended[name] = self._ended.get(name, 0) + 1
            if self._is_given_up(name):
                say(f"server {name} ended {MAX_ENDS} times and could not be used in between; it is left alone")
            else:
                say(f"server {name} ended (status {process.returncode}) and is started again; see {self._log(name)}")
                self._launch(name)
        if all(self._is_given_up(name) for name in self._processes):
            raise RolloutError(f"no server can be started; {name} ended ({self._last_words(name)}")

    def came_up(self, name: str) -> None:
        """A server can be used: its ends count from 0 again."""
        self._ended.pop(name, None)

    def _is_given_up(self, name: str) -> bool:
        return self._ended.get(name, 0) >= MAX_ENDS

    def _last_words(self, name: str) -> str:
        last = "\n".join(self._log(name).read_text(errors="replace").splitlines()[-LAST_LINES:])
        return f"status {self._processes[name].returncode}); {self._log(name)}:\n{last}"

    def close(self) -> None:
        """End them all; returns when they are gone."""
        for process in self._processes.values():
            process.terminate()
        for name, process in self._processes.items():
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._address(name).unlink(missing_ok=True)  # one that was killed leaves its address


T = TypeVar("T")
# Ranks wait for the slowest in a collective that has a time limit, so this often they tell each other that they live.
HEARTBEAT_S = 60.0


def fetching_ranks(on_this_machine: bool, at_most: int) -> list[int]:
    """The first rank of every node, and rank 0; the same list on every rank. Collective.

    ``on_this_machine``: of rank 0's machine alone, because the servers listen on no other. ``at_most`` of them.
    """
    is_first = world_rank() == 0 or int(os.environ.get("LOCAL_RANK", "1")) == 0
    places = gather_objects((is_first, socket.gethostname()))
    here = places[0][1]
    ranks = [rank for rank, (first, host) in enumerate(places) if first and (host == here or not on_this_machine)]
    return ranks[:at_most]


def as_fault(error: BaseException | None) -> Exception | None:
    """Return ``error`` as all ranks raise it: a fault or a wrong input as it is, anything else as a `RolloutError`."""
    if error is None or isinstance(error, RolloutError | InputError):
        return error
    fault = RolloutError(f"rollout servers: {type(error).__name__}: {' '.join(str(error).split())}")
    fault.__cause__ = error
    return fault


class MainRank:
    """The same object on every rank. ``works``: whether coroutines run on this rank, as they always do on rank 0."""

    def __init__(self, works: bool = False) -> None:
        self.is_this = world_rank() == 0
        self.works = works or self.is_this
        self._loop: asyncio.AbstractEventLoop | None = None
        if self.works:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="rollout servers", daemon=True)
            self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Begin ``work``, on a rank that works."""
        assert self._loop is not None, "only some ranks work, and only until close"
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, action: Callable[[], Any]) -> None:
        """Have ``action`` done in the event loop, after what is at hand."""
        assert self._loop is not None, "only some ranks work, and only until close"
        self._loop.call_soon_threadsafe(action)

    def wait(self, future: concurrent.futures.Future | None) -> Any:
        """Rank 0's result, or its error, on every rank. ``future``: None on the other ranks."""
        while True:
            done = future is not None and bool(concurrent.futures.wait([future], HEARTBEAT_S).done)
            if self.share(lambda done=done: done):
                return self.share(lambda: future.result())

    def share(self, action: Callable[[], T]) -> T:
        """What ``action`` returns or raises on rank 0, on every rank."""
        outcome: list[Any] = [None, None]
        if self.is_this:
            try:
                outcome[0] = action()
            except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks are waiting
                outcome[1] = as_fault(error)
        result, error = broadcast_object(outcome)
        if error is not None:
            raise error
        return result

    def close(self, last: Coroutine[Any, Any, None] | None = None) -> None:
        """Cancel what still runs, then run ``last``, then end the thread. Safe to call twice."""
        if self._loop is None:
            if last is not None:
                last.close()
            return

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            if last is not None:
                await last

        loop, self._loop = self._loop, None
        asyncio.run_coroutine_threadsafe(end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join()
        loop.close()


LAUNCH_CHECK_S = 1.0  # between looks whether a launched server has ended


@dataclass(frozen=True)
class Started:
    """What rank 0 tells the others when there are servers. The token stays in memory."""

    precision: dict[str, str]
    token: str
    board: str  # prefix of the texts in the store


class RunServers:
    """The same object on every rank. On rank 0 `start`, then on all others `follow`, then on rank 0 `publish`.

    ``agreed``: the settings that every server must share (`agreed_settings`). ``main``: runs the event loop on ranks
    that ask. See `generator.ServerGenerator` for ``run_dir``, ``say`` and ``stop``.
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
        self.fetchers = fetching_ranks(bool(config.servers.launch), at_most=config.max_num_seqs)
        self.main = MainRank(works=world_rank() in self.fetchers)
        self.pool: ServerPool | None = None  # rank 0's
        self.members: Members | None = None  # of ranks that fetch: the servers as they know them
        self.turn: asyncio.Lock  # of those ranks, first come, first served: batches and weights keep their order
        self._publisher: Publisher | None = None  # rank 0's, where others follow it
        self._local: LocalServers | None = None
        self._has_started = False
        self._relaunches = False  # at the start, a server that ends is an error

    def token(self) -> str:
        """Return the environment's token, or a new one for servers of our own."""
        return (read_token() or secrets.token_hex(32)) if self._config.servers.launch else require_token()

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
        """Let the other ranks that fetch see the servers as rank 0."""
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
        """Publish once all followers are there."""
        if self._publisher is not None:
            self.main.submit(self._publisher.start()).result()

    async def _find(self, token: str) -> None:
        servers = self._config.servers
        self.turn = asyncio.Lock()
        self._described: dict[str, dict[str, str]] = {}

        def problems(settings: ServerSettings) -> list[str]:
            if self._local is not None:
                self._local.came_up(settings.name)
            differing = differences(self._agreed, settings.agreed)
            if self._described and self._has_started:
                differing += differences(next(iter(self._described.values())), settings.precision, "other servers have")
            if not differing:
                self._described[settings.name] = settings.precision
            return differing

        self.pool = ServerPool(
            PoolLimits(servers.wait_s, servers.health_every_s),
            discover=self._discover,
            connect=partial(self._client, token),
            problems=problems,
            say=self._say,
            stop=self._stop,
        )
        await self.pool.start(servers.num_expected)
        self._has_started, self._relaunches = True, self._local is not None

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
        """On rank 0, for `megatron-rl run servers`. A full disk costs the table, not the run."""
        if self.pool is not None:
            with contextlib.suppress(OSError):
                write_table(self._run_dir, table(self.pool, ended))

    async def _end(self) -> None:
        self._tell_of_servers(ended=True)
        if self._publisher is not None:
            await self._publisher.close()
        if self.members is not None:
            await self.members.close()
