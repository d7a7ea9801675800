"""Conversations of several turns on servers: real sampler, dispatch and pool, made-up servers.

A token's value is the version of the weights that sampled it, and its route leads to the expert of the next token.
"""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import aiohttp
import numpy as np
import pytest

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.model.architecture import read_architecture
from megatron_rl.rollout import RolloutError, Sampling
from megatron_rl.rollout.conversation import Talk
from megatron_rl.rollout.requests import make_requests
from megatron_rl.rollout.servers.client import Weights
from megatron_rl.rollout.servers.generator import Sampler
from megatron_rl.routing import checksums_from_row, route_checksums
from megatron_rl.types import Prompt, Rollout
from tests.support.tiny import MODEL
from tests.unit.rollout.servers import test_dispatch_in_flight as in_flight

PROMPT, FIRST, RESULT, SECOND = in_flight.PROMPT, 4, [3, 2], 5
ARCHITECTURE = read_architecture(MODEL)
WIDTH = (ARCHITECTURE.num_layers, ARCHITECTURE.experts_per_token)


class MadeUpServer(in_flight.MadeUpServer):
    """Seals routes of the model's width for the sequence that is asked for."""

    def _answer(self, body: dict, tokens: list[int], reason: str) -> Rollout:
        before, first = len(body["token_ids"]), body["first_route"]
        whole = np.array([*body["token_ids"], *tokens], np.int32)
        routes = np.broadcast_to(whole[1:, None, None], (len(whole) - 1, *WIDTH)).astype(np.uint8)[first:]
        return Rollout(
            "",
            (),
            tokens=whole[before:],
            inference_logprobs=-np.arange(before, len(whole), dtype=np.float32),
            policy_versions=whole[before:].copy(),
            finish_reason=reason,
            routed_experts=routes if tokens else None,
            route_checksums=route_checksums(body["id"], whole, routes, first) if tokens else None,
        )


class Stage:
    """One batch of conversations that ``function`` holds under ``mode``, on one server with room for four requests."""

    def __init__(self, function, mode: str, pool, server, deadline_s: float | None) -> None:
        fields = {"engine": "vllm_server", "max_staleness": 1, "in_flight": {"mode": mode}, "deadline_s": deadline_s}
        fields["max_num_seqs"] = 4
        servers = SimpleNamespace(members=pool, turn=asyncio.Lock(), fetchers=[0])
        chat = SimpleNamespace(first=lambda *_: [*PROMPT], following=lambda *_: [*RESULT], rewrites={})
        talk = Talk("f", function, lambda text: [], str, chat)
        self.server, self._config = server, RolloutConfig.model_validate(fields)
        self.sampler = Sampler(
            self._config, servers, ARCHITECTURE, [], None, dict, talk, vocab_size=ARCHITECTURE.vocab_size
        )

    def begin(self, num_responses: int = 1) -> asyncio.Task:
        requests = make_requests([Prompt("p", PROMPT, "")], num_responses, seed=0, step=1)
        work = self.sampler.sample(1, requests, Sampling(in_flight.LENGTH), 0, None, is_awaited=False)
        return asyncio.create_task(work)


def play(function, scene, monkeypatch, mode: str = "keep", deadline_s: float | None = None):
    monkeypatch.setattr(in_flight, "MadeUpServer", MadeUpServer)

    async def on_stage(pool, servers, clock):
        stage = Stage(function, mode, pool, servers["s0"], deadline_s)
        try:
            return await scene(stage, pool, clock)
        finally:
            stage.sampler.close()
            assert not any(member.in_flight for member in pool.members.values())

    return in_flight.play(on_stage, keeps=mode == "keep", number=1)


async def to_the_end(stage, pool, clock):
    return await clock.until(stage.begin(num_responses=3))


async def with_a_tool(client, problem):
    conversation = client.conversation()
    await conversation.generate(max_tokens=FIRST)
    assert conversation.tell(RESULT)
    await conversation.generate(max_tokens=SECOND)
    return conversation


async def through_its_endpoint(client, problem):
    """The same two turns, asked for by HTTP."""
    head, messages = {"role": "user", "content": "go"}, []
    async with client.endpoint() as endpoint, aiohttp.ClientSession() as session:
        for most in (FIRST, SECOND):
            messages.append(head)
            async with session.post(
                f"{endpoint.url}/chat/completions",
                json={"messages": messages, "max_tokens": most},
                headers={"Authorization": f"Bearer {endpoint.key}"},
            ) as response:
                messages.append((await response.json())["choices"][0]["message"])
    return endpoint.conversation


async def with_a_side_request(client, problem):
    """The second turn is asked for beside the conversation, so that routes of all its tokens come."""
    conversation = client.conversation()
    await conversation.generate(max_tokens=FIRST)
    assert conversation.tell(RESULT)
    await client.generate([5, 5], max_tokens=2)
    conversation.add(await client.generate(conversation.tokens, max_tokens=SECOND))
    return conversation


