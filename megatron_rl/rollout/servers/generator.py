"""`Generator` on vLLM servers: the loop's side of `pool` and `dispatch`.

Rank 0 talks to the servers, from an event loop in a thread of its own, and hands results to the other ranks. Work is
done strictly in the order in which it was requested: a batch, the weights that follow it, the next batch. So a batch is
sampled from exactly one policy, whatever the timing. `begin` returns at once, so that the learner
can work while servers sample; `rollout` is `begin` and `finish`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from megatron_rl.checkpoint.architecture import read_architecture
from megatron_rl.checkpoint.hf_folder import HFFolder, resolve_stop_token_ids
from megatron_rl.config.precision import PrecisionConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.errors import InputError
from megatron_rl.rollout.calls import check_lengths, check_version, throughput
from megatron_rl.rollout.generator import RolloutError, Sampling
from megatron_rl.rollout.payload import SealedRoutes, make_rollout
from megatron_rl.rollout.requests import Request, make_groups, make_requests
from megatron_rl.rollout.servers.client import ServerClient, Weights, request_body
from megatron_rl.rollout.servers.dispatch import Dispatch
from megatron_rl.rollout.servers.local import LocalServers
from megatron_rl.rollout.servers.main_rank import MainRank
from megatron_rl.rollout.servers.pool import PoolLimits, ServerPool
from megatron_rl.rollout.servers.rendezvous import Address, discover, read_token, require_token
from megatron_rl.rollout.servers.settings import agreed_settings, differences
from megatron_rl.rollout.servers.weight_files import WeightFolder
from megatron_rl.rollout.servers.wire import Answer
from megatron_rl.rollout.weight_check import checked
from megatron_rl.types import Group, Prompt, Rollout

LAUNCH_CHECK_S = 1.0  # between looks whether a launched server has ended


@dataclass
class Ticket:
    """A requested batch. ``answers``: what `_sample` returns, on rank 0."""

    prompts: list[Prompt]
    num_samples: int
    requests: list[Request]
    policy_version: int
    answers: concurrent.futures.Future | None
    records: bool  # with routes


class ServerGenerator:
    """Starts (or finds) the servers of a run; see `Generator` for the methods, and `VllmGenerator` for the arguments.

    ``run_dir``: where servers publish their addresses. ``recipe_file``: the resolved recipe, for servers to launch.
    ``stop``: whether this rank was asked to stop, which ends waiting for servers (`RolloutInterrupted`).
    Raises `InputError` where a server does not fit the recipe, `RolloutError` where too few are there in time.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model_path: Path,
        *,
        max_prompt_length: int,
        run_dir: Path,
        recipe_file: Path | None = None,
        record_routes: bool = False,
        decode: Callable[[list[int]], str] | None = None,
        precision: PrecisionConfig | None = None,
        say: Callable[[str], None] = print,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._config, self._decode, self._run_dir, self._say, self._stop = config, decode, run_dir, say, stop
        self._architecture = read_architecture(model_path)
        self._max_prompt_length, self._record_routes = max_prompt_length, record_routes
        self._sampling = Sampling.from_config(config)
        self._stop_token_ids = resolve_stop_token_ids(config.stop_token_ids, model_path)
        self._shapes = HFFolder(model_path).shapes()
        self._agreed = agreed_settings(
            config,
            model_path,
            max_prompt_length,
            record_routes=record_routes,
            precision=precision or PrecisionConfig(),
        )
        self._policy_version, self._stats = 0, {}
        self._pushed: dict[str, float] = {}  # how long the last push took
        self._pool: ServerPool | None = None
        self._folder: WeightFolder | None = None
        self._local: LocalServers | None = None
        self._relaunches = False  # at the start, a server that ends is an error
        self._main = MainRank()
        start = time.perf_counter()
        try:
            self._precision = self._main.share(partial(self._start, recipe_file))
        except BaseException:
            self.close()
            raise
        self.start_s = time.perf_counter() - start

    # ---------------------------------------------------------------- generation

    def rollout(
        self,
        prompts: list[Prompt],
        num_samples: int,
        *,
        policy_version: int,
        step: int,
        sampling: Sampling | None = None,
    ) -> list[Group]:
        ticket = self.begin(prompts, num_samples, policy_version=policy_version, step=step, sampling=sampling)
        return self.finish(ticket)

    def begin(
        self,
        prompts: list[Prompt],
        num_samples: int,
        *,
        policy_version: int,
        step: int,
        sampling: Sampling | None = None,
    ) -> Ticket:
        """As `rollout`, but returns at once; the batch is `finish`'s. Weights of later refits are not used for it."""
        sampling = sampling or self._sampling
        check_version("the servers hold", self._policy_version, policy_version)
        check_lengths(prompts, sampling, self._max_prompt_length, self._config.max_response_length)
        requests = make_requests(prompts, num_samples, seed=self._config.seed, step=step)
        answers = None
        if self._main.is_this:
            bodies = [request_body(request, sampling, self._stop_token_ids) for request in requests]
            names = [f"prompt {request.prompt.id!r}, sample {request.sample}" for request in requests]
            answers = self._main.submit(self._sample(bodies, names, policy_version))
        records = self._record_routes and sampling.wants_routes
        return Ticket(prompts, num_samples, requests, policy_version, answers, records)

    def finish(self, ticket: Ticket) -> list[Group]:
        """Wait for a batch that was begun. Every rank calls it, in the order of `begin`."""
        answers, seconds, stats = self._main.wait(ticket.answers)
        rollouts = [self._to_rollout(r, a, ticket.records) for r, a in zip(ticket.requests, answers, strict=True)]
        self._stats |= throughput(rollouts, seconds) | stats
        return make_groups(ticket.prompts, ticket.num_samples, rollouts)

    async def _sample(
        self, bodies: list[dict[str, Any]], names: list[str], version: int
    ) -> tuple[list[Answer], float, dict[str, float]]:
        """Answers, the seconds that servers worked on them (without the wait for their turn), and stats."""
        async with self._turn:
            assert self._pool.weights.version == version
            start = time.perf_counter()
            dispatch = Dispatch(self._pool, bodies, names, self._concurrency, self._config.servers.retries)
            answers = await dispatch.run()
            stats = {"rollout/requeued": dispatch.num_requeued, "rollout/servers": len(self._pool.ready)} | self._pushed
            return answers, time.perf_counter() - start, {name: float(value) for name, value in stats.items()}

    @property
    def _concurrency(self) -> int:
        return self._config.servers.concurrency or self._config.max_num_seqs

    def _to_rollout(self, request: Request, answer: Answer, records: bool) -> Rollout:
        """Raises `RolloutError` where routes are due (``records``) and absent."""
        routes = None if answer.routes is None else SealedRoutes(answer.routes, answer.route_checksums)
        return make_rollout(
            request,
            answer.tokens,
            answer.logprobs,
            answer.finish_reason,
            answer.versions,
            routes=routes,
            architecture=self._architecture if records else None,
            text=self._decode(answer.tokens.tolist()) if self._decode else "",
        )

    # ---------------------------------------------------------------- weights

    def refit(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """The servers take the weights after all batches that are begun and not finished, or at once."""
        start = time.perf_counter()
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
        pushed = self._main.submit(self._push(written)) if self._main.is_this else None
        self._policy_version = policy_version
        if not self._config.max_staleness:
            self._main.wait(pushed)
        self._stats["perf/refit_engine_s"] = time.perf_counter() - start

    async def _push(self, weights: Weights) -> None:
        async with self._turn:
            start = time.perf_counter()
            await self._pool.push(weights)
            self._pushed = {"perf/push_s": time.perf_counter() - start}
            self._folder.remove_before(weights)

    # ---------------------------------------------------------------- life

    def describe_precision(self) -> dict[str, str]:
        """Aspect → what the servers do: the rollout column of the precision contract."""
        return dict(self._precision)

    def sleep(self) -> None:
        """Servers have devices of their own."""

    def wake(self) -> None:
        """See `sleep`."""

    def stats(self) -> dict[str, float]:
        return dict(self._stats)

    def close(self) -> None:
        self._main.close(self._pool.close() if self._pool is not None else None)
        if self._folder is not None:
            self._folder.close()
        if self._local is not None:
            self._local.close()
            self._local = None

    def _start(self, recipe_file: Path | None) -> dict[str, str]:
        """On rank 0: launch servers where the recipe says so, find them, and learn what they compute."""
        servers = self._config.servers
        token = (read_token(servers) or secrets.token_hex(32)) if servers.launch else require_token(servers)
        self._folder = WeightFolder(servers.weights_dir or self._run_dir / "servers" / "weights", self._run_dir)
        if servers.launch:
            assert recipe_file is not None, "servers are launched from the run's resolved recipe"
            self._local = LocalServers(servers.launch, recipe_file, self._run_dir, token)
        started = self._main.submit(self._find(token))
        while not concurrent.futures.wait([started], LAUNCH_CHECK_S).done:
            if self._local is not None:
                self._local.check()
        started.result()
        described = list(self._described.values())
        if any(one != described[0] for one in described):
            raise InputError(f"the servers do not compute alike: {self._described}")
        return described[0]

    async def _find(self, token: str) -> None:
        servers = self._config.servers
        self._turn = asyncio.Lock()  # first come, first served
        self._described: dict[str, dict[str, str]] = {}

        def problems(settings: dict[str, Any]) -> list[str]:
            if self._local is not None:
                self._local.came_up(settings["name"])
            self._described[settings["name"]] = settings["precision"]
            return differences(self._agreed, settings["agreed"])

        self._pool = ServerPool(
            PoolLimits(servers.wait_s, servers.health_every_s),
            discover=self._discover,
            connect=lambda address: ServerClient(address, token, servers.request_deadline_s),
            problems=problems,
            say=self._say,
            stop=self._stop,
        )
        await self._pool.start(servers.num_expected)
        self._relaunches = self._local is not None

    def _discover(self) -> list[Address]:
        """The servers there are; those of our own that have ended are started again first."""
        if self._relaunches:
            self._local.relaunch(self._say)
        return discover(self._config.servers, self._run_dir)


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure
