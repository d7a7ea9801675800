"""The guard of every route of a server: no request without the token, no answer from a mix of two policies.

vLLM's own `--api-key` leaves the routes that change weights, pause the engine or call into its workers open to anyone
who reaches the port. Here every route is closed. A token is compared in constant time and never logged.

Responses are sampled only while the server is *open* for one policy version, and only for requests that name this
version. New weights come by one request, which closes the server, has them loaded (`replacement`), and opens it for
their version. If an update overtakes a response, the response is thrown away and answered with 409, so that no
rollout mixes two policies.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

VERSION_HEADER = b"x-policy-version"
SETTINGS, WEIGHTS, GENERATE = "/megatron_rl/settings", "/megatron_rl/weights", "/megatron_rl/generate"
# Routes of vLLM that neither change weights nor sample. Any other route closes the server.
HARMLESS = frozenset({"/health", "/weight_info", "/is_paused", "/metrics", "/version"})
REFUSED, UNAUTHORIZED, CONFLICT, FAILED = 400, 401, 409, 500

_log = logging.getLogger(__name__)

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass
class GuardState:
    """What the guard of this process enforces; `server` fills it in before the routes exist."""

    token: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    replace: Callable[[list[str], int], Awaitable[None]] | None = None  # loads files as a policy version
    sample: Callable[[dict[str, Any]], Coroutine[Any, Any, dict[str, Any]]] | None = None  # see `answering`
    replacing: asyncio.Lock = field(default_factory=asyncio.Lock)
    version: int | None = None  # open for this policy version; None: closed
    openings: int = 0  # counts up at every change, so that a version that came back is told from one that stayed


STATE = GuardState()  # global, because vLLM makes the middleware by its class's name and passes no argument


class Guard:
    """ASGI middleware; named to vLLM with ``--middleware``."""

    def __init__(self, app: Callable, state: GuardState | None = None) -> None:
        self._app, self._state = app, state or STATE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":  # no websockets here
            return None
        headers = dict(scope["headers"])
        if not self._state.token or not _matches(headers.get(b"authorization", b""), self._state.token):
            return await _answer(send, UNAUTHORIZED, {"error": "a valid token is required"})
        path = scope["path"]
        if path == SETTINGS:
            return await _answer(send, 200, {**self._state.settings, "version": self._state.version})
        if path == WEIGHTS:
            return await self._replace(receive, send)
        if path == GENERATE:
            return await self._generate(headers.get(VERSION_HEADER, b"").decode(), receive, send)
        if path not in HARMLESS:
            self._change(None)
        return await self._app(scope, receive, send)

    def _change(self, version: int | None) -> None:
        self._state.version, self._state.openings = version, self._state.openings + 1

    async def _replace(self, receive: Receive, send: Send) -> None:
        """Body: ``version`` and ``files`` (see `extension.FileUpdate`). Answers when the server is open for them."""
        wanted, state = await _body(receive), self._state
        async with state.replacing:  # waits for an update that a caller gave up waiting for
            self._change(None)
            openings = state.openings
            try:
                await state.replace(wanted["files"], wanted["version"])
            except Exception as error:  # noqa: BLE001 - whatever it is, the trainer is waiting to hear of it
                _log.exception("weight update to version %s failed", wanted["version"])
                return await _answer(send, FAILED, {"error": f"{type(error).__name__}: {error}"})
            if state.openings != openings:
                return await _answer(send, CONFLICT, {"error": "another call changed this server meanwhile"})
            self._change(wanted["version"])
        return await _answer(send, 200, {"version": wanted["version"]})

    async def _generate(self, wanted: str, receive: Receive, send: Send) -> None:
        state, openings = self._state, self._state.openings
        if wanted != str(state.version):
            return await _answer(send, CONFLICT, _stale(wanted, state.version))
        try:
            answer = await _unless_left(receive, state.sample(await _body(receive)))
        except (ValueError, TypeError, KeyError) as error:  # vLLM's own refusals are ValueErrors
            return await _answer(send, REFUSED, {"error": f"{type(error).__name__}: {error}"})
        except Exception as error:  # noqa: BLE001 - whatever it is, the trainer is waiting to hear of it
            return await _answer(send, FAILED, {"error": f"{type(error).__name__}: {error}"})
        if answer is None:
            return None
        if state.openings != openings:
            return await _answer(send, CONFLICT, _stale(wanted, state.version))
        return await _answer(send, 200, answer)


async def _body(receive: Receive) -> Any:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return json.loads(body)


async def _unless_left(receive: Receive, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any] | None:
    """The result of ``work``; None where the caller hangs up first, which cancels ``work`` and the response."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _stale(wanted: str, version: int | None) -> dict[str, Any]:
    return {"error": f"policy version {wanted or 'none'} was asked for, this server holds {version}"}


def _matches(authorization: bytes, token: str) -> bool:
    scheme, _, given = authorization.partition(b" ")
    digests = [hashlib.sha256(secret).digest() for secret in (given.strip(), token.encode())]
    return scheme.lower() == b"bearer" and hmac.compare_digest(*digests)


async def _answer(send: Send, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
