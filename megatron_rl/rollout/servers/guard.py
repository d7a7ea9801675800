"""The guard of every route of a server: no request without the token, no answer from a mix of two policies.

vLLM's own `--api-key` leaves the routes that change weights, pause the engine or call into its workers open to anyone
who reaches the port. Here every route is closed. A token is compared in constant time and never logged.

Responses are sampled only while the server is *open* for one policy version, and only for requests that name this
version. New weights come by one request, which closes the server, has them loaded (`replacement`), and opens it for
their version. If an update overtakes a response, the response is thrown away and answered with 409, so that no
rollout mixes two policies: unless the update says that responses under way are cut or go on (`InFlightMode`).
Their answers say which policy sampled which token.

Of vLLM's routes those pass that the trainer uses. The others sample without a policy version, or hand the engine token
ids that nobody checked: one id of -1 ends it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

from megatron_rl.config.rollout import InFlightMode
from megatron_rl.rollout.servers.load import LOAD_HEADER, Meter
from megatron_rl.rollout.servers.under_way import Overtaken
from megatron_rl.rollout.servers.weight_group import GroupError, GroupPlace
from megatron_rl.rollout.servers.wire import MEDIA_TYPE, Answer, pack

VERSION_HEADER = b"x-policy-version"
SETTINGS, WEIGHTS, GENERATE = "/megatron_rl/settings", "/megatron_rl/weights", "/megatron_rl/generate"
HARMLESS = frozenset({"/health", "/weight_info", "/is_paused", "/metrics", "/version"})  # of vLLM; they change nothing
CHANGING = frozenset({"/collective_rpc"})  # of vLLM; closes the server, because it may change weights
REFUSED, UNAUTHORIZED, NOT_OFFERED, CONFLICT, TOO_LARGE, FAILED, INTERRUPTED = 400, 401, 404, 409, 413, 500, 503
MODES = get_args(InFlightMode)
NOT_ACCEPTED = 1008  # close code of a WebSocket

BODY_BYTES = 2**20  # of sampling parameters and names of weight files, with room to spare
BODY_BYTES_PER_TOKEN = 16  # an id of up to seven digits, comma and space, twice over

_log = logging.getLogger(__name__)

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass
class GuardState:
    """What the guard of this process enforces; `server` fills it in before the routes exist."""

    token: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    replace: Callable[[dict[str, Any], int, bool], Awaitable[dict[str, int]]] | None = None  # see `replacement`
    sample: Callable[[dict[str, Any], Callable[[], bool]], Coroutine[Any, Any, Answer]] | None = None  # see `answering`
    replacing: asyncio.Lock = field(default_factory=asyncio.Lock)
    max_body_bytes: int = BODY_BYTES
    version: int | None = None  # open for this policy version; None: closed
    openings: int = 0  # counts up at every change, so that a version that came back is told from one that stayed
    meter: Meter = field(default_factory=Meter)  # of responses
    oldest: int = 0  # responses that came at an earlier opening are thrown away


STATE = GuardState()  # global, because vLLM makes the middleware by its class's name and passes no argument


class Guard:
    """ASGI middleware; named to vLLM with ``--middleware``."""

    def __init__(self, app: Callable, state: GuardState | None = None) -> None:
        self._app, self._state = app, state or STATE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": NOT_ACCEPTED})
        headers = dict(scope["headers"])
        if not self._state.token or not _matches(headers.get(b"authorization", b""), self._state.token):
            return await _answer(send, UNAUTHORIZED, {"error": "a valid token is required"})
        path, receive = scope["path"], _limited(receive, self._state.max_body_bytes)
        try:
            if path == SETTINGS:
                return await _answer(send, 200, {**self._state.settings, **_now(self._state)})
            if path == WEIGHTS:
                return await self._replace(receive, send)
            if path == GENERATE:
                return await self._generate(headers.get(VERSION_HEADER, b""), receive, send)
        except _TooLarge as error:
            return await _answer(send, TOO_LARGE, {"error": str(error)})
        if path in CHANGING:
            self._change(None)
        elif path not in HARMLESS:
            return await _answer(send, NOT_OFFERED, {"error": f"{path} is not offered; responses come from {GENERATE}"})
        return await self._app(scope, receive, send)

    def _change(self, version: int | None, spares: bool = False) -> None:
        """``spares``: responses under way remain answers."""
        self._state.version, self._state.openings = version, self._state.openings + 1
        if not spares:
            self._state.oldest = self._state.openings

    async def _replace(self, receive: Receive, send: Send) -> None:
        """Body: ``version``, ``files`` or ``broadcast`` (see `extension.ServerUpdate`), and ``mode``: what becomes of
        responses under way.

        Answers ``version``, ``tensors`` and ``bytes`` when the server is open for the version; `INTERRUPTED` where a
        broadcast broke off: the server is closed then, and can take part in the next one.
        """
        state = self._state
        try:
            update, version, mode = _update(await _body(receive))
        except (ValueError, TypeError, KeyError) as error:
            return await _answer(send, REFUSED, {"error": f"{type(error).__name__}: {error}"})
        async with state.replacing:  # waits for an update that a caller gave up waiting for
            self._change(None, spares=mode != "finish")
            openings = state.openings
            try:
                amount = await state.replace(update, version, mode == "keep")
            except GroupError as error:
                return await _answer(send, INTERRUPTED, {"error": str(error)})
            except Exception as error:  # noqa: BLE001 - whatever it is, the trainer is waiting to hear of it
                _log.exception("weight update to version %s failed", version)
                return await _answer(send, FAILED, {"error": f"{type(error).__name__}: {error}"})
            if state.openings != openings:
                return await _answer(send, CONFLICT, {"error": "another call changed this server meanwhile"})
            self._change(version, spares=mode != "finish")
        return await _answer(send, 200, {"version": version, **amount})

    async def _generate(self, wanted: bytes, receive: Receive, send: Send) -> None:
        state, openings = self._state, self._state.openings
        if not wanted.isdigit() or state.version is None or wanted != str(state.version).encode():
            return await _answer(send, CONFLICT, _stale(wanted, state.version))
        try:
            body = await _body(receive)
            work = _metered(state.meter, state.sample(body, lambda: state.openings == openings))
            answer = await _unless_left(receive, work)
        except _TooLarge:
            raise
        except Overtaken:
            return await _answer(send, CONFLICT, _stale(wanted, state.version))
        except (ValueError, TypeError, KeyError) as error:  # vLLM's own refusals are ValueErrors
            return await _answer(send, REFUSED, {"error": f"{type(error).__name__}: {error}"})
        except Exception as error:  # noqa: BLE001 - whatever it is, the trainer is waiting to hear of it
            return await _answer(send, FAILED, {"error": f"{type(error).__name__}: {error}"})
        if answer is None:
            return None
        if openings < state.oldest:
            return await _answer(send, CONFLICT, _stale(wanted, state.version))
        return await _send_answer(send, answer, state.meter.header())


class _TooLarge(Exception):
    pass


def _limited(receive: Receive, limit: int) -> Receive:
    """``receive`` that raises `_TooLarge` once a request's body has more than ``limit`` bytes."""
    size = 0

    async def counted() -> dict[str, Any]:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > limit:
            raise _TooLarge(f"the body has more than {limit} bytes")
        return message

    return counted


