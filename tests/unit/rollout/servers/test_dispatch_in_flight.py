"""Responses that outlive weight updates, as the trainer sees them: real pool and dispatch, made-up servers.

A token's value is the version of the weights that sampled it, and its log-prob the negative of its position.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.rollout import RolloutError
from megatron_rl.rollout.generator import check_token_versions
from megatron_rl.rollout.requests import leg_seed
from megatron_rl.rollout.servers.client import ServerLost, StaleServer, Weights
from megatron_rl.rollout.servers.dispatch import Dispatch, Legs, Line
from megatron_rl.rollout.servers.pool import PoolLimits, ServerPool
from megatron_rl.rollout.servers.rendezvous import Address
from megatron_rl.routing import route_checksums
from megatron_rl.types import Rollout
from tests.support.patience import PATIENCE_S

PROMPT, LENGTH = [7, 7, 7], 12


class Clock:
    """Servers sample one token of each response at every tick."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future] = []

    async def next(self) -> None:
        self._waiting.append(asyncio.get_running_loop().create_future())
        await self._waiting[-1]

    async def tick(self, number: int = 1) -> None:
        for _ in range(number):
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                future.cancelled() or future.set_result(None)
            for _ in range(30):  # until everybody waits for the next one
                await asyncio.sleep(0)

    async def until(self, task: asyncio.Future):
        """Tick until ``task`` is done; its result."""
        while not task.done():
            await self.tick()
            await asyncio.sleep(0.0005)  # for what takes real time: looks at health
        return task.result()


class MadeUpServer:
    """``keeps``: mode keep, else abort_and_resume."""

    def __init__(self, keeps: bool, clock: Clock) -> None:
        self._clock = clock
        self.keeps, self.held, self.is_alive, self.num_updates = keeps, None, True, 0
        self.asked: list[dict] = []

    def _check(self) -> None:
        if not self.is_alive:
            raise ServerLost("connection refused", is_final=True)

    async def settings(self) -> dict:
        self._check()
        return {"version": self.held}

    async def push(self, weights: Weights) -> dict[str, int]:
        self._check()
        self.held, self.num_updates = weights.version, self.num_updates + 1
        return {"tensors": 0, "bytes": 0}

    async def generate(self, body: dict, version: int) -> Rollout:
        self._check()
        if version != self.held:
            raise StaleServer("other weights")
        self.asked.append(body)
        tokens, updates = [], self.num_updates
        while len(tokens) < body["sampling_params"]["max_tokens"]:
            await self._clock.next()
            self._check()
            if updates != self.num_updates and not (self.keeps and tokens):
                return self._answer(body, tokens, "abort")
            tokens.append(self.held)
        return self._answer(body, tokens, "length")

    def _answer(self, body: dict, tokens: list[int], reason: str) -> Rollout:
        before, rows = len(body["token_ids"]), len(body["token_ids"]) + len(tokens) - 1
        whole = np.array([*body["token_ids"], *tokens], np.int32)
        first = body.get("first_route", 0)
        routes = (whole[1 : rows + 1, None, None] + np.zeros((1, 2, 1), np.int64)).astype(np.uint8)[first:]
        return Rollout(
            "",
            (),
            tokens=whole[before:],
            inference_logprobs=-np.arange(before, before + len(tokens), dtype=np.float32),
            policy_versions=whole[before:].copy(),
            finish_reason=reason,
            routed_experts=routes if tokens else None,
            route_checksums=route_checksums("p", whole, routes, first) if tokens else None,
        )

    async def close(self) -> None:
        pass


def play(scene, keeps: bool, number: int = 2):
    """The result of ``scene(pool, servers, clock)``."""

    async def run():
        clock = Clock()
        servers = {f"s{i}": MadeUpServer(keeps, clock) for i in range(number)}
        pool = ServerPool(
            PoolLimits(wait_s=PATIENCE_S, health_every_s=0.005),
            discover=lambda: [Address(name, f"http://{name}") for name, s in servers.items() if s.is_alive],
            connect=lambda address: servers[address.name],
            problems=lambda settings: [],
            say=lambda text: None,
        )
        try:
            await pool.start(number)
            return await scene(pool, servers, clock)
        finally:
            await pool.close()

    return asyncio.run(run())


