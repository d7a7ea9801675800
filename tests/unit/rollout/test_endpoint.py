"""The endpoint of a conversation: what programs send and get, and what the learner sees of it."""

from __future__ import annotations

import asyncio
import json
import math
import random
import socket
from collections import Counter

import aiohttp
import numpy as np
import openai
import pytest

from megatron_rl.rollout import endpoint as module
from megatron_rl.rollout.conversation import Client, Requests, Talk, Turn, converse, hold
from megatron_rl.rollout.endpoint import IGNORED, MOST_BODY
from megatron_rl.rollout.generator import RolloutError, Sampling
from megatron_rl.routing import route_checksums
from tests.support.chats import (
    CHARACTERS,
    CLOSE,
    CUTS,
    END,
    SPACED,
    START,
    TEMPLATE,
    TOKENIZER,
    TOOLS,
    Policy,
    call_text,
    client_of,
    conversation_of,
    said,
)

USER = {"role": "user", "content": "12 and 1"}


def openai_of(endpoint, **options) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, **options)


# ---------------------------------------------------------------- tokens


def answer_of(rng: random.Random) -> list[int]:
    """Tokens such as a policy samples: words, spellings that no tokenizer chooses, calls, and half of one."""
    text = "".join(rng.choices("ab 12" + CHARACTERS, k=rng.randint(0, 8)))
    kind = rng.random()
    if kind < 0.4:
        text += call_text("add", {"a": rng.randint(0, 99), "why": "".join(rng.choices(CHARACTERS, k=3))})
    elif kind < 0.5:
        text += call_text("add", {"a": 1})[: rng.randint(5, 40)]
    tokens = []
    while text:  # any spelling
        width = next(w for w in (rng.choice([1, 2, 3]), 2, 1) if text[:w] in TOKENIZER.get_vocab())
        tokens.append(TOKENIZER.get_vocab()[text[:width]])
        text = text[width:]
    return [*tokens, END]


def written_by_hand(messages: list[dict], tools: list[dict]) -> str:
    """Messages up to the next answer, as `TEMPLATE` writes them."""
    head = "".join(json.dumps(tool) + "\n" for tool in tools)
    head = f"<|im_start|>system\n{head}<|im_end|>\n" if tools else ""
    rows = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return head + rows + "<|im_start|>assistant\n"


