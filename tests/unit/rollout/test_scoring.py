"""A teacher's log-probs from servers, and which teacher scores what. Real sockets; the engines are made up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.config.rollout import QuantizationConfig, RolloutConfig
from megatron_rl.errors import InputError
from megatron_rl.rollout import RolloutError, scoring
from megatron_rl.rollout.requests import Request, make_rollout
from megatron_rl.rollout.scoring import ServerScorer, Teachers, engine_config
from megatron_rl.rollout.servers import server
from megatron_rl.rollout.servers.guard import Guard, GuardState
from megatron_rl.rollout.servers.wire import MEDIA_TYPE, pack
from megatron_rl.types import Group, Prompt, Rollout, Scores
from tests.support.tiny import MODEL, tiny_recipe
from tests.unit.rollout.servers.test_guard import TOKEN, call

MOST = 40


def rollout(tokens, prompt=(5, 6)) -> Rollout:
    return make_rollout(Request(0, Prompt("p", list(prompt), ""), 0, 0), tokens, [-1.0] * len(tokens), "stop", 0)


def says(tokens) -> list[float]:
    """The made-up teacher: log τ of each token tells its place and the token before it."""
    return [-0.5 * place - before / 64 for place, before in enumerate(tokens[:-1], 1)]


class Server:
    """``answer``: path, body → status and content, JSON or bytes."""

    def __init__(self, answer) -> None:
        self.asked: list[tuple[str, dict | None, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                outer.asked.append((self.path, body, self.headers["Authorization"]))
                status, content = answer(self.path, body)
                kind = MEDIA_TYPE if isinstance(content, bytes) else "application/json"
                content = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def served(*answers):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(Server(answer))) for answer in answers]


def of_vllm(path, body, longest=MOST + 1):
    """As vLLM's server answers: None at the first place, the best token beside another, no infinity."""
    if path == "/v1/models":
        return 200, {"data": [{"id": "teacher", "max_model_len": longest}]}
    if path != "/v1/completions":
        return 404, {"detail": "Not Found"}
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("teacher", 1, 1.0)
    tokens = body["prompt"]
    best = {
        str(99 - rank): {"logprob": -0.125 * (rank + 1), "rank": rank + 1} for rank in range(body["prompt_logprobs"])
    }
    places = [
        {str(token): {"logprob": value, "rank": 9}, **best}
        for token, value in zip(tokens[1:], says(tokens), strict=True)
    ]
    return 200, {"choices": [{"text": "", "prompt_logprobs": [None, *places]}]}


def of_ours(path, body):
    if path == "/megatron_rl/settings":
        return 200, {"name": "s", "agreed": {"max_model_len": MOST + 1, "config": "of another"}}
    tokens, first = body["token_ids"], body["first"]
    values = np.array(says(tokens)[first - 1 :], np.float32)
    ids, k = np.array(tokens[first:], np.int32), body.get("top_k", 0)
    head = np.tile(99 - np.arange(k, dtype=np.int32), (len(ids), 1))
    of_head = np.tile(-0.125 * np.arange(1, k + 1, dtype=np.float32), (len(ids), 1))
    sets = {"head_tokens": head, "head_logprobs": of_head} if k else {}
    answer = Rollout("", (), ids, values, np.zeros(len(ids), np.int32), "stop", **sets)
    return 200, b"".join(bytes(x) for x in pack(answer))


def after(failures, answer, of="/v1/completions", status=503):
    """``answer`` after so many refusals of a path."""
    left = [failures]

    def reply(path, body):
        if path == of and left[0]:
            left[0] -= 1
            return status, {"error": "busy"}
        return answer(path, body)

    return reply


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    async def at_once(seconds):
        pass

    monkeypatch.setattr(scoring.asyncio, "sleep", at_once)
    monkeypatch.delenv("MRL_SERVER_TOKEN", raising=False)


RESPONSES = [rollout([7, 8, 9]), rollout([3], prompt=[1]), rollout(list(range(20)), prompt=[4] * 9)]


