"""`Generator` on vLLM servers: one rank of each node sends requests and makes rollouts of the answers.

Each such rank has an event loop in a thread of its own (`run_servers`) and keeps what it fetched until the learner's
replicas take it (`learner.passes`). Prompts are dealt: one rank fetches all samples of a prompt and can send them to
the server that has computed it. All ranks learn every response's length and how it ended. Rank 0 alone looks after the
servers and pushes weights (`weight_updates`). Work is done in the order in which it was requested: a batch, the weights
that follow it, the next batch. A batch is therefore sampled from exactly one policy, whatever the timing. Under the
other modes of `rollout.in_flight` batches and weights go to the servers at once: several policies may sample a
response, none older than the weights that its batch was begun with. `begin` returns at once, so that the learner can
work while servers sample; `rollout` is `begin` and `finish`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from megatron_rl.checkpoint.hf_folder import HFFolder, check_weights, model_shapes, resolve_stop_token_ids
from megatron_rl.config.learner import PrecisionConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.model.architecture import Architecture, read_architecture
from megatron_rl.process.ranks import any_rank, gather_objects, together, world_rank
from megatron_rl.rollout.conversation import Conversation, Talk
from megatron_rl.rollout.generator import (
    LegCounts,
    Listener,
    RolloutError,
    RolloutInterrupted,
    Sampling,
    check_lengths,
    check_token_versions,
    check_version,
    shortest_prompt,
    throughput,
)
from megatron_rl.rollout.requests import (
    Request,
    known_everywhere,
    make_groups,
    make_requests,
    make_rollout,
)
from megatron_rl.rollout.servers.client import request_body
from megatron_rl.rollout.servers.dispatch import Balance, Conversations, Dispatch, Line, TalkLoop
from megatron_rl.rollout.servers.pool import load_metrics
from megatron_rl.rollout.servers.rendezvous import agreed_settings
from megatron_rl.rollout.servers.run_servers import HEARTBEAT_S, RunServers, Started, as_fault
from megatron_rl.rollout.servers.weight_updates import WeightUpdates
from megatron_rl.types import Group, Prompt, Rollout

PREFIX_SLACK = 8  # a queue that is longer by more than an eighth of `max_num_seqs` outweighs a prompt's cache


@dataclass
class Share:
    """What one rank fetched of a batch."""

    rollouts: list[Rollout] = field(default_factory=list)  # in the order of the batch's requests
    seconds: float = 0.0  # that servers worked on them, without the wait for their turn
    stats: dict[str, float] = field(default_factory=dict)  # of the servers, as this rank sees them
    num_requeued: int = 0
    counts: LegCounts = field(default_factory=LegCounts)


@dataclass
class Ticket:
    """A requested batch. ``answers``: this rank's share of it, on ranks that fetch."""

    prompts: list[Prompt]
    num_samples: int
    requests: list[Request]
    owners: list[int]  # of each request, the rank that fetches and keeps the response
    answers: concurrent.futures.Future[Share] | None


def wait_on_all(own: concurrent.futures.Future[Share] | None) -> Share:
    """This rank's share, once every rank has its own. An error of one is raised on all; a fault before a request to
    stop. Collective."""
    while any_rank(own is not None and not concurrent.futures.wait([own], HEARTBEAT_S).done):
        pass
    error = None if own is None else own.exception()
    problems = [problem for problem in gather_objects(as_fault(error)) if problem is not None]
    if problems:
        raise min(problems, key=lambda problem: isinstance(problem, RolloutInterrupted)) from error
    return Share() if own is None else own.result()