async def talk_at_random(session, endpoint, rng: random.Random, policy: Policy) -> list[str]:
    """Hold a conversation; return what was told between the policy's answers, as `TEMPLATE` writes it."""
    tools = TOOLS if rng.random() < 0.7 else []
    messages = [{"role": "system", "content": "be brief"}] if rng.random() < 0.3 else []
    messages.append({"role": "user", "content": "".join(rng.choices(CHARACTERS, k=6)) + "?"})
    told = [written_by_hand(messages, tools)]
    for _ in range(rng.randint(1, 4)):
        body = {"messages": messages, "temperature": rng.random(), "tools": tools or None}
        body["max_tokens"] = rng.choice([None, 3, 40])
        async with session.post(f"{endpoint.url}/chat/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
        (choice,) = answer["choices"]
        calls = choice["message"].get("tool_calls") or []
        new = [{"role": "tool", "content": f"r{rng.randint(0, 9)}", "tool_call_id": call["id"]} for call in calls]
        new += [{"role": "user", "content": "go on"}] if not calls or rng.random() < 0.2 else []
        closed = policy.turns[-1].tokens[-1:] == [END]
        told.append(("\n" if closed else "<|im_end|>\n") + written_by_hand(new, []))
        messages = [*messages, choice["message"], *new]
        assert (choice["finish_reason"] == "tool_calls") == (bool(calls) and closed)
        if not tools:
            assert not calls
    return told


def test_the_learner_sees_what_was_sampled():
    """1,000 conversations: tokens in order with the engine's log-probs, the template's text between them."""
    differ = Counter()

    async def one(number: int, session, template: str) -> None:
        rng = random.Random(number)
        policy = Policy(iter(lambda: answer_of(rng), None))
        _, client, _ = client_of(policy, None, [START], template=template)
        async with client.endpoint() as endpoint:
            session.headers["Authorization"] = f"Bearer {endpoint.key}"
            told = await talk_at_random(session, endpoint, rng, policy)
        conversation = endpoint.conversation
        sampled = np.array(conversation.response)[conversation.sampled].tolist()
        assert sampled == [token for turn in policy.turns for token in turn.tokens]
        logprobs = np.array(conversation.logprobs)
        assert logprobs[conversation.sampled].tolist() == [value for turn in policy.turns for value in turn.logprobs]
        assert (logprobs[~conversation.sampled] == 0).all()
        for earlier, later in zip(policy.turns, policy.turns[1:]):
            assert later.prompt[: len(earlier.prompt) + len(earlier.tokens)] == earlier.prompt + earlier.tokens
        if template is TEMPLATE:
            before = [0, *(len(turn.prompt) + len(turn.tokens) for turn in policy.turns)]
            assert [TOKENIZER.decode(t.prompt[n:]) for n, t in zip(before, policy.turns)] == told[:-1]
        whole = TOKENIZER.decode(conversation.tokens)
        differ[template] += TOKENIZER.encode(whole, add_special_tokens=False) != conversation.tokens

    async def all_of_them() -> None:
        async with aiohttp.ClientSession() as session:
            for number in range(1000):
                await one(number, session, (TEMPLATE, SPACED, CLOSE)[number % 3])

    asyncio.run(all_of_them())
    assert min(differ[template] for template in (TEMPLATE, SPACED, CLOSE)) > 100, "text says too little of tokens"


# ---------------------------------------------------------------- the client library


def test_a_client_library_gets_text_calls_and_logprobs():
    policy = Policy([*said("ab " + call_text("add", {"a": 1, "why": "x"}), "it is 12"), *said("so ab;c"), *said("!")])
    seen = []

    async def agent(client, problem):
        async with client.endpoint() as endpoint:
            chat = openai_of(endpoint).chat.completions
            messages = [USER]
            first = await chat.create(model="m", messages=messages, tools=TOOLS, logprobs=True, temperature=0.2)
            (call,) = first.choices[0].message.tool_calls
            assert json.loads(call.function.arguments) == {"a": 1, "why": "x"}
            messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "2"}]
            chunks = [
                chunk
                async for chunk in await chat.create(
                    model="m", messages=messages, tools=TOOLS, stream=True, stream_options={"include_usage": True}
                )
            ]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert (text, chunks[-2].choices[0].finish_reason) == ("it is 12", "stop")
            assert chunks[-1].usage.completion_tokens == len(policy.turns[1].tokens)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and?"}]
            stopped = await chat.create(model="m", messages=messages, tools=TOOLS, stop=[";", "zz"])
            messages += [stopped.choices[0].message, {"role": "user", "content": "and?"}]
            last = await chat.create(model="m", messages=messages, tools=TOOLS, tool_choice="none", max_tokens=1)
            seen.extend([first, stopped, last])
            assert [model.id async for model in openai_of(endpoint).models.list()] == ["policy"]
        return endpoint.conversation

    conversation = conversation_of(policy, agent)
    first, stopped, last = seen
    assert (first.choices[0].finish_reason, first.choices[0].message.content) == ("tool_calls", "ab")
    assert [one.logprob for one in first.choices[0].logprobs.content] == policy.turns[0].logprobs
    assert first.usage.prompt_tokens == len(policy.turns[0].prompt)
    assert stopped.choices[0].message.content == "so ab"
    assert last.choices[0].finish_reason == "length"
    assert conversation.num_turns == 4
    assert TOKENIZER.decode(conversation.tokens).count("<|im_start|>assistant") == 4
    assert policy.asked[0][1]["temperature"] == 1.0
    assert END in policy.asked[2][1]["stop_token_ids"]
    # What stops is the end of the turn; what was sampled behind it is nobody's.
    assert TOKENIZER.decode([t for t, s in zip(conversation.response, conversation.sampled) if s]).count(";c") == 0


