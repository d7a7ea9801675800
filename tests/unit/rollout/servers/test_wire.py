"""From vLLM's output inside a server to the trainer's answer: every bit of it, and none where something is wrong."""

from __future__ import annotations

import asyncio
import json
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.model.architecture import read_architecture
from megatron_rl.rollout import RolloutError, Sampling
from megatron_rl.rollout.requests import Request, make_rollout
from megatron_rl.rollout.servers import server
from megatron_rl.rollout.servers.client import ServerClient, ServerLost, request_body
from megatron_rl.rollout.servers.guard import UnderWay
from megatron_rl.rollout.servers.rendezvous import Address
from megatron_rl.rollout.servers.server import sample
from megatron_rl.rollout.servers.wire import Damaged, pack, unpack
from megatron_rl.routing import route_checksums
from megatron_rl.types import Prompt, Rollout
from tests.support.made_up_engine import MadeUpEngine
from tests.support.tiny import MODEL

ARCHITECTURE = read_architecture(MODEL)
LOGPROBS = -np.random.default_rng(0).random(5, np.float32)
ROUTES = np.arange(6 * 4 * 2, dtype=np.int16).reshape(6, 4, 2) % 8  # as vLLM records them
REQUEST = Request(0, Prompt("p", [3, 4], ""), 1, seed=2**62 + 1)


class Engine(MadeUpEngine):
    """What `sample` asks of vLLM's AsyncLLM: every response is the same."""

    def __init__(self, **changes) -> None:
        super().__init__()
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 99, max_model_len=12)
        logprobs = SimpleNamespace(token_ids=[5, 6, 7, 8, 2], logprobs=LOGPROBS.tolist())
        fields = {"token_ids": [5, 6, 7, 8, 2], "logprobs": logprobs, "finish_reason": "stop", "routed_experts": ROUTES}
        self._completion = SimpleNamespace(**{**fields, **changes})

    async def add_request(self, name, prompt, params):
        collector = await super().add_request(name, prompt, params)
        collector.put(SimpleNamespace(finished=True, outputs=[self._completion]))
        return collector


def body() -> dict:
    return json.loads(json.dumps(request_body(REQUEST, Sampling(9, 0.7, top_p=0.9, top_k=5), [2])))


async def answered(engine: Engine, body: dict) -> Rollout:
    """What a server that holds policy version 3 answers."""
    under_way = UnderWay(engine)
    await under_way.release(3)
    return await sample(engine, under_way, ARCHITECTURE, body)


def through(engine: Engine, wants_routes: bool = True, damage=lambda content: content, head: int = 0):
    """The trainer's answer, by way of bytes but without a network."""
    client = ServerClient.__new__(ServerClient)
    client._in_flight = 0

    async def call(method, path, body, headers, read):
        assert (path, headers) == ("/megatron_rl/generate", {"X-Policy-Version": "3"})
        body = json.loads(json.dumps(body | {"wants_routes": wants_routes, "head": head}))
        return damage(b"".join(pack(await answered(engine, body))))

    client._call = call
    return asyncio.run(client.generate(body(), 3))


def test_an_answer_is_what_the_engine_sampled_bit_for_bit():
    answer = through(Engine())
    assert (answer.tokens.tolist(), answer.finish_reason) == ([5, 6, 7, 8, 2], "stop")
    assert answer.policy_versions.tolist() == [3] * 5
    assert (answer.inference_logprobs == LOGPROBS).all()
    assert answer.routed_experts.dtype == np.uint8
    assert (answer.routed_experts == ROUTES).all()
    seals = route_checksums("p/1", np.array([3, 4, 5, 6, 7, 8, 2]), answer.routed_experts)
    assert (answer.route_checksums == seals).all()
    assert through(Engine(), wants_routes=False).routed_experts is None


def test_the_head_of_each_token_comes_with_it():
    """Beside routes and alone, at the width that is asked for."""
    ids, values = np.arange(15, dtype=np.int32).reshape(5, 3), -np.random.default_rng(1).random((5, 3), np.float32)
    ids[:, 0], values[:, 0] = [5, 6, 7, 8, 2], LOGPROBS
    engine = Engine(logprobs=SimpleNamespace(token_ids=ids.ravel().tolist(), logprobs=values.ravel().tolist()))
    for wants_routes in (True, False):
        answer = through(engine, wants_routes, head=2)
        assert (answer.inference_logprobs == LOGPROBS).all()
        assert (answer.head_tokens == ids[:, 1:]).all()
        assert (answer.head_logprobs == values[:, 1:]).all()
        assert (answer.head_tokens.dtype, answer.head_logprobs.dtype) == (np.int32, np.float32)
        assert (answer.routed_experts is None) != wants_routes
    assert engine.asked[0][1].logprobs == 2
    assert through(Engine()).head_logprobs is None
    asked = request_body(REQUEST, Sampling(9, head=2), [2])
    assert asked["head"] == 2
    with pytest.raises(RolloutError, match="15 log-probs of 5 tokens, not 4 of each"):
        through(engine, head=3)


def test_a_rollout_of_a_server_equals_one_of_an_engine_in_the_rank():
    """Sealed there or here: the same arrays, bit for bit."""
    answer = through(Engine())
    own, sealed = of(answer), (answer.routed_experts, answer.route_checksums)
    there = make_rollout(REQUEST, *own, sealed, ARCHITECTURE)
    here = make_rollout(REQUEST, [5, 6, 7, 8, 2], LOGPROBS.tolist(), "stop", 3, ROUTES, ARCHITECTURE)
    assert_equal(there, here)
    for field in ("tokens", "inference_logprobs", "policy_versions", "routed_experts", "route_checksums"):
        assert getattr(there, field).dtype == getattr(here, field).dtype, field
    for wrong in (sealed[0][:-1], sealed[0].astype(np.uint16), sealed[0][:, :3]):
        with pytest.raises(RolloutError, match=r"prompt 'p', sample 1: routes of shape \(6, 4, 2\).* and uint8 due"):
            make_rollout(REQUEST, *own, (wrong, sealed[1]), ARCHITECTURE)
    with pytest.raises(RolloutError, match="got none"):
        make_rollout(REQUEST, *own, None, ARCHITECTURE)


def of(answer: Rollout) -> tuple:
    return answer.tokens, answer.inference_logprobs, answer.finish_reason, answer.policy_versions


def test_a_damaged_answer_is_asked_for_again():
    content = b"".join(pack(through(Engine())))
    for length in range(len(content)):
        with pytest.raises(Damaged):
            unpack(content[:length])
    for damage in (lambda content: b"<html>", lambda content: content[:-8], lambda content: content + bytes(8)):
        with pytest.raises(ServerLost, match="the answer is damaged") as caught:
            through(Engine(), damage=damage)
        assert not caught.value.is_final


@pytest.mark.parametrize("name", ["tokens", "inference_logprobs", "policy_versions"])
def test_an_answer_whose_arrays_have_other_lengths_is_damaged(name):
    answer = through(Engine())
    setattr(answer, name, getattr(answer, name)[:-1])
    with pytest.raises(Damaged, match="tokens, log-probs and versions"):
        unpack(b"".join(pack(answer)))


def assert_equal(left: Rollout, right: Rollout) -> None:
    for field in fields(Rollout):
        assert np.array_equal(getattr(left, field.name), getattr(right, field.name)), field.name


RUNS = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(1, 4)), max_size=5)


@given(RUNS, st.sampled_from(["stop", "length", "abort"]), st.sampled_from([None, np.uint8, np.uint16]))
def test_every_answer_arrives_as_it_was_sent(runs, reason, dtype):
    versions = np.repeat(*np.array(runs, np.int32).reshape(-1, 2).T)
    n, rng = len(versions), np.random.default_rng(len(runs))
    routes = None if dtype is None else rng.integers(0, np.iinfo(dtype).max, (n + 2, 3, 5), dtype)
    seals = None if dtype is None else rng.integers(-(2**63), 2**63 - 1, n + 5)
    sent = Rollout("", (), rng.integers(0, 9, n, np.int32), rng.random(n, np.float32), versions, reason, routes, seals)
    assert_equal(unpack(b"".join(pack(sent))), sent)


def test_the_engine_is_asked_for_what_the_request_says():
    engine = Engine()
    through(engine)
    through(engine)
    (prompt, params, _), _ = engine.asked
    assert prompt == {"prompt_token_ids": [3, 4], "cache_salt": "0"}
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (9, 0.7, 0.9, 5)
    assert (params.seed, params.stop_token_ids, params.ignore_eos) == (2**62 + 1, [2], True)
    assert (params.logprobs, params.flat_logprobs, params.detokenize) == (0, True, False)
    assert params.routed_experts_prompt_start == 0


def test_a_response_may_be_cut_or_of_several_policies():
    assert through(Engine(finish_reason="abort")).finish_reason == "abort"
    mixed = np.array([3, 3, 3, 4, 4], np.int32)
    mix = lambda content: b"".join(pack(replace(unpack(content), policy_versions=mixed)))  # noqa: E731
    assert (through(Engine(), damage=mix).policy_versions == mixed).all()


def test_what_is_no_answer():
    with pytest.raises(RolloutError, match="gave this response up"):
        through(Engine(finish_reason="error"))
    with pytest.raises(RolloutError, match="other tokens than were sampled"):
        through(Engine(token_ids=[5, 6, 7, 8, 9]))


def test_idle_connections_are_closed_by_the_trainer(monkeypatch):
    """A server that closes one first may do so while the next weight update is on its way, and is lost then."""
    from vllm.envs import environment_variables  # the module's own attributes stay what an engine in this process found

    async def kept_by_the_trainer() -> float:
        client = ServerClient(Address("s", "http://127.0.0.1:1"), "token", 1.0)
        try:
            return client._session.connector._keepalive_timeout
        finally:
            await client.close()

    for name, value in server.REQUIRED.items():
        monkeypatch.setenv(name, value)
    assert asyncio.run(kept_by_the_trainer()) < environment_variables["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]()