class Sampler:
    """Lives in the event loop of a rank that fetches.

    ``architecture``: of the routes that responses bring; None where they bring none. ``decode``: the text of a
    response's tokens. ``servers_now``: metrics of the moment. ``talk``: what holds conversations of several turns, with
    a model of ``vocab_size`` tokens; None: one turn.
    """

    def __init__(
        self,
        config: RolloutConfig,
        servers: RunServers,
        architecture: Architecture | None,
        stop_token_ids: list[int],
        decode: Callable[[list[int]], str] | None,
        servers_now: Callable[[], dict[str, float]],
        talk: Talk | None = None,
        vocab_size: int = 0,
    ) -> None:
        self._config, self._servers, self._architecture = config, servers, architecture
        self._stop_token_ids, self._decode, self._servers_now = stop_token_ids, decode, servers_now
        self._overlaps = config.in_flight.mode != "finish"
        self._talk, self._vocab_size = talk, vocab_size
        self._talk_loop = TalkLoop() if talk is not None else None
        self._line = Line()
        self._converter = concurrent.futures.ThreadPoolExecutor(1, "rollouts")

    async def sample(
        self,
        number: int,
        requests: list[Request],
        sampling: Sampling,
        version: int,
        listener: Listener | None,
        is_awaited: bool,
    ) -> Share:
        """This rank's share of batch ``number``; of the weights of ``version`` alone, or also of later ones."""
        known = requests if self._talk is None else []  # the turns of conversations come one by one
        bodies = [request_body(request, sampling, self._stop_token_ids) for request in known]
        names = [f"prompt {request.prompt.id!r}, sample {request.sample}" for request in requests]
        records, converted, counts = self._architecture is not None and sampling.wants_routes, {}, LegCounts()
        is_exact, servers, members = is_awaited or not self._overlaps, self._servers, self._servers.members
        async with contextlib.nullcontext() if self._overlaps else servers.turn:
            try:
                await members.reach(version, is_exact)
                start = time.perf_counter()
                slack = self._config.max_num_seqs // PREFIX_SLACK
                balance = Balance([r.row for r in known], slack)
                dispatch = Dispatch(
                    members,
                    bodies,
                    names[: len(known)],
                    self._config.max_num_seqs,
                    share=(servers.fetchers.index(world_rank()), len(servers.fetchers)),
                    balance=balance,
                    line=self._line,
                    place=0 if is_awaited else number,
                    is_open=self._talk is not None,
                )
                async with contextlib.aclosing(self._responses(dispatch, requests, sampling)) as responses:
                    async for index, response in responses:  # decoding goes on beside the fetching
                        num_versions = check_token_versions(names[index], response.policy_versions, version, is_exact)
                        legs = response if isinstance(response, Conversation) else dispatch.legs[index]
                        counts += legs.counts(num_versions)
                        converted[index] = asyncio.get_running_loop().run_in_executor(
                            self._converter, self._to_rollout, requests[index], response, records, listener
                        )
            finally:
                members.share_ended(number)
            seconds = time.perf_counter() - start
        rollouts = [await converted[index] for index in sorted(converted)]  # of all, unless it was cancelled
        stats = load_metrics(members)
        return Share(rollouts, seconds, stats | self._servers_now(), dispatch.num_requeued, counts)

    def _responses(
        self, dispatch: Dispatch, requests: list[Request], sampling: Sampling
    ) -> AsyncGenerator[tuple[int, Rollout | Conversation]]:
        """Number and response of each of ``requests`` as they come."""
        if self._talk is None:
            return dispatch.completions()
        assert self._talk_loop is not None
        return Conversations(
            self._talk,
            self._talk_loop.loop,
            dispatch,
            requests,
            sampling,
            self._stop_token_ids,
            self._vocab_size,
            self._config.deadline_s,
        ).completions()

    def _to_rollout(
        self, request: Request, answer: Rollout | Conversation, records: bool, listener: Listener | None
    ) -> Rollout:
        """The response, checked (`make_rollout`), with its text, as ``listener`` is told. Routes are due where
        ``records``."""
        architecture = self._architecture if records else None
        tokens = answer.response if isinstance(answer, Conversation) else answer.tokens.tolist()
        text = self._decode(tokens) if self._decode else ""
        if isinstance(answer, Conversation):
            rollout = answer.to_rollout(request, answer.policy_versions, architecture, text)
        else:
            rollout = make_rollout(
                request,
                answer.tokens,
                answer.inference_logprobs,
                answer.finish_reason,
                answer.policy_versions,
                None if answer.routed_experts is None else (answer.routed_experts, answer.route_checksums),
                architecture,
                text,
                head_tokens=answer.head_tokens,
                head_logprobs=answer.head_logprobs,
            )
        if listener is not None:
            listener(request.prompt, [rollout])
        return rollout

    def close(self) -> None:
        """End the conversion of answers, after the event loop has ended."""
        if self._talk_loop is not None:
            self._talk_loop.close()
        self._converter.shutdown(cancel_futures=True)