@pytest.mark.parametrize("answers", [[of_vllm], [of_ours], [of_vllm, of_ours]], ids=["vllm", "ours", "both"])
def test_log_probs_are_those_of_the_responses_tokens(answers, monkeypatch):
    monkeypatch.setenv("MRL_SERVER_TOKEN", TOKEN)
    with served(*answers) as servers:
        got = ServerScorer([s.url + "/" for s in servers], MOST, 60.0, at_once=2).score(RESPONSES)
        assert all(heard == f"Bearer {TOKEN}" for s in servers for *_, heard in s.asked)
        assert all(any(path in ("/v1/completions", "/megatron_rl/score") for path, *_ in s.asked) for s in servers)
    for response, scores in zip(RESPONSES, got, strict=True):
        assert scores.logprobs.dtype == np.float32
        assert scores.logprobs.tolist() == says(response.whole.tolist())[response.prompt_length - 1 :]
        assert scores[1:] == (None, None)


@pytest.mark.parametrize("answer", [of_vllm, of_ours])
def test_the_most_probable_tokens_come_with_them(answer):
    """The best two: the sampled token is beside them, or one of them."""
    with served(answer) as (one,):
        got = ServerScorer([one.url], MOST, 60.0, at_once=2).score(RESPONSES, 2)
    for response, (logprobs, tokens, of_tokens) in zip(RESPONSES, got, strict=True):
        wanted = says(response.whole.tolist())[response.prompt_length - 1 :]
        assert (tokens.dtype, of_tokens.dtype) == (np.int32, np.float32)
        assert logprobs.tolist() == wanted
        assert tokens.tolist() == [[99, 98]] * response.length
        assert of_tokens.tolist() == [[-0.125, -0.25]] * response.length


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda path, body: of_vllm(path, body and {**body, "prompt_logprobs": 0}), "not 2 log-probs of each token"),
        (lambda path, body: of_ours(path, body and {**body, "top_k": 0}), "not 2 log-probs of each token"),
    ],
)
def test_a_server_that_returns_no_sets_is_named(answer, message):
    with served(answer) as (one,), pytest.raises(RolloutError, match=message):
        ServerScorer([one.url], MOST, 60.0, at_once=1).score(RESPONSES[:1], 2)


def test_a_failure_is_tried_again_at_the_next_address():
    with served(after(99, of_vllm), after(1, of_vllm)) as servers:
        got = ServerScorer([s.url for s in servers], MOST, 60.0, at_once=1).score(RESPONSES[:1])
    assert got[0].logprobs.tolist() == says([5, 6, 7, 8, 9])[1:]


def answering(**choice):
    """As vLLM's server, but for what it says of the prompt."""
    return lambda path, body: (200, {"choices": [choice]}) if path == "/v1/completions" else of_vllm(path, body)


@pytest.mark.parametrize(
    ("answer", "message", "times"),
    [
        (after(99, of_vllm), "response p/0 was not scored: .*status 503.*busy", 4),
        (after(99, of_vllm, status=400), "response p/0 was not scored: .*status 400", 1),
        (answering(), "no prompt log-probs of response p/0", 1),
        (answering(prompt_logprobs=None), "serve the teacher with vLLM", 1),
        (answering(prompt_logprobs=[None]), "1 log-probs of 5 tokens", 1),
        (answering(prompt_logprobs=[None, *[{"1": {"logprob": -1.0}}] * 4]), "KeyError: '7'", 1),
        *(
            (answering(prompt_logprobs=[None, *[{str(token): {"logprob": value} for token in range(10)}] * 4]), of, 1)
            for value, of in ((None, "TypeError"), ([-1.0], "TypeError"), (-(10**400), "OverflowError"))
        ),
    ],
)
def test_an_answer_that_cannot_be_used_is_named(answer, message, times):
    with served(answer) as (one,):
        with pytest.raises(RolloutError, match=message) as caught:
            ServerScorer([one.url], MOST, 60.0, at_once=1).score(RESPONSES[:1])
        assert one.url in str(caught.value)
        assert sum(path == "/v1/completions" for path, *_ in one.asked) == times


@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_an_impossible_log_prob_is_an_error(value, monkeypatch):
    monkeypatch.setattr("tests.unit.rollout.test_scoring.says", lambda tokens: [value] * (len(tokens) - 1))
    with served(of_ours) as (one,), pytest.raises(RolloutError, match=r"http.*token 0 is impossible"):
        ServerScorer([one.url], MOST, 60.0, at_once=1).score(RESPONSES[:1])


