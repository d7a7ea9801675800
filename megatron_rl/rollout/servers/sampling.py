"""One rank's share of a batch: asks the servers, follows the answers, and makes rollouts of them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import Callable
from functools import partial

from megatron_rl.checkpoint.architecture import Architecture
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.process.ranks import world_rank
from megatron_rl.rollout.calls import check_token_versions
from megatron_rl.rollout.generator import LegCounts, Sampling
from megatron_rl.rollout.payload import SealedRoutes, make_rollout
from megatron_rl.rollout.requests import Request
from megatron_rl.rollout.servers.arrivals import Arrivals
from megatron_rl.rollout.servers.balance import Balance
from megatron_rl.rollout.servers.client import request_body
from megatron_rl.rollout.servers.dispatch import Dispatch, Line
from megatron_rl.rollout.servers.fetching import Share
from megatron_rl.rollout.servers.run_servers import RunServers
from megatron_rl.rollout.servers.table import load_metrics, prompt_tokens
from megatron_rl.rollout.servers.wire import Answer
from megatron_rl.types import Rollout

PREFIX_SLACK = 8  # a queue that is longer by more than an eighth of `concurrency` outweighs a prompt's cache


class Sampler:
    """Lives in the event loop of a rank that fetches.

    ``architecture``: of the routes that responses bring; None where they bring none. ``decode``: the text of a
    response's tokens. ``servers_now``: metrics of the moment.
    """

    def __init__(
        self,
        config: RolloutConfig,
        servers: RunServers,
        architecture: Architecture | None,
        stop_token_ids: list[int],
        decode: Callable[[list[int]], str] | None,
        servers_now: Callable[[], dict[str, float]],
    ) -> None:
        self._config, self._servers, self._architecture = config, servers, architecture
        self._stop_token_ids, self._decode, self._servers_now = stop_token_ids, decode, servers_now
        self._overlaps = config.in_flight.mode != "finish"
        self._line = Line()
        self._converter = concurrent.futures.ThreadPoolExecutor(1, "rollouts")

    async def sample(
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
        records, converted, counts = self._architecture is not None and sampling.wants_routes, {}, LegCounts()
        is_exact, servers, members = is_awaited or not self._overlaps, self._servers, self._servers.members
        async with contextlib.nullcontext() if self._overlaps else servers.turn:
            try:
                await members.reach(version, is_exact)
                start = time.perf_counter()
                slack = servers.concurrency // PREFIX_SLACK if self._config.enable_prefix_caching else 0
                balance = Balance([r.row for r in requests], slack)
                before = prompt_tokens(members.members.values())
                dispatch = Dispatch(
                    members,
                    bodies,
                    names,
                    servers.concurrency,
                    self._config.servers.retries,
                    share=(servers.fetchers.index(world_rank()), len(servers.fetchers)),
                    balance=balance,
                    line=self._line,
                    place=0 if is_awaited else number,
                )
                arrivals.asks(dispatch)
                async with contextlib.aclosing(dispatch.completions()) as completions:
                    async for index, answer in completions:  # decoding goes on beside the fetching
                        num_versions = check_token_versions(names[index], answer.versions, version, is_exact)
                        own = dispatch.legs[index].counts(num_versions)
                        counts += own
                        converted[index] = asyncio.get_running_loop().run_in_executor(
                            self._converter, self._to_rollout, requests[index], answer, records
                        )
                        converted[index].add_done_callback(partial(arrivals.fetched, requests[index].row, own))
            finally:
                members.share_ended(number)
            seconds = time.perf_counter() - start
        rollouts = [await converted[index] for index in sorted(converted)]  # of all, unless it was cancelled
        stats = load_metrics(members, before, balance.num_at_home / max(1, len(requests)))
        return Share(rollouts, seconds, stats | self._servers_now(), dispatch.num_requeued, counts)

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

    def close(self) -> None:
        """End the conversion of answers, after the event loop has ended."""
        self._converter.shutdown(cancel_futures=True)