def test_a_turn_that_is_cut_is_sealed_for_what_stays():
    rng = np.random.default_rng(0)
    prompt, tokens, first = [5, 6, 7, 8], [9, 10, 11, 12, 13], 2
    whole, routes = np.array([*prompt, *tokens]), rng.integers(0, 8, (8 - first, 3, 2), dtype=np.uint8)
    turn = Turn(prompt, tokens, [-1.0] * 5, "length", routes, first, route_checksums("s", whole, routes, first))
    for length in (1, 3, 5):
        cut = turn.cut(length, "s")
        rows = len(prompt) + length - 1 - first
        assert (cut.tokens, len(cut.logprobs), len(cut.routes)) == (tokens[:length], length, rows)
        assert np.array_equal(cut.checksums, route_checksums("s", whole[: len(prompt) + length], routes[:rows], first))


# ---------------------------------------------------------------- requests that are refused

TOOL_WITHOUT_PROPERTIES = {"type": "function", "function": {"name": "f", "parameters": {"properties": [1]}}}
REFUSED = [
    ({"n": 2}, 400, "unsupported_value", "n"),
    ({"top_logprobs": 5}, 400, "unsupported_value", "top_logprobs"),
    ({"presence_penalty": 0.1}, 400, "unsupported_value", "presence_penalty"),
    ({"frequency_penalty": 1}, 400, "unsupported_value", "frequency_penalty"),
    ({"logit_bias": {"5": 100}}, 400, "unsupported_value", "logit_bias"),
    ({"response_format": {"type": "json_object"}}, 400, "unsupported_value", "response_format"),
    ({"tool_choice": "required", "tools": TOOLS}, 400, "unsupported_value", "tool_choice"),
    ({"top_k": 5}, 400, "unsupported_parameter", "top_k"),
    ({"messages": []}, 400, "invalid_value", "messages"),
    ({"messages": "hi"}, 400, "invalid_value", "messages"),
    ({"messages": ["hi"]}, 400, "invalid_value", "messages[0]"),
    ({"tools": [3]}, 400, "invalid_value", "tools"),
    ({"stop": [""]}, 400, "invalid_value", "stop"),
    ({"stop": ["a"] * 5}, 400, "invalid_value", "stop"),
    ({"max_tokens": 0}, 400, "invalid_value", "max_tokens"),
    ({"max_completion_tokens": True}, 400, "invalid_value", "max_completion_tokens"),
    ({"stream": 1}, 400, "invalid_value", "stream"),
    ({"stream_options": []}, 400, "invalid_value", "stream_options"),
    ({"messages": [{"role": "user", "content": "x" * 3000}]}, 400, "context_length_exceeded", None),
    ({"messages": [{"role": "user", "content": "<|im_end|>"}]}, 400, "invalid_value", None),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "invalid_json", None),
    ({"messages": [USER] * (module.MOST_MESSAGES + 1)}, 400, "invalid_value", "messages"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]}, 400, "invalid_value", "tools"),
    ({"tools": [TOOL_WITHOUT_PROPERTIES]}, 400, "invalid_value", "tools"),
]
SERVED = [
    dict.fromkeys(IGNORED, 0.5),
    {"n": 1, "top_logprobs": 0, "logit_bias": {}, "response_format": {"type": "text"}, "presence_penalty": 0.0},
    {"n": None, "stop": None, "tools": None, "stream": None, "max_tokens": None, "response_format": None},
    {"stop": "z", "max_completion_tokens": 1 << 40},
]


async def post(endpoint, body, path: str = "/chat/completions", key: str | None = None):
    headers = {"Authorization": f"Bearer {endpoint.key if key is None else key}"}
    data = body if isinstance(body, bytes | str) else json.dumps(body)
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(endpoint.url + path, data=data) as response,
    ):
        return response.status, await response.json(content_type=None)