def test_a_token_that_the_teacher_cannot_say_is_no_error(monkeypatch):
    monkeypatch.setattr("tests.unit.rollout.test_scoring.says", lambda tokens: [-np.inf] * (len(tokens) - 1))
    with served(of_ours) as (one,):
        assert np.isneginf(ServerScorer([one.url], MOST, 60.0, at_once=1).score(RESPONSES[:1])[0].logprobs).all()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda path, body: of_vllm(path, body, longest=MOST), "takes 40 tokens; it needs 41"),
        (lambda path, body: of_vllm(path, body, longest="41"), "does not answer as a server that scores"),
        (of_ours, r"another config\.json than teacher\.path"),
        (lambda path, body: (404, {"detail": "Not Found"}), "does not answer as a server that scores"),
        (lambda path, body: (401, {"error": "a valid token is required"}), "a valid token"),
    ],
)
def test_a_server_that_cannot_score_is_found_at_the_start(answer, message):
    with served(answer) as (one,), pytest.raises(RolloutError, match=message):
        ServerScorer([one.url], MOST, 60.0, at_once=1, path=MODEL)


def test_an_address_where_nothing_answers_is_named():
    with served(of_vllm) as (one,):
        url = one.url
    with pytest.raises(RolloutError, match=f"{url} does not answer"):
        ServerScorer([url], MOST, 60.0, at_once=1)


def test_the_route_of_a_server_scores_while_it_is_closed():
    class Engine:
        async def generate(self, prompt, params, name):
            tokens, k = prompt["prompt_token_ids"], params.prompt_logprobs
            chosen = [x for token in tokens[1:] for x in (token, *range(90, 90 + k))]
            values = [-x / 4 for place in (1, 2, 3) for x in (place, *range(4, 4 + k))]
            flat = SimpleNamespace(token_ids=chosen, logprobs=values)
            yield SimpleNamespace(prompt_token_ids=tokens, prompt_logprobs=flat)

    score = partial(server.score, Engine(), itertools.count())
    guard = Guard(None, GuardState(token=TOKEN, score=score))

    def ask(body, token=TOKEN):
        return asyncio.run(call(guard, "/megatron_rl/score", body=body, token=token))

    wanted = {"token_ids": [1, 2, 3, 4], "first": 2}
    assert ask(wanted) == (200, {"tokens": [3, 4], "policy_versions": [0, 0]})
    assert asyncio.run(score(wanted)).inference_logprobs.tolist() == [-0.5, -0.75]
    assert asyncio.run(score(wanted)).head_tokens is None
    with_sets = asyncio.run(score({**wanted, "top_k": 2}))
    assert with_sets.inference_logprobs.tolist() == [-0.5, -0.75]
    assert (with_sets.head_tokens.tolist(), with_sets.head_logprobs.tolist()) == ([[90, 91]] * 2, [[-1.0, -1.25]] * 2)
    assert ask({"token_ids": [1, 2]})[0] == 400
    assert ask({}, token="another-token-of-tests")[0] == 401


