"""`Generator` on vLLM servers: the loop's side of `pool` and `dispatch`.

One rank of each node talks to the servers, from an event loop in a thread of its own, and keeps what it is answered
(`fetching`). Rank 0 alone looks after the servers and pushes weights. Work is done strictly in the order in which it
was requested: a batch, the weights that follow it, the next batch. So a batch is sampled from exactly one policy,
whatever the timing. Under the other modes of `rollout.in_flight` batches and weights go to the servers at once: several
policies may sample a response, none older than the weights that its batch was begun with. `begin` returns at once, so
that the learner can work while servers sample; `rollout` is `begin` and `finish`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import secrets
import threading
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
from megatron_rl.process.ranks import gather_objects, together, world_rank
from megatron_rl.rollout.calls import check_lengths, check_token_versions, check_version, throughput
from megatron_rl.rollout.generator import Arrival, RolloutError, Sampling
from megatron_rl.rollout.ownership import known_everywhere
from megatron_rl.rollout.payload import SealedRoutes, make_rollout
from megatron_rl.rollout.requests import Request, make_groups, make_requests
from megatron_rl.rollout.servers.arrivals import Arrivals, next_arrivals
from megatron_rl.rollout.servers.balance import Balance
from megatron_rl.rollout.servers.broadcaster import Broadcaster
from megatron_rl.rollout.servers.client import ServerClient, Weights, request_body
from megatron_rl.rollout.servers.dispatch import Dispatch, Line
from megatron_rl.rollout.servers.fetching import Share, fetching_ranks, owners_by_prompt, wait_on_all
from megatron_rl.rollout.servers.following import Follower, Publisher, StoreBoard
from megatron_rl.rollout.servers.local import LocalServers
from megatron_rl.rollout.servers.main_rank import MainRank
from megatron_rl.rollout.servers.members import Members, PoolLimits
from megatron_rl.rollout.servers.pool import ServerPool
from megatron_rl.rollout.servers.rendezvous import Address, discover, read_token, require_token
from megatron_rl.rollout.servers.settings import agreed_settings, differences
from megatron_rl.rollout.servers.table import load_metrics, prompt_tokens, table, write_table
from megatron_rl.rollout.servers.weight_files import WeightFolder
from megatron_rl.rollout.servers.wire import Answer
from megatron_rl.rollout.weight_check import checked
from megatron_rl.types import Group, Prompt, Rollout

PREFIX_SLACK = 8  # a queue that is longer by more than an eighth of `concurrency` outweighs a prompt's cache
SUMMED = ("rollout/requeued", "rollout/recomputed_tokens", "legs", "versions")  # over ranks that fetch
LAUNCH_CHECK_S = 1.0  # between looks whether a launched server has ended


@dataclass(frozen=True)
class Started:
    """What rank 0 tells the others when there are servers. The token stays in memory."""

    precision: dict[str, str]
    token: str
    board: str  # prefix of the texts in the store


@dataclass
class Ticket:
    """A requested batch. ``answers``: this rank's share of it, on ranks that fetch."""

    prompts: list[Prompt]
    num_samples: int
    requests: list[Request]
    owners: list[int]  # of each request, the rank that fetches and keeps the response
    policy_version: int
    answers: concurrent.futures.Future[Share] | None
    arrivals: Arrivals | None  # group by group, on ranks that fetch
    num_left: int  # groups that `completed` has not returned


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
        self._overlaps = config.in_flight.mode != "finish"  # batches and weights do not wait for each other
        self._line = Line()
        self._pushed: dict[str, float] = {}  # how long the last push took
        self._pool: ServerPool | None = None  # rank 0's
        self._publisher: Publisher | None = None  # rank 0's, where others follow it
        self._members: Members | None = None  # of ranks that fetch: the servers as they know them
        self._folder: WeightFolder | None = None
        self._local: LocalServers | None = None
        self._relaunches = False  # at the start, a server that ends is an error
        self._num_begun, self._sent_version = 0, -1  # batches; weights
        self._fetchers = fetching_ranks(bool(config.servers.launch), at_most=self._concurrency)
        self._news = threading.Condition()  # a group is complete, or a batch has ended
        self._main = MainRank(works=world_rank() in self._fetchers)
        self._broadcaster = Broadcaster(
            self._main, partial(checked, shapes=self._shapes), config.servers.weights_stall_s, _refused(config)
        )
        self._converter = concurrent.futures.ThreadPoolExecutor(1, "rollouts") if self._main.works else None
        start = time.perf_counter()
        try:
            started = self._main.share(partial(self._start, recipe_file))
            self._precision = started.precision
            together("rollout servers", partial(self._follow, started), fault=RolloutError)
            self._main.share(self._publish)
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
        ticket = self._begin(prompts, num_samples, policy_version, step, sampling, is_awaited=True)
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
        """As `rollout`, but returns at once; the batch is `finish`'s.

        Under `in_flight.mode: finish` weights of later refits are not used for it; else they may sample its tokens.
        """
        return self._begin(prompts, num_samples, policy_version, step, sampling, is_awaited=False)

    def _begin(
        self,
        prompts: list[Prompt],
        num_samples: int,
        policy_version: int,
        step: int,
        sampling: Sampling | None,
        is_awaited: bool,
    ) -> Ticket:
        """``is_awaited``: no refit comes before `finish`, so all tokens must be of ``policy_version``."""
        sampling = sampling or self._sampling
        check_version("the servers hold", self._policy_version, policy_version)
        check_lengths(prompts, sampling, self._max_prompt_length, self._config.max_response_length)
        requests = make_requests(prompts, num_samples, seed=self._config.seed, step=step)
        owners, answers, arrivals = owners_by_prompt(requests, self._fetchers), None, None
        self._num_begun += 1
        if self._main.works:
            mine = [request for request, owner in zip(requests, owners, strict=True) if owner == world_rank()]
            arrivals = Arrivals(mine, self._news)
            answers = self._main.submit(
                self._sample(self._num_begun, mine, sampling, policy_version, arrivals, is_awaited)
            )
            answers.add_done_callback(self._notify)
        return Ticket(prompts, num_samples, requests, owners, policy_version, answers, arrivals, len(prompts))

    def finish(self, ticket: Ticket) -> list[Group]:
        """Wait for a batch that was begun. Every rank calls it, in the order of `begin`."""
        share = wait_on_all(ticket.answers, self._broadcaster.may_fill, self._broadcaster.fill)
        rollouts = known_everywhere(ticket.requests, ticket.owners, share.rollouts)
        shares = gather_objects((share.seconds, share.stats))
        of_servers = {name: value for name, value in shares[0][1].items() if name not in SUMMED}
        self._stats |= throughput(rollouts, max(seconds for seconds, _ in shares)) | of_servers
        sums = {name: sum(stats.get(name, 0.0) for _, stats in shares) for name in SUMMED}
        self._stats["rollout/requeued"] = sums["rollout/requeued"]
        if self._overlaps:
            self._stats |= {
                "rollout/recomputed_tokens": sums["rollout/recomputed_tokens"],
                "rollout/legs_mean": sums["legs"] / len(ticket.requests),
                "rollout/versions_mean": sums["versions"] / len(ticket.requests),
            }
        return make_groups(ticket.prompts, ticket.num_samples, rollouts)

    def completed(self, tickets: list[Ticket]) -> list[Arrival]:
        """Complete groups of ``tickets`` that this has not returned yet, in the order of their completion.

        Waits until there is one; empty where all were returned. Every rank calls it.
        """
        waiting = [ticket for ticket in tickets if ticket.num_left]
        fill = (self._broadcaster.may_fill, self._broadcaster.fill)
        found = next_arrivals(waiting, self._news, len(self._fetchers), *fill) if waiting else []
        for arrival in found:
            arrival.ticket.num_left -= 1
        self._stats.pop("perf/tokens_per_s/rollout", None)  # of a batch that was waited for as a whole
        self._stats |= self._servers_now()
        requeued = sum(ticket.arrivals.num_requeued for ticket in waiting if ticket.arrivals is not None)
        self._stats["rollout/requeued"] = float(sum(gather_objects(requeued)))
        return found

    def cancel(self, ticket: Ticket) -> int:
        """End the responses of ``ticket`` that are under way: connections are closed, and servers drop the requests.

        Returns the tokens of complete responses that `completed` has not returned; of unfinished ones the number is not
        known. Every rank calls it.
        """
        ticket.num_left, tokens = 0, 0
        if ticket.arrivals is not None:
            self._main.submit(ticket.arrivals.cancel()).result()
            tokens = ticket.arrivals.num_tokens_left
        return sum(gather_objects(tokens))

    def _notify(self, _: concurrent.futures.Future) -> None:
        with self._news:
            self._news.notify_all()

    async def _sample(
        self,
        number: int,
        requests: list[Request],
        sampling: Sampling,
        version: int,
        arrivals: Arrivals,
        is_awaited: bool,
    ) -> Share:
        """This rank's share of batch ``number``; of the weights of ``version`` alone, or also of later ones."""
        bodies = [request_body(request, sampling, self._stop_token_ids) for request in requests]
        names = [f"prompt {request.prompt.id!r}, sample {request.sample}" for request in requests]
        records, converted, num_versions = self._record_routes and sampling.wants_routes, {}, 0
        is_exact = is_awaited or not self._overlaps
        async with contextlib.nullcontext() if self._overlaps else self._turn:
            try:
                await self._members.reach(version, is_exact)
                start = time.perf_counter()
                slack = self._concurrency // PREFIX_SLACK if self._config.enable_prefix_caching else 0
                balance = Balance([r.row for r in requests], slack)
                before = prompt_tokens(self._members.members.values())
                dispatch = Dispatch(
                    self._members,
                    bodies,
                    names,
                    self._concurrency,
                    self._config.servers.retries,
                    share=(self._fetchers.index(world_rank()), len(self._fetchers)),
                    balance=balance,
                    line=self._line,
                    place=0 if is_awaited else number,
                )
                arrivals.asks(dispatch)
                async with contextlib.aclosing(dispatch.completions()) as completions:
                    async for index, answer in completions:  # decoding goes on beside the fetching
                        num_versions += check_token_versions(names[index], answer.versions, version, is_exact)
                        converted[index] = asyncio.get_running_loop().run_in_executor(
                            self._converter, self._to_rollout, requests[index], answer, records
                        )
                        converted[index].add_done_callback(partial(arrivals.fetched, requests[index].row))
            finally:
                self._members.share_ended(number)
            seconds = time.perf_counter() - start
        rollouts = [await converted[index] for index in sorted(converted)]  # of all, unless it was cancelled
        stats = load_metrics(self._members, before, balance.num_at_home / max(1, len(requests)))
        counts = {
            "rollout/requeued": dispatch.num_requeued,
            "rollout/recomputed_tokens": sum(legs.num_recomputed for legs in dispatch.legs),
            "legs": sum(len(legs.answers) for legs in dispatch.legs),
            "versions": num_versions,
        }
        stats |= {name: float(count) for name, count in counts.items()} | self._servers_now()
        return Share(rollouts, seconds, stats)

    def _servers_now(self) -> dict[str, float]:
        """Of ranks that fetch: how many servers can be used, and how long the last push took."""
        if self._members is None:
            return {}
        return {"rollout/servers": float(len(self._members.ready)), **self._pushed}

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
        """The servers take the weights after all batches that are begun and not finished, or at once.

        Where batches and weights overlap, weights that the servers hold already, after an update of the learner that
        was skipped, are not sent again: responses would be cut for them.
        """
        if self._overlaps and policy_version == self._sent_version:
            for _ in checked(weights, self._shapes):
                pass
            return
        start = time.perf_counter()
        if self._broadcaster.refused or not self._broadcast(weights, policy_version):
            self._refit_by_files(weights, policy_version)
        self._policy_version = self._sent_version = policy_version
        self._stats["perf/refit_engine_s"] = time.perf_counter() - start

    def _broadcast(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> bool:
        """Sends while the learner has them, so it waits for the servers' turn first. False: files are needed."""
        self._main.wait(self._main.submit(self._take_turn(self._num_begun)) if self._main.is_this else None)
        start = time.perf_counter()
        try:
            is_done = self._broadcaster.push(weights, policy_version)
        finally:
            self._main.share(self._end_turn)
        self._pushed = {"perf/push_s": time.perf_counter() - start}
        self._say_files()
        return is_done

    def _refit_by_files(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
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
        pushed = self._main.submit(self._push(written, self._num_begun)) if self._main.is_this else None
        if not self._config.max_staleness:
            self._main.wait(pushed)

    def _say_files(self) -> None:
        if self._main.is_this and self._config.servers.weights == "broadcast" and self._broadcaster.refused:
            self._say(f"weights go to the servers through files in {self._folder.root}: {self._broadcaster.refused}")

    async def _take_turn(self, num_begun: int) -> None:
        """From now on until `_end_turn` nothing else is done: see `_push`."""
        await self._turn.acquire()
        try:
            await self._batches_ended(num_begun)
        except BaseException:
            self._turn.release()
            raise

    def _end_turn(self) -> None:
        self._main.call(self._turn.release)

    async def _batches_ended(self, num_begun: int) -> None:
        if self._publisher is not None and not self._overlaps:
            await self._publisher.all_ended(num_begun)

    async def _push(self, weights: Weights, num_begun: int) -> None:
        """At once, or when all batches up to ``num_begun`` are sampled, on this rank and on those that follow."""
        async with self._turn:
            await self._batches_ended(num_begun)
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
        self._broadcaster.close()
        self._main.close(self._end() if self._main.works else None)
        if self._converter is not None:
            self._converter.shutdown(cancel_futures=True)
        if self._folder is not None:
            self._folder.close()
        if self._local is not None:
            self._local.close()
            self._local = None

    def _tell_of_servers(self, ended: bool = False) -> None:
        """On rank 0, for `megatron-rl servers`. A full disk costs the table, not the run."""
        if self._pool is not None:
            with contextlib.suppress(OSError):
                write_table(self._run_dir, table(self._pool, self._pool.refused, ended))

    async def _end(self) -> None:
        self._tell_of_servers(ended=True)
        if self._publisher is not None:
            await self._publisher.close()
        if self._members is not None:
            await self._members.close()

    def _start(self, recipe_file: Path | None) -> Started:
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
        self._broadcaster.use(self._pool)
        self._say_files()
        described = list(self._described.values())
        if any(one != described[0] for one in described):
            raise InputError(f"the servers do not compute alike: {self._described}")
        self._members, prefix = self._pool, f"servers {secrets.token_hex(8)}"
        if len(self._fetchers) > 1:
            board, followers = StoreBoard(prefix), [rank for rank in self._fetchers if rank]
            self._publisher = Publisher(self._pool, board, followers, self._stop)
        return Started(described[0], token, prefix)

    def _follow(self, started: Started) -> None:
        """On the other ranks that fetch: see the servers as rank 0 does."""
        if not self._main.works or self._main.is_this:
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
            self._turn = asyncio.Lock()
            follower.start()
            return follower

        self._members = self._main.submit(follow()).result()

    def _publish(self) -> None:
        """On rank 0, when all followers are there."""
        if self._publisher is not None:
            self._main.submit(self._publisher.start()).result()

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
            connect=partial(self._client, token),
            problems=problems,
            say=self._say,
            stop=self._stop,
        )
        await self._pool.start(servers.num_expected)
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


def _refused(config: RolloutConfig) -> str:
    """Why weights go through files from the start; "" where they are broadcast."""
    if config.servers.weights == "files":
        return "rollout.servers.weights: files"
    if config.max_staleness > 1 and config.in_flight.mode == "finish":
        return (
            f"rollout.max_staleness {config.max_staleness} under rollout.in_flight.mode finish: weights wait behind "
            "batches that the learner does not wait for"
        )
    return ""


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure
