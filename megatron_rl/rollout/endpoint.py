"""A conversation as a chat endpoint: programs that speak OpenAI's protocol hold it, over HTTP on this machine.

Behind a request are the tokens of the conversation, which only grow. New messages are rendered and told, the policy
continues, and its text goes back; log-probs, routes and weights' versions stay here.

What becomes of a request's keys: `USED` decide the answer. `IGNORED` are what clients send by habit, and would change
the distribution that is sampled from, which is the recipe's, or nothing. `NEUTRAL` may only have the value that
changes nothing. Any other key is refused by name.
"""

from __future__ import annotations

import asyncio
import bisect
import hmac
import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from megatron_rl.errors import shown
from megatron_rl.rollout.chat import NO_REQUEST, Chat, ChatError, Message, calls_in, message_of, same
from megatron_rl.rollout.generator import RolloutError

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
MOST_BODY = 8 << 20  # bytes of a request
MOST_CONNECTIONS = 64  # of one conversation
MOST_MESSAGES = 1024  # of a request
HEADER_S = BODY_S = 30.0  # for a client to send a request's head, then its body
CANCEL_S = 0.01  # between the end of a conversation and that of a turn under way; 0 would be no limit
CLOSE_S = 1.0  # for a client that is answered to take the rest

USED = (
    *("model", "messages", "tools", "tool_choice", "stop", "max_tokens", "max_completion_tokens"),
    *("stream", "stream_options", "logprobs"),
)
IGNORED = (
    *("temperature", "top_p", "seed", "user", "metadata", "store", "parallel_tool_calls", "service_tier"),
    *("reasoning_effort", "verbosity", "safety_identifier", "prompt_cache_key"),
)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}


@dataclass(frozen=True)
class Asked:
    """A request for one answer."""

    model: str
    messages: list[Message]
    tools: list[Any]
    calls: bool  # whether tool calls are read
    stops: list[str]
    max_tokens: int | None
    stream: bool
    usage: bool  # at the end of a stream
    logprobs: bool


def read_request(body: bytes) -> Asked:
    """Return what ``body`` asks for. Raises `ChatError`."""
    try:
        given = json.loads(body)
        json.dumps(given, allow_nan=False, ensure_ascii=False).encode()  # no infinity, no half of a character
    except (ValueError, RecursionError) as error:
        raise ChatError(f"the body is no JSON: {shown(error, 100)}", code="invalid_json") from error
    if not isinstance(given, dict):
        raise ChatError("the body is no mapping", code="invalid_json")
    given = {key: value for key, value in given.items() if value is not None}
    for key, value in given.items():
        if key in NEUTRAL and value not in NEUTRAL[key]:
            only = json.dumps(NEUTRAL[key][0])
            raise ChatError(
                f"{key}: {shown(value, 60)} is not served, only {only}", code="unsupported_value", param=key
            )
        if key not in USED and key not in IGNORED and key not in NEUTRAL:
            raise ChatError(f"{shown(key, 60)} is not served", code="unsupported_parameter", param=key[:60])
    choice = given.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise ChatError(
            f"tool_choice: {shown(choice, 60)} would change what is sampled from; auto and none are served",
            code="unsupported_value",
            param="tool_choice",
        )
    messages, options = _typed(given, "messages", list, []), _typed(given, "stream_options", dict, {})
    if not 0 < len(messages) <= MOST_MESSAGES:
        raise ChatError(f"messages: a list of 1 to {MOST_MESSAGES} is wanted", param="messages")
    tools = _tools(given)
    return Asked(
        shown(given.get("model", "policy"), 100).strip("'"),
        [message_of(message, number) for number, message in enumerate(messages)],
        tools,
        bool(tools) and choice == "auto",
        _stops(given),
        _max_tokens(given),
        _typed(given, "stream", bool, False),
        options.get("include_usage") is True,
        _typed(given, "logprobs", bool, False),
    )


def _typed(given: dict[str, Any], key: str, kind: type, default: Any) -> Any:
    value = given.get(key, default)
    if not isinstance(value, kind):
        raise ChatError(f"{key}: {shown(value, 60)} is no {kind.__name__}", param=key)
    return value


def _tools(given: dict[str, Any]) -> list[Any]:
    tools = _typed(given, "tools", list, [])
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ChatError(f"tools: {shown(tool, 60)} is no function with a name", param="tools")
        schema = function.get("parameters") or {}
        if not isinstance(schema, dict) or not isinstance(schema.get("properties") or {}, dict):
            raise ChatError(f"tools: parameters {shown(schema, 60)} are no JSON schema of an object", param="tools")
    return tools


def _stops(given: dict[str, Any]) -> list[str]:
    stops = given.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or len(stops) > 4 or not all(isinstance(stop, str) and stop for stop in stops):
        raise ChatError(f"stop: {shown(stops, 60)} is no text, nor a list of up to four", param="stop")
    return stops


def _max_tokens(given: dict[str, Any]) -> int | None:
    key = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    value = given.get(key)
    if value is not None and (type(value) is not int or value < 1):
        raise ChatError(f"{key}: {shown(value, 60)} is no number from 1 on", param=key)
    return value


class Endpoint:
    """The address of one conversation, open inside ``async with``: `url`, `key`, and the `conversation` to return."""

    def __init__(
        self,
        conversation: Any,
        chat: Chat,
        encode: Callable[[str], list[int]],
        decode: Callable[[list[int]], str],
        max_turns: int,
    ) -> None:
        self.conversation, self.key, self.url = conversation, secrets.token_urlsafe(32), ""
        self._chat, self._encode, self._decode, self._max_turns = chat, encode, decode, max_turns
        self._held: list[Message] = []  # messages that the tokens of the conversation are, the last answer included
        self._tools: list[Any] = []
        self._stop: list[int] = []  # the token that ended the last answer
        self._lock = asyncio.Lock()  # a conversation has one turn at a time
        self._fault: RolloutError | None = None  # of the engine
        self._refusal = ""  # what the program was refused first
        self._late: dict[Any, asyncio.TimerHandle] = {}  # connections that sent no head of a request so far

    async def __aenter__(self) -> Endpoint:
        self._web = web.Server(
            self._handle,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=HEADER_S,
            lingering_time=CLOSE_S,
        )
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connect, HOST, 0)
        self.url = f"http://{HOST}:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._server.close()
        for timer in self._late.values():
            timer.cancel()
        for connection in self._web.connections:  # those that wait end at once, the others have a moment
            connection.close()
        await asyncio.sleep(0)
        await self._web.shutdown(CANCEL_S)
        if error is not None and not isinstance(error, Exception):
            return
        if self._fault is not None:
            raise self._fault
        if not self.conversation.num_turns:  # the program never came to its first answer
            refusal = self._refusal or NO_REQUEST
            logger.warning("endpoint: the program got no answer: %s", refusal)
            await self.conversation.generate(max_tokens=1)
            self.conversation.truncated, self.conversation.refusal = True, refusal

    def _connect(self) -> asyncio.Protocol:
        """A connection, which is closed where no request comes in time, or where many others come before its own."""
        if len(self._late) >= MOST_CONNECTIONS:
            self._drop(next(iter(self._late)))
        protocol = self._web()
        self._late[protocol] = asyncio.get_running_loop().call_later(HEADER_S, self._drop, protocol)
        return protocol

    def _drop(self, protocol: Any) -> None:
        self._late.pop(protocol).cancel()
        if protocol.transport is not None:
            protocol.transport.abort()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if (timer := self._late.pop(request.protocol, None)) is not None:
            timer.cancel()
        try:
            return await self._answer(request)
        except ChatError as error:
            self._refusal = self._refusal or str(error)
            return _error(error)
        except RolloutError as error:  # the engine's: the run ends with it when the function leaves the endpoint
            self._fault = error
            return _error(ChatError("the engine failed", 503, "engine"))
        except ConnectionError:  # the client is gone, while it is answered
            raise
        except Exception as error:  # noqa: BLE001 - whatever a client sent, its run goes on
            logger.warning("endpoint: %s: %s", type(error).__name__, shown(error))
            return _error(ChatError(f"{type(error).__name__} in the endpoint", 500, "internal"))

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        sent = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(sent.encode(errors="replace"), self.key.encode()):
            raise ChatError("the key is missing, or another conversation's", 401, "invalid_api_key")
        route = f"{request.method} {request.path}"
        if route == "GET /health":
            return web.json_response({})
        if route == "GET /v1/models":
            return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": ""}]})
        if route != "POST /v1/chat/completions":
            raise ChatError(f"{shown(route, 100)} is not served", 404, "not_found")
        asked = read_request(await _body(request))
        async with self._lock:
            turn, message, reason = await self._turn(asked)
        answer = _Answer(asked, turn, message, reason, self._decode, f"chatcmpl-{self.conversation.num_turns}")
        if not asked.stream:
            return web.json_response(answer.whole())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for chunk in answer.chunks():
            await response.write(f"data: {chunk}\n\n".encode())
        await response.write_eof()
        return response

    async def _turn(self, asked: Asked) -> tuple[Any, Message, str]:
        """The policy's next turn, its message and why it ended. Nothing is kept of a turn that is cancelled."""
        if self.conversation.num_turns >= self._max_turns:
            raise ChatError(f"the conversation has its {self._max_turns} turns", 429, "max_turns")
        told = self._told(asked)
        single = [ids[0] for stop in asked.stops if len(ids := self._encode(stop)) == 1]
        turn = await self.conversation.reply(told, asked.max_tokens, single, lambda tokens: self._cut(tokens, asked))
        if turn is None:
            raise ChatError(
                f"the messages leave no room for an answer; of rollout.max_response_length "
                f"{self.conversation.room} tokens are left, and {len(told)} were sent",
                code="context_length_exceeded",
            )
        text = self._decode(turn.tokens)
        text = text[: min((place for stop in asked.stops if (place := text.find(stop)) >= 0), default=len(text))]
        reason = turn.finish_reason
        message: Message = {"role": "assistant", "content": text}
        self._held, self._tools = [*asked.messages, message], asked.tools
        self._stop = turn.tokens[-1:] if turn.finish_reason == "stop" else []
        if asked.calls:
            content, calls = calls_in(text, asked.tools)
            if calls:
                for call in calls:  # ids are those of the conversation
                    call["id"] = f"{call['id']}_{self.conversation.num_turns}"
                message |= {"content": content, "tool_calls": calls}
                reason = "tool_calls" if reason == "stop" else reason
        self._held[-1] = message
        return turn, message, reason

    def _cut(self, tokens: list[int], asked: Asked) -> int | None:
        """How many of ``tokens`` it takes to write the first of the texts that stop; None where there is none."""

        def stops(length: int) -> bool:
            text = self._decode(tokens[:length])
            return any(stop in text for stop in asked.stops)

        return bisect.bisect_left(range(len(tokens)), True, key=stops) if stops(len(tokens)) else None

    def _told(self, asked: Asked) -> list[int]:
        """The tokens between the conversation's and the next answer. Raises `ChatError` for another history."""
        messages, held = asked.messages, self._held
        if not held:
            return self._after_the_prompt(self._chat.first(messages, asked.tools))
        for number, one in enumerate(held):
            if number == len(messages) or not same(one, messages[number]):
                found = shown(messages[number]["content"], 60) if number < len(messages) else "the end"
                raise ChatError(
                    f"messages[{number}] is not what the conversation has there: {found}, not {one['role']} "
                    f"{shown(one['content'], 60)}. A conversation only grows: send its messages again as they were",
                    409,
                    "history_changed",
                    f"messages[{number}]",
                )
        if asked.tools != self._tools:
            raise ChatError("tools: others than before, and they stand before the messages", 409, "history_changed")
        new = messages[len(held) :]
        for number, message in enumerate(new, len(held)):
            where = f"messages[{number}]"
            if message["role"] == "assistant":
                raise ChatError(f"{where}: an answer that the policy did not give", 409, "history_changed", where)
            if why := self._chat.rewrites.get(message["role"]):
                raise ChatError(f"{where}: {why}", code="template_rewrites_history", param=where)
        if not new:
            raise ChatError("messages: none follows the last answer", 409, "history_changed", "messages")
        told = self._chat.following(held, new, asked.tools)
        return told[1:] if told[:1] == self._stop else told  # the policy closed its answer itself

    def _after_the_prompt(self, tokens: list[int]) -> list[int]:
        prompt = self.conversation.tokens
        if tokens[: len(prompt)] == prompt:
            return tokens[len(prompt) :]
        number = next((i for i, (one, other) in enumerate(zip(tokens, prompt)) if one != other), len(tokens))
        wanted, found = (self._decode(some[number : number + 12]) for some in (prompt, tokens))
        raise ChatError(
            f"the first messages must render to what begins with the problem's prompt: at token {number} it has "
            f"{wanted!r}, and they have {found!r}. Send the messages and tools of the data's row, or put those that "
            "the program sends into the data",
            code="other_prompt",
            param="messages",
        )


class _Answer:
    """One turn in OpenAI's form."""

    def __init__(
        self, asked: Asked, turn: Any, message: Message, reason: str, decode: Callable[[list[int]], str], name: str
    ) -> None:
        self._asked, self._turn, self._decode, self._reason = asked, turn, decode, reason
        self._head = {"id": name, "created": int(time.time()), "model": asked.model}
        calls = [
            call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
            for call in message.get("tool_calls", ())
        ]
        self._message = message | {"content": message["content"] or (None if calls else "")}
        if calls:
            self._message["tool_calls"] = calls

    def _usage(self) -> dict[str, int]:
        prompt, answer = len(self._turn.prompt), len(self._turn.tokens)
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}

    def _logprobs(self) -> dict[str, Any] | None:
        if not self._asked.logprobs:
            return None
        texts = [self._decode([token]) for token in self._turn.tokens]
        pairs = zip(texts, self._turn.logprobs)
        return {
            "content": [
                {"token": text, "logprob": float(value), "bytes": list(text.encode()), "top_logprobs": []}
                for text, value in pairs
            ]
        }

    def whole(self) -> dict[str, Any]:
        choice = {"index": 0, "message": self._message, "finish_reason": self._reason, "logprobs": self._logprobs()}
        return self._head | {"object": "chat.completion", "choices": [choice], "usage": self._usage()}

    def chunks(self) -> list[str]:
        """What a stream sends: the answer in one piece, how it ended, and the end."""
        calls = [call | {"index": number} for number, call in enumerate(self._message.get("tool_calls", ()))]
        delta = self._message | ({"tool_calls": calls} if calls else {})
        steps: Sequence[dict[str, Any]] = (
            {"delta": delta, "finish_reason": None, "logprobs": self._logprobs()},
            {"delta": {}, "finish_reason": self._reason},
        )
        head = self._head | {"object": "chat.completion.chunk"}
        chunks = [head | {"choices": [{"index": 0} | step]} for step in steps]
        if self._asked.usage:
            chunks.append(head | {"choices": [], "usage": self._usage()})
        return [*map(json.dumps, chunks), "[DONE]"]


async def _body(request: web.BaseRequest) -> bytes:
    whole, too_long = bytearray(), ChatError(f"the body is above {MOST_BODY} bytes", 413, "body_too_large")
    if (request.content_length or 0) > MOST_BODY:
        raise too_long
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.content.iter_any():
                whole += chunk
                if len(whole) > MOST_BODY:
                    raise too_long
    except TimeoutError as error:
        raise ChatError(f"the body did not come within {BODY_S:g} s", 408, "timeout") from error
    return bytes(whole)


def _error(error: ChatError) -> web.Response:
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(error.status, "invalid_request_error")
    about = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    # Clients repeat some of these by themselves, which changes nothing here.
    response = web.json_response({"error": about}, status=error.status, headers={"x-should-retry": "false"})
    if error.status in (401, 408, 413):
        response.force_close()
    return response