async def _body(receive: Receive) -> Any:
    pieces = []
    while True:
        message = await receive()
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            break
    try:
        return json.loads(b"".join(pieces))
    except RecursionError as error:
        raise ValueError("the body is nested too deep") from error


def _update(body: Any) -> tuple[dict[str, Any], int, str]:
    """Update, version and mode of new weights. `TypeError`, `KeyError` or `ValueError` where ``body`` is none."""
    version, mode = body["version"], body.get("mode", "finish")
    if mode not in MODES:
        raise ValueError(f"mode {mode!r}: expected one of {', '.join(MODES)}")
    if type(version) is not int or version < 0:
        raise ValueError(f"version {version!r}: expected a number of updates")
    if "broadcast" in body:
        return {"broadcast": asdict(GroupPlace(**body["broadcast"]))}, version, mode
    files = body["files"]
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise ValueError("files: expected a list of paths")
    return {"files": files}, version, mode


async def _metered(meter: Meter, work: Coroutine[Any, Any, Answer]) -> Answer:
    answer = None
    meter.begin()
    try:
        answer = await work
        return answer
    finally:
        meter.end(None if answer is None else len(answer.tokens))


async def _unless_left(receive: Receive, work: Coroutine[Any, Any, Answer]) -> Answer | None:
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


def _stale(wanted: bytes, version: int | None) -> dict[str, Any]:
    name = wanted[:40].decode("ascii", "replace") or "none"
    return {"error": f"policy version {name} was asked for, this server holds {version}"}


def _matches(authorization: bytes, token: str) -> bool:
    scheme, _, given = authorization.partition(b" ")
    digests = [hashlib.sha256(secret).digest() for secret in (given.strip(), token.encode())]
    return scheme.lower() == b"bearer" and hmac.compare_digest(*digests)


async def _answer(send: Send, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _now(state: GuardState) -> dict[str, Any]:
    return {"version": state.version, "replacing": state.replacing.locked(), "load": asdict(state.meter.load())}


async def _send_answer(send: Send, answer: Answer, load: str) -> None:
    pieces = pack(answer)
    length = str(sum(map(len, pieces))).encode()
    headers = [(b"content-type", MEDIA_TYPE.encode()), (b"content-length", length)]
    headers.append((LOAD_HEADER.lower().encode(), load.encode()))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for number, piece in enumerate(pieces, 1):
        await send({"type": "http.response.body", "body": piece, "more_body": number < len(pieces)})