def test_each_key_of_a_request_is_served_ignored_or_refused():
    policy = Policy(said(*["ab"] * 100))

    async def agent(client, problem):
        for changes, status, code, key in REFUSED:
            async with client.endpoint() as endpoint:
                got, answer = await post(endpoint, {"messages": [USER]} | changes)
                assert (got, answer["error"]["code"], answer["error"]["param"]) == (status, code, key), changes
                assert answer["error"]["message"]
        most = json.dumps({"messages": [USER] * module.MOST_MESSAGES}).encode()
        assert len(module.read_request(most).messages) == module.MOST_MESSAGES
        fields = [policy.asked[-1][1] | {"seed": 0}]
        for changes in SERVED:
            async with client.endpoint() as endpoint:
                got, answer = await post(endpoint, {"messages": [USER]} | changes)
                assert got == 200, answer
            fields.append(policy.asked[-1][1] | {"seed": 0, "stop_token_ids": [END]})
        assert {one["temperature"] for one in fields} == {1.0}
        return endpoint.conversation

    assert conversation_of(policy, agent).num_turns == 1


HISTORIES = [
    (lambda m: [{"role": "user", "content": "13 and 1"}, *m[1:]], 409, "messages[0]"),
    (lambda m: [m[0], m[1] | {"content": "ab "}, *m[2:]], 409, "messages[1]"),
    (lambda m: [m[0], *m[2:]], 409, "messages[1]"),
    (lambda m: m[:1], 409, "messages[1]"),
    (lambda m: m[:2], 409, "messages"),
    (lambda m: [*m[:2], m[1], m[2]], 409, "messages[2]"),
    (lambda m: [{"role": "system", "content": "x"}, *m], 409, "messages[0]"),
    (lambda m: m, 200, None),
]


@pytest.mark.parametrize(("change", "status", "where"), HISTORIES)
def test_a_history_that_was_changed_is_told(change, status, where):
    async def agent(client, problem):
        async with client.endpoint() as endpoint:
            _, answer = await post(endpoint, {"messages": [USER]})
            messages = [USER, answer["choices"][0]["message"], {"role": "user", "content": "more"}]
            got, answer = await post(endpoint, {"messages": change(messages)})
            assert got == status
            if status != 200:
                assert (answer["error"]["code"], answer["error"]["param"]) == ("history_changed", where)
            got, answer = await post(endpoint, {"messages": messages, "tools": TOOLS})
            assert got == 409
            got, _ = await post(endpoint, {"messages": messages})
            assert got == (200 if status != 200 else 409)
        return endpoint.conversation

    assert conversation_of(Policy(said("ab", "c")), agent).num_turns == 2


def test_a_template_that_rewrites_is_refused_where_it_would():
    async def agent(client, problem):
        async with client.endpoint() as endpoint:
            _, answer = await post(endpoint, {"messages": [USER], "tools": TOOLS})
            message = answer["choices"][0]["message"]
            result = {"role": "tool", "content": "2", "tool_call_id": message["tool_calls"][0]["id"]}
            got, answer = await post(endpoint, {"messages": [USER, message, result, USER], "tools": TOOLS})
            assert (got, answer["error"]["code"]) == (400, "template_rewrites_history")
            got, _ = await post(endpoint, {"messages": [USER, message, result], "tools": TOOLS})
            assert got == 200
        return endpoint.conversation

    thinks = "<think>\nhm\n</think>\n\n" + call_text("add", {"a": 1})
    conversation = conversation_of(Policy(said(thinks, "2")), agent, template=CUTS)
    assert conversation.num_turns == 2
    assert "hm" in TOKENIZER.decode(conversation.tokens)


def test_turns_and_room_are_bounded():
    async def agent(client, problem):
        async with client.endpoint(max_turns=2) as endpoint:
            messages = [USER]
            for _ in range(2):
                _, answer = await post(endpoint, {"messages": messages})
                messages = [*messages, answer["choices"][0]["message"], USER]
            assert (await post(endpoint, {"messages": messages}))[1]["error"]["code"] == "max_turns"
        return endpoint.conversation

    assert conversation_of(Policy(said("a", "b", "c")), agent).num_turns == 2


def test_a_turn_needs_room_for_one_token():
    async def agent(client, problem):
        conversation = client.conversation()
        assert await conversation.reply([START] * conversation.room) is None
        assert conversation.truncated
        turn = await conversation.reply([START] * (conversation.room - 1))
        assert (len(turn.tokens), conversation.room) == (1, 0)
        return conversation

    assert conversation_of(Policy(said("abc")), agent).finish_reason == "length"


