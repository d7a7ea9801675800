"""`Generator` on vLLM servers: the loop's side of `run_servers`, `sampling` and `updates`.

One rank of each node talks to the servers, from an event loop in a thread of its own, and keeps what it is answered
(`fetching`). Rank 0 alone looks after the servers and pushes weights. Work is done strictly in the order in which it
was requested: a batch, the weights that follow it, the next batch. So a batch is sampled from exactly one policy,
whatever the timing. Under the other modes of `rollout.in_flight` batches and weights go to the servers at once: several
policies may sample a response, none older than the weights that its batch was begun with. `begin` returns at once, so
that the learner can work while servers sample; `rollout` is `begin` and `finish`.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from megatron_rl.checkpoint.architecture import read_architecture
from megatron_rl.checkpoint.hf_folder import HFFolder, resolve_stop_token_ids
from megatron_rl.config.precision import PrecisionConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.process.ranks import gather_objects, together, world_rank
from megatron_rl.rollout.calls import check_lengths, check_version, throughput
from megatron_rl.rollout.generator import Arrival, LegCounts, RolloutError, Sampling
from megatron_rl.rollout.ownership import known_everywhere
from megatron_rl.rollout.requests import Request, make_groups, make_requests
from megatron_rl.rollout.servers.arrivals import Arrivals, next_arrivals
from megatron_rl.rollout.servers.fetching import Share, owners_by_prompt, wait_on_all
from megatron_rl.rollout.servers.run_servers import RunServers, Started
from megatron_rl.rollout.servers.sampling import Sampler
from megatron_rl.rollout.servers.settings import agreed_settings
from megatron_rl.rollout.servers.updates import WeightUpdates
from megatron_rl.types import Group, Prompt


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
        self._config = config
        self._max_prompt_length, self._sampling = max_prompt_length, Sampling.from_config(config)
        self._policy_version, self._num_begun = 0, 0
        self._stats: dict[str, float] = {}
        self._overlaps = config.in_flight.mode != "finish"  # batches and weights do not wait for each other
        self._news = threading.Condition()  # a group is complete, or a batch has ended
        agreed = agreed_settings(
            config,
            model_path,
            max_prompt_length,
            record_routes=record_routes,
            precision=precision or PrecisionConfig(),
        )
        architecture = read_architecture(model_path) if record_routes else None
        stop_token_ids = resolve_stop_token_ids(config.stop_token_ids, model_path)
        shapes = HFFolder(model_path).shapes()
        self._servers = RunServers(config, agreed, run_dir, say, stop)
        self._main = self._servers.main
        self._updates = WeightUpdates(config, shapes, self._servers, run_dir, say)
        self._sampler: Sampler | None = None
        if self._main.works:
            self._sampler = Sampler(config, self._servers, architecture, stop_token_ids, decode, self._servers_now)
        start = time.perf_counter()
        try:
            started = self._main.share(partial(self._start, recipe_file))
            self._precision = started.precision
            together("rollout servers", partial(self._servers.follow, started), fault=RolloutError)
            self._main.share(self._servers.publish)
        except BaseException:
            self.close()
            raise
        self.start_s = time.perf_counter() - start

    def _start(self, recipe_file: Path | None) -> Started:
        """On rank 0."""
        token = self._servers.token()
        self._updates.open_folder()
        started = self._servers.start(token, recipe_file)
        self._updates.use_pool()
        return started

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
        owners, answers, arrivals = owners_by_prompt(requests, self._servers.fetchers), None, None
        self._num_begun += 1
        if self._sampler is not None:
            mine = [request for request, owner in zip(requests, owners, strict=True) if owner == world_rank()]
            arrivals = Arrivals(mine, self._news)
            answers = self._main.submit(
                self._sampler.sample(self._num_begun, mine, sampling, policy_version, arrivals, is_awaited)
            )
            answers.add_done_callback(self._notify)
        return Ticket(prompts, num_samples, requests, owners, policy_version, answers, arrivals, len(prompts))

    def finish(self, ticket: Ticket) -> list[Group]:
        """Wait for a batch that was begun. Every rank calls it, in the order of `begin`."""
        share = wait_on_all(ticket.answers, self._updates.broadcaster.may_fill, self._updates.broadcaster.fill)
        rollouts = known_everywhere(ticket.requests, ticket.owners, share.rollouts)
        shares = gather_objects((share.seconds, share.stats, share.num_requeued, share.counts))
        seconds, stats, requeued, counts = zip(*shares, strict=True)
        self._stats |= throughput(rollouts, max(seconds)) | stats[0] | {"rollout/requeued": float(sum(requeued))}
        if self._overlaps:
            self._stats |= sum(counts, LegCounts()).metrics(len(ticket.requests))
        return make_groups(ticket.prompts, ticket.num_samples, rollouts)

    def completed(self, tickets: list[Ticket]) -> list[Arrival]:
        """Complete groups of ``tickets`` that this has not returned yet, in the order of their completion.

        Waits until there is one; empty where all were returned. Every rank calls it.
        """
        waiting = [ticket for ticket in tickets if ticket.num_left]
        fill = (self._updates.broadcaster.may_fill, self._updates.broadcaster.fill)
        found = next_arrivals(waiting, self._news, len(self._servers.fetchers), *fill) if waiting else []
        for arrival in found:
            arrival.ticket.num_left -= 1
        if not self._overlaps:
            found = [replace(arrival, counts=None) for arrival in found]
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

    def _servers_now(self) -> dict[str, float]:
        """Of ranks that fetch: how many servers can be used, and how long the last push took."""
        if self._servers.members is None:
            return {}
        return {"rollout/servers": float(len(self._servers.members.ready)), **self._updates.last_push}

    # ---------------------------------------------------------------- weights

    def refit(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """The servers take the weights after all batches that are begun and not finished, or at once (`updates`)."""
        start = time.perf_counter()
        if self._updates.send(weights, policy_version, self._num_begun):
            self._policy_version = policy_version
            self._stats["perf/refit_engine_s"] = time.perf_counter() - start

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
        self._updates.close()
        self._servers.close()
        if self._sampler is not None:
            self._sampler.close()
        self._updates.remove_files()
        self._servers.end_launched()