def check_whole(rollout, versions: list[int]) -> None:
    """``versions``: of all tokens after the prompt, which those of the tool have from the weights that read them."""
    places = np.arange(len(PROMPT), len(PROMPT) + len(versions))
    sampled = [True] * FIRST + [False] * len(RESULT) + [True] * SECOND
    expected = versions[:FIRST] + RESULT + versions[FIRST + len(RESULT) :]
    assert rollout.tokens.tolist() == expected
    assert rollout.sampled.tolist() == sampled
    assert rollout.policy_versions.tolist() == versions
    assert rollout.inference_logprobs.tolist() == np.where(sampled, -places, 0).tolist()
    whole = np.array([*PROMPT, *expected])
    assert (rollout.routed_experts == whole[1:, None, None]).all()
    assert rollout.routed_experts.shape == (len(whole) - 1, *WIDTH)
    assert np.array_equal(rollout.route_checksums, route_checksums(rollout.id, whole, rollout.routed_experts))
    assert (rollout.num_turns, rollout.num_sampled) == (2, FIRST + SECOND)


@pytest.mark.parametrize("function", [with_a_tool, with_a_side_request, through_its_endpoint])
def test_turns_become_one_response_with_its_seals(function, monkeypatch):
    share = play(function, to_the_end, monkeypatch)
    assert [rollout.sample for rollout in share.rollouts] == [0, 1, 2]
    for rollout in share.rollouts:
        check_whole(rollout, [0] * (FIRST + len(RESULT) + SECOND))


def test_a_turn_asks_for_the_routes_that_are_missing(monkeypatch):
    async def scene(stage, pool, clock):
        await clock.until(stage.begin())
        return stage.server.asked

    first, second = play(with_a_tool, scene, monkeypatch)
    assert (first["first_route"], second["first_route"]) == (0, len(PROMPT) + FIRST - 1)
    assert second["token_ids"] == [*PROMPT, *[0] * FIRST, *RESULT]
    assert second["sampling_params"]["seed"] != first["sampling_params"]["seed"]


@pytest.mark.parametrize("mode", ["keep", "abort_and_resume"])
def test_weights_that_come_between_and_within_turns_are_told_by_token(mode, monkeypatch):
    waits, goes_on = threading.Event(), threading.Event()

    async def function(client, problem):
        conversation = client.conversation()
        await conversation.generate(max_tokens=FIRST)
        waits.set()
        while not goes_on.is_set():
            await asyncio.sleep(0.001)
        assert conversation.tell(RESULT)
        await conversation.generate(max_tokens=SECOND)
        return conversation

    async def scene(stage, pool, clock):
        task = stage.begin()
        while not waits.is_set() and not task.done():
            await clock.tick()
            await asyncio.sleep(0.0005)
        await pool.push(Weights(1))
        goes_on.set()
        while len(stage.server.asked) < 2 and not task.done():
            await asyncio.sleep(0.0005)
        await clock.tick(2)
        await pool.push(Weights(2))
        return await clock.until(task)

    share = play(function, scene, monkeypatch, mode)
    (rollout,) = share.rollouts
    check_whole(rollout, [0] * FIRST + [1] * (len(RESULT) + 2) + [2] * (SECOND - 2))
    assert (share.counts.versions, share.counts.legs) == (3, 2 if mode == "keep" else 3)


async def fails(client, problem):
    if client.sequence_id.endswith("/1"):
        raise KeyError("tool")
    return await with_a_tool(client, problem)


async def waits_for_ever(client, problem):
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("function", "deadline_s", "message"),
    [
        (fails, None, r"rollout.function f, prompt 'p', sample 1: KeyError: 'tool'"),
        (waits_for_ever, 0.05, r"no conversation went on for rollout.deadline_s \(0.05 s\)"),
    ],
)
def test_a_function_that_fails_or_hangs_ends_the_batch(function, deadline_s, message, monkeypatch):
    with pytest.raises(RolloutError, match=message):
        play(function, to_the_end, monkeypatch, deadline_s=deadline_s)


def test_a_turn_that_a_function_gives_up_is_cancelled(monkeypatch):
    async def function(client, problem):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.generate([5, 5]), 0.01)
        return await with_a_tool(client, problem)

    async def scene(stage, pool, clock):
        task = stage.begin()
        while len(stage.server.asked) < 2 and not task.done():  # nothing ticks before the first was given up
            await asyncio.sleep(0.0005)
        assert sum(member.in_flight for member in pool.members.values()) == 1
        return await clock.until(task)

    (rollout,) = play(function, scene, monkeypatch).rollouts
    assert rollout.num_turns == 2


def test_checksums_of_later_rows_and_of_a_wrong_one():
    random = np.random.default_rng(0)
    tokens, routes = random.integers(0, 30, 9), random.integers(0, 8, (8, *WIDTH)).astype(np.uint8)
    whole = route_checksums("p/0", tokens, routes)
    for row in (0, 3, 7):
        later = route_checksums("p/0", tokens, routes[row:], row)
        assert np.array_equal(checksums_from_row(whole, "p/0", tokens, routes, row), later)
        assert np.array_equal(checksums_from_row(later, "p/0", tokens, routes[row:], row, row), later)
    damaged = routes.copy()
    damaged[1, 0, 0] ^= 1
    assert not np.array_equal(
        checksums_from_row(whole, "p/0", tokens, damaged, 3), route_checksums("p/0", tokens, damaged[3:], 3)
    )