def body(seed: int = 5, length: int = LENGTH) -> dict:
    return {"id": "p", "token_ids": PROMPT, "sampling_params": {"max_tokens": length, "seed": seed}}


def ask(pool: ServerPool, number: int, concurrency: int = 4, line: Line | None = None, place: int = 0) -> Dispatch:
    names = [f"response {i}" for i in range(number)]
    return Dispatch(pool, [body(i) for i in range(number)], names, concurrency, 3, line=line, place=place)


def assert_whole(answer: Rollout) -> None:
    """One response, put together as if it had come in one piece."""
    assert answer.tokens.tolist() == answer.policy_versions.tolist()
    assert (len(answer.tokens), answer.finish_reason) == (LENGTH, "length")
    whole = np.concatenate([PROMPT, answer.tokens])
    assert answer.inference_logprobs.tolist() == [-float(position) for position in range(len(PROMPT), len(whole))]
    assert answer.routed_experts[:, 0, 0].tolist() == whole[1:].tolist()  # of the leg that sampled the next token
    assert (answer.route_checksums == route_checksums("p", whole, answer.routed_experts)).all()


@pytest.mark.parametrize("keeps", [False, True])
def test_responses_outlive_updates_and_come_once(keeps):
    async def scene(pool, servers, clock):
        dispatch = ask(pool, 10)
        running = asyncio.create_task(dispatch.run())
        for version in range(1, 4):
            await clock.tick(4)
            await pool.push(Weights(version))
        return await clock.until(running), dispatch

    answers, dispatch = play(scene, keeps)
    for answer in answers:
        assert_whole(answer)
        assert (np.diff(answer.policy_versions) >= 0).all()
    assert max(len(set(answer.policy_versions.tolist())) for answer in answers) > 1
    assert dispatch.num_requeued == 0
    legs = [len(legs.answers) for legs in dispatch.legs]
    assert (max(legs) > 1) != keeps


@pytest.mark.parametrize("keeps", [False, True])
def test_a_server_that_dies_loses_what_it_had_not_returned_and_nothing_else(keeps):
    async def scene(pool, servers, clock):
        dispatch = ask(pool, 8)
        running = asyncio.create_task(dispatch.run())
        await clock.tick(4)
        await pool.push(Weights(1))
        await clock.tick(4)
        servers["s0"].is_alive = False
        return await clock.until(running), dispatch

    answers, dispatch = play(scene, keeps)
    for answer in answers:
        assert_whole(answer)
    assert dispatch.num_requeued == 4
    if not keeps:  # the first leg of each was returned at the update, and is kept
        assert {int(answer.policy_versions[0]) for answer in answers} == {0}


def test_a_server_that_others_updated_is_given_the_weights_that_are_due_before_it_is_asked():
    async def scene(pool, servers, clock):
        dispatch = ask(pool, 3)
        running = asyncio.create_task(dispatch.run())
        await clock.tick(4)
        servers["s0"].held, servers["s0"].num_updates = 9, 9
        return await clock.until(running), dispatch.num_requeued, servers["s0"].num_updates

    answers, num_requeued, num_updates = play(scene, keeps=False, number=1)
    for answer in answers:
        assert_whole(answer)
        assert set(answer.policy_versions.tolist()) == {0}
    assert num_requeued == 0
    assert num_updates >= 10


def test_earlier_calls_get_room_first():
    async def scene(pool, servers, clock):
        line, ended = Line(), []

        async def run(name, place):
            await ask(pool, 6, concurrency=2, line=line, place=place).run()
            ended.append(name)

        later = asyncio.create_task(run("later", 2))
        await clock.tick()
        both = (run(name, place) for name, place in (("earlier", 1), ("awaited", 0)))
        await clock.until(asyncio.gather(later, *both))
        return ended, line.first()

    assert play(scene, keeps=True, number=1) == (["awaited", "earlier", "later"], None)