def test_a_text_that_stops_with_the_last_token_that_is_allowed_is_no_cut():
    async def agent(client, problem):
        async with client.endpoint() as endpoint:
            first = {"messages": [USER], "stop": "b;c", "max_tokens": len(TOKENIZER.encode("ab;c"))}
            _, answer = await post(endpoint, first)
            assert answer["choices"][0]["finish_reason"] == "stop"
            messages = [USER, answer["choices"][0]["message"]]
            too_long = [*messages, USER | {"content": "x" * 3000}]
            assert (await post(endpoint, {"messages": too_long}))[1]["error"]["code"] == "context_length_exceeded"
            assert endpoint.conversation.finish_reason == "length"
            assert (await post(endpoint, {"messages": [*messages, USER]}))[0] == 200
        return endpoint.conversation

    assert conversation_of(Policy(said("ab;cd", "a")), agent).finish_reason == "stop"


def test_nothing_hidden_stays_in_the_conversation_when_the_endpoint_fails_behind_a_turn(monkeypatch):
    monkeypatch.setattr(module, "calls_in", lambda text, tools: 1 / 0)

    async def agent(client, problem):
        async with client.endpoint() as endpoint:
            body = {"messages": [USER], "tools": TOOLS}
            assert (await post(endpoint, body))[1]["error"]["code"] == "internal"
            assert (await post(endpoint, body))[1]["error"]["code"] == "history_changed"
        return endpoint.conversation

    prompt = TOKENIZER.encode("<|im_start|>", add_special_tokens=False)
    assert conversation_of(Policy(said("a", "b")), agent, prompt=prompt).num_turns == 1


def test_first_messages_that_are_not_the_problem_are_told():
    problem = TOKENIZER.encode("<|im_start|>user\n12 and 2", add_special_tokens=False)

    async def agent(client, problem):
        async with client.endpoint() as endpoint:
            got, answer = await post(endpoint, {"messages": [USER]})
            assert (got, answer["error"]["code"]) == (400, "other_prompt")
            assert "at token 11" in answer["error"]["message"], answer
            await post(endpoint, {"messages": [{"role": "user", "content": "12 and 2?"}]})
        return endpoint.conversation

    assert conversation_of(Policy(said("a")), agent, prompt=problem).response[:2] == TOKENIZER.encode("?<|im_end|>")


# ---------------------------------------------------------------- hostile clients, and those that are gone


