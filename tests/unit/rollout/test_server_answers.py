"""From vLLM's output inside a server to the trainer's answer: every bit of it, and none where something is wrong."""

from __future__ import annotations

import asyncio
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.rollout import RolloutError, Sampling
from megatron_rl.rollout.requests import Request
from megatron_rl.rollout.servers.answering import sample
from megatron_rl.rollout.servers.client import ServerClient, StaleServer, request_body
from megatron_rl.types import Prompt

LOGPROBS = np.random.default_rng(0).normal(-2, 1, 5).astype(np.float32)
ROUTES = np.arange(7 * 4 * 2, dtype=np.int16).reshape(7, 4, 2)


class Engine:
    """What `sample` asks of vLLM's AsyncLLM."""

    def __init__(self, **changes) -> None:
        self.asked: list[tuple] = []
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 99, max_model_len=12)
        logprobs = SimpleNamespace(token_ids=[5, 6, 7, 8, 2], logprobs=LOGPROBS.tolist())
        fields = {"token_ids": [5, 6, 7, 8, 2], "logprobs": logprobs, "finish_reason": "stop", "routed_experts": ROUTES}
        self._completion = SimpleNamespace(**{**fields, **changes})

    async def generate(self, prompt, params, request_id):
        self.asked.append((prompt, params, request_id))
        yield SimpleNamespace(outputs=[self._completion])


def body() -> dict:
    request = Request(0, Prompt("p", [3, 4], ""), 1, seed=2**62 + 1)
    return json.loads(json.dumps(request_body(request, Sampling(9, 0.7, top_p=0.9, top_k=5), [2])))


def through(engine: Engine):
    """The trainer's answer, by way of JSON but without a network."""
    client = ServerClient.__new__(ServerClient)

    async def call(method, path, body, headers):
        assert (path, headers) == ("/megatron_rl/generate", {"X-Policy-Version": "3"})
        return json.loads(json.dumps(await sample(engine, body)))

    client._call = call
    return asyncio.run(client.generate(body(), 3))


def test_an_answer_is_what_the_engine_sampled_bit_for_bit():
    answer = through(Engine())
    assert (answer.tokens, answer.finish_reason) == ([5, 6, 7, 8, 2], "stop")
    assert (np.asarray(answer.logprobs, np.float32) == LOGPROBS).all()
    assert answer.routes.dtype == ROUTES.dtype
    assert (answer.routes == ROUTES).all()
    assert through(Engine(routed_experts=None)).routes is None


def test_the_engine_is_asked_for_what_the_request_says():
    engine = Engine()
    through(engine)
    through(engine)
    (prompt, params, first), (_, _, second) = engine.asked
    assert prompt == {"prompt_token_ids": [3, 4]}
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (9, 0.7, 0.9, 5)
    assert (params.seed, params.stop_token_ids, params.ignore_eos) == (2**62 + 1, [2], True)
    assert (params.logprobs, params.flat_logprobs, params.detokenize) == (0, True, False)
    assert first != second


def test_what_is_no_answer():
    with pytest.raises(StaleServer, match="aborted"):
        through(Engine(finish_reason="abort"))
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
        asyncio.run(sample(engine, body() | change))
    assert engine.asked == []


def test_a_prompt_of_ten_megabytes_is_refused_unread():
    """By its length alone: no pass over its tokens, in Python or in the engine."""

    class Long(list):
        def __len__(self):
            return 4_000_000

        def __iter__(self):
            raise AssertionError("read")

    with pytest.raises(ValueError, match="found 4000000 of them"):
        asyncio.run(sample(Engine(), body() | {"token_ids": Long()}))