def test_a_later_call_uses_room_that_earlier_ones_leave():
    async def scene(pool, servers, clock):
        line = Line()
        first = asyncio.create_task(ask(pool, 1, concurrency=4, line=line, place=1).run())
        await clock.tick()
        second = asyncio.create_task(ask(pool, 3, concurrency=4, line=line, place=2).run())
        await clock.tick()
        asked = len(servers["s0"].asked)
        await clock.until(asyncio.gather(first, second))
        return asked

    assert play(scene, keeps=True, number=1) == 4


def test_a_later_leg_asks_for_the_rest_with_a_seed_of_its_own():
    server = MadeUpServer(False, Clock())
    server.held = 3
    legs = Legs(body(seed=11))
    assert not legs.add(server._answer(legs.request(), [], "abort"))
    assert legs.request() == body(seed=11)  # nothing has come of it
    assert not legs.add(server._answer(legs.request(), [3, 3], "abort"))
    second = legs.request()
    assert second["token_ids"] == [*PROMPT, 3, 3]
    assert second["first_route"] == len(PROMPT) + 1
    assert second["sampling_params"] == {"max_tokens": LENGTH - 2, "seed": leg_seed(11, 1)}
    assert not legs.add(server._answer(second, [4] * 5, "abort"))
    third = legs.request()
    assert third["sampling_params"] == {"max_tokens": LENGTH - 7, "seed": leg_seed(11, 2)}
    assert legs.add(server._answer(third, [5] * 5, "length"))
    assert_whole(legs.whole())
    assert (len(legs.answers), legs.num_recomputed) == (3, 2 + 7)
    assert len({11, leg_seed(11, 1), leg_seed(11, 2), leg_seed(12, 1)}) == 4


def test_a_response_in_one_piece_is_not_copied():
    server, legs = MadeUpServer(False, Clock()), Legs(body())
    answer = server._answer(legs.request(), [0] * LENGTH, "length")
    assert legs.add(answer)
    assert legs.whole() is answer


def test_routes_are_optional():
    server, legs = MadeUpServer(False, Clock()), Legs(body())
    for number, reason in ((2, "abort"), (LENGTH - 2, "length")):
        answer = server._answer(legs.request(), [1] * number, reason)
        legs.add(replace(answer, routed_experts=None, route_checksums=None))
    assert legs.whole().routed_experts is None
    assert legs.whole().head_logprobs is None


def test_heads_of_all_legs_follow_each_other():
    server, legs = MadeUpServer(False, Clock()), Legs(body())
    logprobs = -np.arange(3 * LENGTH, dtype=np.float32).reshape(LENGTH, 3)
    for where, reason in ((slice(2), "abort"), (slice(2, LENGTH), "length")):
        answer = server._answer(legs.request(), [1] * len(logprobs[where]), reason)
        legs.add(replace(answer, head_tokens=logprobs[where].astype(np.int32), head_logprobs=logprobs[where]))
    assert (legs.whole().head_logprobs == logprobs).all()
    assert (legs.whole().head_tokens == logprobs).all()


def test_a_token_of_weights_that_the_batch_may_not_have():
    versions = np.array([4, 4, 5, 7], np.int32)
    assert check_token_versions("r", versions, 4, exactly=False) == 3
    assert check_token_versions("r", versions[:2], 4, exactly=True) == 1
    with pytest.raises(
        RolloutError, match=r"response 9: token 0 was sampled by policy version 4, expected 5 or a later"
    ):
        check_token_versions("response 9", versions, 5, exactly=False)
    with pytest.raises(RolloutError, match=r"token 2 was sampled by policy version 5, expected 4$"):
        check_token_versions("r", versions, 4, exactly=True)


@pytest.mark.parametrize("mode", ["abort_and_resume", "keep"])
def test_modes_need_batches_that_run_ahead(mode):
    fields = {"engine": "vllm_server", "in_flight": {"mode": mode}}
    assert RolloutConfig.model_validate(fields | {"max_staleness": 1}).in_flight.mode == mode
    with pytest.raises(ValueError, match=rf"in_flight.mode: {mode}, but with max_staleness: 0"):
        RolloutConfig.model_validate(fields)