class ServerGenerator:
    """Starts (or finds) the servers of a run; see `Generator` for the methods, and `VllmGenerator` for the arguments.

    ``run_dir``: where servers publish their addresses. ``recipe_file``: the resolved recipe, for servers to launch.
    ``stop``: whether this rank was asked to stop, which ends waiting for servers (`RolloutInterrupted`). ``talk``: what
    holds conversations of several turns; None: one turn.
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
        talk: Talk | None = None,
    ) -> None:
        self._config = config
        self._max_prompt_length, self._sampling = max_prompt_length, Sampling.from_config(config)
        self._policy_version, self._num_begun = 0, 0
        self._listener: Listener | None = None
        self._stats: dict[str, float] = {}
        self._overlaps = config.in_flight.mode != "finish"  # batches and weights do not wait for each other
        agreed = agreed_settings(
            config,
            model_path,
            max_prompt_length,
            record_routes=record_routes,
            precision=precision or PrecisionConfig(),
        )
        architecture = read_architecture(model_path)
        self._shortest = shortest_prompt(architecture, bool(config.enforce_eager))
        self._talk = talk = talk and replace(talk, shortest=self._shortest)
        stop_token_ids = resolve_stop_token_ids(config.stop_token_ids, model_path)
        check_weights(HFFolder(model_path), architecture)
        self._servers = RunServers(config, agreed, run_dir, say, stop)
        self._main = self._servers.main
        self._updates = WeightUpdates(config, model_shapes(architecture), self._servers, run_dir, say)
        self._sampler: Sampler | None = None
        if self._main.works:
            recorded = architecture if record_routes else None
            self._sampler = Sampler(
                config,
                self._servers,
                recorded,
                stop_token_ids,
                decode,
                self._servers_now,
                talk,
                architecture.vocab_size,
            )
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
        """Begin to sample. ``is_awaited``: no refit comes before `finish`, so all tokens must be of
        ``policy_version``."""
        sampling = sampling or self._sampling
        check_version("the servers hold", self._policy_version, policy_version)
        most = self._max_prompt_length, self._config.max_response_length
        check_lengths(prompts, sampling, *most, self._shortest)
        requests = make_requests(prompts, num_samples, seed=self._config.seed, step=step)
        ranks = self._servers.fetchers
        owners, answers = [ranks[request.row % len(ranks)] for request in requests], None
        self._num_begun += 1
        if self._sampler is not None:
            own_requests = [request for request, owner in zip(requests, owners, strict=True) if owner == world_rank()]
            answers = self._main.submit(
                self._sampler.sample(
                    self._num_begun, own_requests, sampling, policy_version, self._listener, is_awaited
                )
            )
        return Ticket(prompts, num_samples, requests, owners, answers)

    def finish(self, ticket: Ticket) -> list[Group]:
        """Wait for a batch that was begun. Every rank calls it, in the order of `begin`."""
        share = wait_on_all(ticket.answers)
        rollouts = known_everywhere(ticket.requests, ticket.owners, share.rollouts)
        shares = gather_objects((share.seconds, share.stats, share.num_requeued, share.counts))
        seconds, stats, requeued, counts = zip(*shares, strict=True)
        self._stats |= throughput(rollouts, max(seconds)) | stats[0] | {"rollout/requeued": float(sum(requeued))}
        if self._overlaps:
            self._stats |= sum(counts, LegCounts()).metrics(len(ticket.requests))
        if self._talk is not None:
            self._stats["rollout/turns_mean"] = sum(rollout.num_turns for rollout in rollouts) / len(rollouts)
        return make_groups(ticket.prompts, ticket.num_samples, rollouts)

    def announce_to(self, listener: Listener) -> None:
        """Call ``listener`` with every response that this rank has fetched, from the event loop's thread."""
        self._listener = listener

    def _servers_now(self) -> dict[str, float]:
        """Return how many servers can be used and how long the last push took; on ranks that fetch."""
        if self._servers.members is None:
            return {}
        return {"rollout/servers": float(len(self._servers.members.ready)), **self._updates.last_push}

    # ---------------------------------------------------------------- weights

    def refit(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """Send the weights: servers take them after all batches that are begun, or at once (`WeightUpdates`)."""
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
