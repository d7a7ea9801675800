"""From vLLM's output inside a server to the trainer's answer: every bit of it, and none where something is wrong."""

from __future__ import annotations

import asyncio
import json
import re
import struct
import zlib
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
from megatron_rl.rollout.servers.client import ServerClient, ServerLost, StaleServer, request_body
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


def through(engine: Engine, wants_routes: bool = True, damage=lambda content: content, mode="finish"):
    """The trainer's answer, by way of bytes but without a network."""
    client = ServerClient.__new__(ServerClient)
    client._mode, client._in_flight = mode, 0

    async def call(method, path, body, headers, read):
        assert (path, headers) == ("/megatron_rl/generate", {"X-Policy-Version": "3"})
        body = json.loads(json.dumps(body | {"wants_routes": wants_routes}))
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


def test_a_rollout_of_a_server_equals_one_of_an_engine_in_the_rank():
    """Sealed there or here: the same arrays, bit for bit."""
    there = REQUEST.rollout_of(through(Engine()))
    here = make_rollout(REQUEST, [5, 6, 7, 8, 2], LOGPROBS.tolist(), "stop", 3, ROUTES, ARCHITECTURE)
    assert_equal(there, here)
    for field in ("tokens", "inference_logprobs", "policy_versions", "routed_experts", "route_checksums"):
        assert getattr(there, field).dtype == getattr(here, field).dtype, field


def test_no_byte_of_an_answer_can_change_unnoticed():
    answer = through(Engine())
    content = b"".join(pack(answer))
    without_meaning = 0
    for place in range(len(content)):
        try:
            assert_equal(unpack(flipped(content, place)), answer)
            without_meaning += 1
        except Damaged:
            pass
    sent = (answer.tokens, answer.inference_logprobs, answer.routed_experts, answer.route_checksums)
    filled = sum(-array.nbytes % 8 for array in sent)
    assert without_meaning == filled + 2  # the header's zero
    for length in range(len(content)):
        with pytest.raises(Damaged):
            unpack(content[:length])


def test_a_damaged_answer_is_asked_for_again():
    for damage in (lambda content: flipped(content, 300), lambda content: b"", lambda content: content[:-8]):
        with pytest.raises(ServerLost, match="the answer is damaged") as caught:
            through(Engine(), damage=damage)
        assert not caught.value.is_final
    with pytest.raises(ServerLost, match=r"damaged: \d+ bytes, the head describes \d+"):
        through(Engine(), damage=lambda content: content + bytes(8))


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :]


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


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ({"versions": [[1, 4]]}, "5 tokens, 5 log-probs and 4 versions"),
        ({"versions": [[1, -5]]}, "no head of an answer: ValueError"),
        ({"versions": [[2**40, 5]]}, "no head of an answer: OverflowError"),
        ({"versions": 7}, "no head of an answer"),
        ({"arrays": []}, "no head of an answer: TypeError"),
        ({"arrays": [{"name": "tokens", "dtype": "|O", "shape": [5], "checksum": 0}]}, "does not belong here"),
        ({"arrays": [{"name": "tokens", "dtype": "<i4", "shape": [-1], "checksum": 0}]}, "does not belong here"),
        ({"arrays": [{"name": "tokens", "dtype": "<i4", "shape": [2**70], "checksum": 0}]}, "the checksum differs"),
        (
            {"arrays": [{"name": "texts", "dtype": "<i4", "shape": [5], "checksum": 0}]},
            "no head of an answer: KeyError",
        ),
    ],
)
def test_a_head_that_describes_no_answer(head, said):
    def damage(content: bytes) -> bytes:
        size = int.from_bytes(content[8:12], "little")
        text = json.dumps(json.loads(content[16 : 16 + size]) | head).encode()
        return content[:8] + struct.pack("<II", len(text), zlib.crc32(text)) + text + content[16 + size :]

    with pytest.raises(ServerLost, match=re.escape(said)):
        through(Engine(), damage=damage)


def test_what_has_no_type_of_the_wire_is_not_sent():
    answer = through(Engine())
    with pytest.raises(TypeError, match="routed_experts: int16 does not travel"):
        pack(replace(answer, routed_experts=ROUTES))


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


def test_what_is_no_answer():
    with pytest.raises(StaleServer, match="aborted"):
        through(Engine(finish_reason="abort"))
    assert through(Engine(finish_reason="abort"), mode="keep").finish_reason == "abort"
    mixed = np.array([3, 3, 3, 4, 4], np.int32)
    mix = lambda content: b"".join(pack(replace(unpack(content), policy_versions=mixed)))  # noqa: E731
    with pytest.raises(StaleServer, match="tokens of other policy versions than 3"):
        through(Engine(), damage=mix)
    assert (through(Engine(), damage=mix, mode="keep").policy_versions == mixed).all()
    with pytest.raises(RolloutError, match="gave this response up"):
        through(Engine(finish_reason="error"))
    with pytest.raises(RolloutError, match="other tokens than were sampled"):
        through(Engine(token_ids=[5, 6, 7, 8, 9]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"token_ids": [3, -1]}, "token_ids: -1 is outside the vocabulary (0 … 98)"),
        ({"token_ids": [99]}, "token_ids: 99 is outside the vocabulary (0 … 98)"),
        ({"token_ids": []}, "token_ids: the prompt is empty"),
        ({"token_ids": [1] * 12}, "at most 11 token ids, found 12 of them"),
        ({"token_ids": [1.5]}, "expected whole numbers"),
        ({"token_ids": [True]}, "expected whole numbers"),
        ({"token_ids": ["1"]}, "expected whole numbers"),
        ({"token_ids": [10**30]}, "expected whole numbers"),
        ({"token_ids": [[1], [2]]}, "of 2 dimensions"),
        ({"token_ids": [[1], [2, 3]]}, "inhomogeneous"),
        ({"token_ids": "abc"}, "found str"),
        ({"sampling_params": {"stop_token_ids": [-1]}}, "stop_token_ids: -1 is outside the vocabulary"),
    ],
)
def test_what_would_end_the_engine_does_not_reach_it(change, said):
    engine = Engine()
    with pytest.raises(ValueError, match=re.escape(said)):
        asyncio.run(answered(engine, body() | change))
    assert engine.asked == []


def test_a_prompt_of_ten_megabytes_is_refused_unread():
    """By its length alone: no pass over its tokens, in Python or in the engine."""

    class Long(list):
        def __len__(self):
            return 4_000_000

        def __iter__(self):
            raise AssertionError("read")

    with pytest.raises(ValueError, match="found 4000000 of them"):
        asyncio.run(answered(Engine(), body() | {"token_ids": Long()}))


def test_idle_connections_are_closed_by_the_trainer(monkeypatch):
    """A server that closes one first may do so while the next weight update is on its way, and is lost then."""
    from vllm.envs import environment_variables  # the module's own attributes stay what an engine in this process found

    async def kept_by_the_trainer() -> float:
        client = ServerClient(Address("s", "http://127.0.0.1:1", "", 0, ""), "token", 1.0)
        try:
            return client._session.connector._keepalive_timeout
        finally:
            await client.close()

    for name, value in server.REQUIRED.items():
        monkeypatch.setenv(name, value)
    assert asyncio.run(kept_by_the_trainer()) < environment_variables["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]()