async def raw(endpoint, data: bytes, wait_s: float = 60.0) -> bytes:
    """What a connection gets that sends ``data`` and waits."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(endpoint.url.split(":")[2].split("/")[0]))
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(), wait_s)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def head_of(endpoint, *lines: str, path: str = "/v1/chat/completions") -> bytes:
    first = [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {endpoint.key}"]
    return "\r\n".join([*first, *lines, "", ""]).encode()


def test_nobody_without_the_key_is_answered():
    async def agent(client, problem):
        async with client.endpoint() as one, client.endpoint() as other:
            assert one.key != other.key
            for key in ("", "x", other.key, one.key[:-1], one.key + "x", "é"):
                for path in ("/chat/completions", "/models", "/health"):
                    got, answer = await post(one, {"messages": [USER]}, path, key)
                    assert (got, answer["error"]["code"]) == (401, "invalid_api_key")
            await post(one, {"messages": [USER]})
            assert (await post(one, {}, "/completions"))[0] == 404
            assert b" 401 " in await raw(one, b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert one.url.startswith("http://127.0.0.1:")
        with pytest.raises(aiohttp.ClientConnectionError):
            await post(one, {"messages": [USER]})
        return one.conversation

    # The other conversation, which nobody spoke to, samples its one token.
    assert conversation_of(Policy(said("a", "b")), agent).num_turns == 1


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"messages": ' + b"[" * 50_000])
def test_a_body_that_is_none_is_refused(body):
    async def agent(client, problem):
        async with client.endpoint() as endpoint:
            assert (await post(endpoint, body))[0] == 400
            await post(endpoint, {"messages": [USER]})
        return endpoint.conversation

    assert conversation_of(Policy(said("a")), agent).num_turns == 1


def test_bodies_heads_and_waits_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "CLOSE_S", 0.1)

    async def agent(client, problem):
        async with client.endpoint() as endpoint:
            long = f"Content-Length: {MOST_BODY + 1}"
            assert b" 413 " in await raw(endpoint, head_of(endpoint, long))
            chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
            chunked = head_of(endpoint, "Transfer-Encoding: chunked") + chunk * (MOST_BODY // 0x100000 + 1)
            assert (await raw(endpoint, chunked + b"0\r\n\r\n"))[:12] in (b"HTTP/1.1 413", b"")
            assert b" 400 " in await raw(endpoint, head_of(endpoint, "X-Long: " + "x" * 100_000))
            assert b" 400 " in await raw(endpoint, b"no HTTP at all\r\n\r\n")
            monkeypatch.setattr(module, "BODY_S", 0.05)
            assert b" 408 " in await raw(endpoint, head_of(endpoint, "Content-Length: 10") + b"{")
            port = endpoint._server.sockets[0].getsockname()[1]
            idle = [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(module.MOST_CONNECTIONS + 20)]
            while len(endpoint._web.connections) > module.MOST_CONNECTIONS:
                await asyncio.sleep(0.01)
            assert b" 401 " in await raw(endpoint, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"), (
                "those who wait lock nobody out"
            )
            monkeypatch.setattr(module, "HEADER_S", 0.05)
            for writer in idle:
                writer.close()
            while endpoint._web.connections:
                await asyncio.sleep(0.01)
            assert await raw(endpoint, b"POST /v1/chat") == b"", "its head did not come in time"
            assert await raw(endpoint, b"") == b""
            monkeypatch.undo()
            assert (await post(endpoint, {"messages": [USER]}))[0] == 200
        return endpoint.conversation

    assert conversation_of(Policy(said("a")), agent).num_turns == 1


def test_only_this_machine_is_listened_to():
    async def agent(client, problem):
        async with client.endpoint() as endpoint:
            (listener,) = endpoint._server.sockets
            assert (listener.family, listener.getsockname()[0]) == (socket.AF_INET, "127.0.0.1")
            await post(endpoint, {"messages": [USER]})
        return endpoint.conversation

    conversation_of(Policy(said("a")), agent)


class Slow:
    """`TurnEngine` that takes ``steps`` for an answer; a token's value is the version of the weights."""

    def __init__(self, steps: int) -> None:
        self.steps, self.version, self.running, self.aborted, self.together = steps, 3, {}, [], []
        self.num_asked = 0

    def submit(self, tokens, fields):
        self.num_asked += 1
        self.running[str(self.num_asked)] = [0, len(tokens)]
        return str(self.num_asked)

    def step(self):
        self.together.append(len(self.running))
        for state in self.running.values():
            state[0] += 1
        done = [name for name, (steps, _) in self.running.items() if steps == self.steps]
        return [(name, self.running.pop(name)[1]) for name in done]

    def to_turn(self, tokens, output):
        versions = np.array([self.version, self.version + 1], np.int32)
        self.version += 1
        return Turn(tokens, [40, END], [-1.0, -2.0], "stop", versions=versions, num_cached=0)

    def abort(self, names):
        self.aborted += names
        for name in names:
            self.running.pop(name)


def held(engine, *functions, deadline: float = math.inf, **options) -> list:
    results = [None] * len(functions)

    async def one(place, requests):
        results[place] = await converse(*client_of(requests, functions[place], [START], **options))

    async def all_of_them():
        requests = Requests(engine)
        conversations = [lambda place=place: one(place, requests) for place in range(len(functions))]
        await hold(conversations, requests, deadline)

    asyncio.run(all_of_them())
    return results


def test_a_client_that_is_gone_takes_its_turn_with_it():
    engine = Slow(50)

    async def agent(client, problem):
        async with client.endpoint() as endpoint:
            call = openai_of(endpoint, max_retries=0).chat.completions.create(model="m", messages=[USER])
            asked = asyncio.ensure_future(call)
            while not engine.running:
                await asyncio.sleep(0)
            asked.cancel()
            while not engine.aborted:
                await asyncio.sleep(0)
            assert endpoint.conversation.num_turns == 0
            engine.steps = 1
            assert (await post(endpoint, {"messages": [USER]}))[0] == 200
        return endpoint.conversation

    engine.steps = 10**9
    (conversation,) = held(engine, agent)
    assert engine.aborted == ["1"]
    assert conversation.num_turns == 1
    assert conversation.response[-2:] == [40, END]