def test_a_server_whose_weights_a_run_has_replaced_is_no_teacher():
    """One that a run has opened without sending any is: it holds what it was started with."""

    async def take(update, version, keep):
        return {"tensors": len(update["files"]), "bytes": 0}

    async def of_engine(body):
        return Rollout("", (), np.array([2], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")

    async def ask(*files: list[str]):
        guard = Guard(None, GuardState(token=TOKEN, score=of_engine, replace=take))
        for version, names in enumerate(files):
            update = {"version": version, "mode": "finish", "files": names}
            assert (await call(guard, "/megatron_rl/weights", body=update))[0] == 200
        return await call(guard, "/megatron_rl/score", body={"token_ids": [1, 2], "first": 1})

    assert [asyncio.run(ask(*files))[0] for files in ([], [[]], [[], ["part_0000"]])] == [200, 200, 400]
    assert "a run has replaced this server's weights" in asyncio.run(ask(["part_0000"], []))[1]["error"]


def test_ranks_begin_at_different_addresses(monkeypatch):
    with served(of_vllm, of_vllm) as servers:
        for rank in (0, 1):
            monkeypatch.setattr(scoring, "world_rank", lambda rank=rank: rank)
            ServerScorer([one.url for one in servers], MOST, 60.0, at_once=1).score([rollout([7, 8])])
        assert [sum(path == "/v1/completions" for path, *_ in one.asked) for one in servers] == [1, 1]


class Model:
    def __init__(self, offset) -> None:
        self.offset, self.asked, self.is_closed = offset, [], False

    def score(self, rollouts, top_k=0):
        self.asked += rollouts
        sets = [
            (np.full((r.length, top_k), 127 + np.arange(top_k)), np.full((r.length, top_k), -1.0)) for r in rollouts
        ]
        logprobs = [np.full(r.length, -self.offset, np.float32) for r in rollouts]
        return [Scores(x, *(s if top_k else ())) for x, s in zip(logprobs, sets, strict=True)]

    def close(self) -> None:
        self.is_closed = True


def teachers(monkeypatch, sources, **section):
    started: dict[str, Model] = {}

    def scorer(recipe, model, device):
        name = getattr(model, "data_sources", ["rest"])[0]
        if name == "broken":
            raise InputError("teacher: broken")
        return started.setdefault(name, Model(len(started) + 2.0))

    monkeypatch.setattr(scoring, "_scorer", scorer)
    recipe = tiny_recipe(
        teacher={"by_source": [{"data_sources": ["math", "more"]}, {"data_sources": ["code"]}], **section}
    )
    return lambda: Teachers(recipe, sources, "cpu"), started


def test_each_data_source_has_its_teacher(monkeypatch):
    start, started = teachers(monkeypatch, ["math", "rest", "unnamed"])
    groups = [
        Group(Prompt(str(i), [1], "", data_source=source), [rollout([1, 2]), rollout([3])])
        for i, source in enumerate(["math", "unnamed", "more", "math"])
    ]
    groups[0].rollouts[1].masked = True  # its tokens are not trained
    elsewhere = groups[2].rollouts[1]
    elsewhere.tokens = None
    run = start()
    assert sorted(started) == ["math", "rest"], "a teacher of no prompt is not started"
    metrics = run.teach(groups)
    given = [[None if r.teacher_logprobs is None else r.teacher_logprobs.tolist() for r in g.rollouts] for g in groups]
    math, rest = -started["math"].offset, -started["rest"].offset
    assert given == [[[math] * 2, [math]], [[rest] * 2, [rest]], [[math] * 2, None], [[math] * 2, [math]]]
    assert metrics == {
        "teacher/math/kl": -1.0 - math,
        "teacher/more/kl": -1.0 - math,
        "teacher/unnamed/kl": -1.0 - rest,
    }
    run.close()
    assert all(model.is_closed for model in started.values())


def test_a_token_that_the_policy_does_not_have_is_in_no_set(monkeypatch):
    """The tiny model has 128; a teacher may have rows that no token of its tokenizer uses."""
    start, _ = teachers(monkeypatch, ["rest"], by_source=[], top_k=2)
    taught = rollout([1, 2])
    start().teach([Group(Prompt("0", [1], "", data_source="rest"), [taught])])
    assert taught.teacher_tokens.tolist() == [[127, -1]] * 2
    assert taught.teacher_set_logprobs.tolist() == [[-1.0, -np.inf]] * 2


def test_where_one_does_not_start_the_others_are_ended(monkeypatch):
    start, started = teachers(monkeypatch, ["rest", "broken"], by_source=[{"data_sources": ["broken"]}])
    with pytest.raises(InputError, match="broken"):
        start()
    assert started["rest"].is_closed


def test_the_engine_beside_the_learner_has_room_for_one_more_token_and_rounds_nothing():
    sampled = {"quantization": "int4", "max_response_length": 10, "sampled_head": 4, "dtype": "fp32"}
    config = RolloutConfig(engine="vllm_server", tensor_parallel=2, **sampled)
    own = engine_config(config)
    assert (own.engine, own.tensor_parallel, own.max_response_length, own.dtype) == ("vllm", 1, 11, "fp32")
    assert (own.quantization, own.sampled_head, own.verify_refit) == (QuantizationConfig(), 0, False)
    assert engine_config(config, 16).sampled_head == 16