def test_an_answer_under_way_ends_with_the_conversation():
    engine = Slow(10**9)

    async def agent(client, problem):
        async with client.endpoint() as endpoint:
            asked = asyncio.ensure_future(post(endpoint, {"messages": [USER]}))
            while not engine.running:
                await asyncio.sleep(0)
            engine.steps = 1
            engine.running.clear()
        await asyncio.gather(asked, return_exceptions=True)
        assert asked.exception() is not None
        return endpoint.conversation

    engine.abort = engine.aborted.extend
    (conversation,) = held(engine, agent)
    assert engine.aborted == ["1"]
    assert (conversation.num_turns, conversation.finish_reason) == (1, "length")


def test_many_run_together_and_weights_change_between_their_turns():
    async def agent(client, problem):
        async with client.endpoint() as endpoint:
            messages = [USER]
            for _ in range(3):
                _, answer = await post(endpoint, {"messages": messages})
                messages = [*messages, answer["choices"][0]["message"], USER]
        return endpoint.conversation

    engine = Slow(400)
    conversations = held(engine, *[agent] * 20)
    assert max(engine.together) > 10
    for conversation in conversations:
        assert conversation.num_turns == 3
        versions, sampled = conversation.policy_versions, conversation.sampled
        assert len(versions) == len(conversation.response)
        assert (np.diff(versions[sampled]) > 0).all()
        read_again = [len(conversation.response) - 2]  # all before the last turn's sample
        assert conversation.num_reread <= 2 * read_again[0]
        assert conversation.num_reread > 0


def test_the_deadline_closes_the_address():
    addresses = []

    async def agent(client, problem):
        async with client.endpoint() as endpoint:
            addresses.append(endpoint.url.split("/")[2].split(":"))
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        held(Slow(1), agent, deadline=-math.inf)
    ((host, port),) = addresses
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))


def test_two_requests_at_once_take_turns():
    async def agent(client, problem):
        async with client.endpoint() as endpoint:
            both = await asyncio.gather(*(post(endpoint, {"messages": [USER]}) for _ in range(2)))
            assert sorted(status for status, _ in both) == [200, 409]
        return endpoint.conversation

    assert held(Slow(3), agent)[0].num_turns == 1


def test_a_fault_of_the_engine_ends_the_run_whatever_the_program_makes_of_it():
    class Broken(Policy):
        async def answer(self, tokens, fields, first_row):
            raise RolloutError("server 3 is gone")

    async def agent(client, problem):
        async with client.endpoint() as endpoint:
            assert (await post(endpoint, {"messages": [USER]}))[0] == 503
        return endpoint.conversation

    with pytest.raises(RolloutError, match="server 3 is gone"):
        conversation_of(Broken([]), agent)


def test_a_program_without_an_answer_ends_no_run():
    async def agent(client, problem):
        async with client.endpoint() as endpoint:
            await post(endpoint, {"messages": [USER], "n": 3})
        return endpoint.conversation

    conversation = conversation_of(Policy(said("ab")), agent)
    assert (len(conversation.response), conversation.finish_reason) == (1, "length")
    assert "n: 3 is not served" in conversation.refusal


def test_a_program_that_fails_before_its_first_answer_may_be_caught():
    async def agent(client, problem):
        try:
            async with client.endpoint() as endpoint:
                raise TimeoutError("the program hangs")
        except TimeoutError:
            return endpoint.conversation

    conversation = conversation_of(Policy(said("ab")), agent)
    assert (len(conversation.response), conversation.finish_reason) == (1, "length")


def test_there_is_no_endpoint_without_a_template():
    talk, _, request = client_of(Policy([]), None, [START])
    bare = Client(Talk("f", None, talk.encode, talk.decode), request, None, Sampling(8), [END], 200)
    with pytest.raises(RolloutError, match=r"set data\.prompt\.chat_template"):
        bare.endpoint()
