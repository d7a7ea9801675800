"""The guard of every route of a server, and the responses under way behind it.

vLLM's own `--api-key` leaves the routes that change weights, pause the engine or call into its workers open to anyone
who reaches the port. Here every route wants the token, which is compared in constant time and never logged, and of
vLLM's routes only health and metrics are offered.

Responses are sampled only while the server is *open* for one policy version, and only for requests that name this
version. New weights come by one request. It closes the server, has them loaded (`server.replace_weights`), and opens it
for their version. If an update overtakes a response, the response is thrown away and answered with 409, so that no
rollout mixes two policies. Where the update's `InFlightMode` says that responses under way are cut or go on, the answer
says which policy sampled which token.

`UnderWay` counts tokens at a weight update. vLLM's engine runs in a process of its own, ahead of what this one has
seen: finished steps are on their way here, and with asynchronous scheduling a further step runs whose tokens nobody
knows. An update therefore counts at a moment at which no tokens are on their way (`UnderWay.hold`):

1. No request is between this module and the engine; the guard lets no others in.
2. The scheduler is paused. vLLM answers when no step runs and none waits to be processed, and the answer takes the
   way of all outputs before it.
3. A mark is put into the queue of these outputs. When it is reached, every output before it has been processed.

The old weights sampled the tokens of a response that are known then; the new ones will sample all others.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from megatron_rl.rollout.generator import RolloutError
from megatron_rl.rollout.servers.weight_broadcast import GroupError
from megatron_rl.rollout.servers.wire import GENERATE, LOAD_HEADER, MEDIA_TYPE, SCORE, SETTINGS, WEIGHTS, Meter, pack
from megatron_rl.types import Rollout

ALL = np.iinfo(np.int32).max


class Overtaken(Exception):
    """The weights that a response is for were replaced before its request reached the engine."""


class UnderWay:
    """All responses of ``engine``, vLLM's AsyncLLM. Lives in one event loop."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._numbers = engine, itertools.count()
        self._version = 0  # of the weights that sample now
        self._num_updates = 0
        self._runs: dict[str, list[tuple[int, int]]] = {}  # by name: (policy version, tokens there at its end), …
        self._num_entering, self._entered = 0, asyncio.Event()
        self._is_held = False

    async def sample(self, prompt: list[int], params: Any, is_open: Callable[[], bool]) -> tuple[Any, np.ndarray]:
        """vLLM's completion of ``prompt`` [P], and the policy version [R] int32 that sampled each of its tokens.

        ``is_open``: whether the server still answers for the weights that the request is for; else `Overtaken`.
        """
        if not is_open():
            raise Overtaken
        name, runs = f"response-{next(self._numbers)}", []
        self._runs[name] = runs
        try:
            queue = await self._enter(name, prompt, params)
            try:
                while not (output := queue.get_nowait() or await queue.get()).finished:
                    pass
            finally:
                queue.close()
        except asyncio.CancelledError:
            await self._engine.abort(name)
            raise
        finally:
            del self._runs[name]
        (completion,) = output.outputs
        return completion, _by_token([*runs, (self._version, ALL)], len(completion.token_ids))

    async def _enter(self, name: str, prompt: list[int], params: Any) -> Any:
        # Under other weights the same tokens have other keys and values: the salt keeps what old ones left in the
        # prefix cache away from new requests.
        request = {"prompt_token_ids": prompt, "cache_salt": str(self._num_updates)}
        self._num_entering += 1
        try:
            return await self._engine.add_request(name, request, params)
        finally:
            self._num_entering -= 1
            self._entered.set()

    async def hold(self, keep: bool) -> None:
        """Stop sampling between two steps. The guard must be closed.

        ``keep``: responses stay where they are, with their keys and values, except those without a token: what was
        computed of their prompts came from the old weights. Else all end here (finish reason "abort").
        """
        self._num_updates += 1
        while self._num_entering:
            self._entered.clear()
            await self._entered.wait()
        if not self._runs:
            return
        self._is_held = True
        await self._engine.engine_core.pause_scheduler_async("keep", False)
        await self._outputs_processed()
        there = self._num_tokens()
        for name, runs in self._runs.items():
            runs.append((self._version, there.get(name, ALL)))  # one that is not there has ended
        await self._engine.abort([name for name, count in there.items() if not (keep and count)])

    async def release(self, version: int) -> None:
        """Go on, with the weights of ``version``."""
        self._version = version
        if self._is_held:
            self._is_held = False
            await self._engine.engine_core.resume_scheduler_async()

    async def drop(self) -> None:
        """End all responses that are held, with the tokens that they have: nobody knows which weights are there."""
        await self._engine.abort(list(self._num_tokens()))

    def _num_tokens(self) -> dict[str, int]:
        """Name → tokens so far, of all responses that have not ended."""
        states = self._engine.output_processor.request_states.values()
        return {state.external_req_id: state.detokenizer.num_output_tokens() for state in states}

    async def _outputs_processed(self) -> None:
        """Wait until all outputs that have arrived are processed. Raises `RolloutError` where nobody does."""
        mark = _Mark()
        self._engine.engine_core.outputs_queue.put_nowait(mark)
        await asyncio.wait({mark.reached, self._engine.output_handler}, return_when=asyncio.FIRST_COMPLETED)
        if not mark.reached.done():
            raise RolloutError("the engine's outputs are not processed any more")


class _Mark:
    """In vLLM's queue of outputs: none, that say when the task which processes them has come this far."""

    engine_index, timestamp, scheduler_stats = 0, 0.0, None

    def __init__(self) -> None:
        self.reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def outputs(self) -> list[Any]:
        if not self.reached.done():
            self.reached.set_result(None)
        return []


def _by_token(runs: list[tuple[int, int]], num_tokens: int) -> np.ndarray:
    """[R] int32: the version of each token. ``runs``: (version, tokens there at its end), counts rising."""
    versions, ends = np.array(runs, dtype=np.int64).T
    return np.repeat(versions, np.diff(np.minimum(ends, num_tokens), prepend=0)).astype(np.int32)


VERSION_HEADER = b"x-policy-version"
OF_VLLM = frozenset({"/health", "/metrics"})  # they change nothing
REFUSED, UNAUTHORIZED, NOT_OFFERED, CONFLICT, FAILED, INTERRUPTED = 400, 401, 404, 409, 500, 503
NOT_ACCEPTED = 1008  # close code of a WebSocket

_log = logging.getLogger(__name__)

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass
class GuardState:
    """What the guard of this process enforces; `server` fills it in before the routes exist."""

    token: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    replace: Callable[[dict[str, Any], int, bool], Awaitable[dict[str, int]]] | None = None  # `server.replace_weights`
    # `server.sample`
    sample: Callable[[dict[str, Any], Callable[[], bool]], Coroutine[Any, Any, Rollout]] | None = None
    score: Callable[[dict[str, Any]], Coroutine[Any, Any, Rollout]] | None = None  # `server.score`
    check: Callable[[], Awaitable[None]] | None = None  # raises where the engine is dead
    replacing: asyncio.Lock = field(default_factory=asyncio.Lock)
    version: int | None = None  # open for this policy version; None: closed
    openings: int = 0  # counts up at every change, so that a version that came back is told from one that stayed
    meter: Meter = field(default_factory=Meter)  # of responses
    oldest: int = 0  # responses that came at an earlier opening are thrown away
    is_of_a_run: bool = False  # weights came in the place of those that the server started with


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
        headers, state = dict(scope["headers"]), self._state
        if not state.token or not _matches(headers.get(b"authorization", b""), state.token):
            return await _answer(send, UNAUTHORIZED, {"error": "a valid token is required"})
        path = scope["path"]
        if path == SETTINGS:
            return await self._settings(send)
        if path == WEIGHTS:
            return await self._replace(receive, send)
        if path == GENERATE:
            return await self._generate(headers.get(VERSION_HEADER, b""), receive, send)
        if path == SCORE:
            return await self._score(receive, send)
        if path not in OF_VLLM:
            return await _answer(send, NOT_OFFERED, {"error": f"{path} is not offered; responses come from {GENERATE}"})
        return await self._app(scope, receive, send)

    async def _settings(self, send: Send) -> None:
        """What the server is and holds now; `FAILED` where its engine is dead."""
        try:
            if self._state.check is not None:
                await self._state.check()
        except Exception as error:  # noqa: BLE001 - whatever it is, the trainer is waiting to hear of it
            return await _answer(send, FAILED, {"error": f"{type(error).__name__}: {error}"})
        return await _answer(send, 200, {**self._state.settings, **_now(self._state)})

    def _change(self, version: int | None, spares: bool = False) -> None:
        """Change the policy version. ``spares``: responses under way stay valid."""
        self._state.version, self._state.openings = version, self._state.openings + 1
        if not spares:
            self._state.oldest = self._state.openings

    async def _replace(self, receive: Receive, send: Send) -> None:
        """Body: ``version``, ``files`` or ``broadcast`` (`ServerUpdate`), and ``mode``: what becomes of responses under
        way.

        Answers ``version``, ``tensors`` and ``bytes`` when the server is open for it; `INTERRUPTED` where a
        broadcast broke off: the server is closed then, and can take part in the next one.
        """
        state = self._state
        try:
            body = await _body(receive)
            version, mode, how = body["version"], body["mode"], "broadcast" if "broadcast" in body else "files"
            update = {how: body[how]}
        except (ValueError, TypeError, KeyError) as error:
            return await _answer(send, REFUSED, {"error": f"{type(error).__name__}: {error}"})
        async with state.replacing:  # waits for an update that a caller gave up waiting for
            state.is_of_a_run |= bool(update[how])  # an opening brings no file
            self._change(None, spares=mode != "finish")
            try:
                amount = await state.replace(update, version, mode == "keep")
            except GroupError as error:
                return await _answer(send, INTERRUPTED, {"error": str(error)})
            except Exception as error:  # noqa: BLE001 - whatever it is, the trainer is waiting to hear of it
                _log.exception("weight update to version %s failed", version)
                return await _answer(send, FAILED, {"error": f"{type(error).__name__}: {error}"})
            self._change(version, spares=mode != "finish")
        return await _answer(send, 200, {"version": version, **amount})

    async def _score(self, receive: Receive, send: Send) -> None:
        """Score for a teacher. Refused where a run has replaced the weights that the server started with."""
        try:
            if self._state.is_of_a_run:
                raise ValueError("a run has replaced this server's weights; start one for the teacher alone")
            answer = await _unless_left(receive, self._state.score(await _body(receive)))
        except (ValueError, TypeError, KeyError) as error:
            return await _answer(send, REFUSED, {"error": f"{type(error).__name__}: {error}"})
        except Exception as error:  # noqa: BLE001 - whatever it is, the trainer is waiting to hear of it
            return await _answer(send, FAILED, {"error": f"{type(error).__name__}: {error}"})
        return None if answer is None else await _send_answer(send, answer, self._state.meter.header())

    async def _generate(self, wanted: bytes, receive: Receive, send: Send) -> None:
        state, openings = self._state, self._state.openings
        if state.version is None or wanted != str(state.version).encode():
            return await _answer(send, CONFLICT, _stale(wanted, state.version))
        try:
            body = await _body(receive)
            work = _metered(state.meter, state.sample(body, lambda: state.openings == openings))
            answer = await _unless_left(receive, work)
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


async def _body(receive: Receive) -> Any:
    pieces = []
    while True:
        message = await receive()
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            break
    return json.loads(b"".join(pieces))


async def _metered(meter: Meter, work: Coroutine[Any, Any, Rollout]) -> Rollout:
    meter.under_way += 1
    try:
        return await work
    finally:
        meter.under_way -= 1


async def _unless_left(receive: Receive, work: Coroutine[Any, Any, Rollout]) -> Rollout | None:
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
    return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), token.encode())


async def _answer(send: Send, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _now(state: GuardState) -> dict[str, Any]:
    return {"version": state.version, "replacing": state.replacing.locked(), "load": asdict(state.meter.load())}


async def _send_answer(send: Send, answer: Rollout, load: str) -> None:
    pieces = pack(answer)
    length = str(sum(map(len, pieces))).encode()
    headers = [(b"content-type", MEDIA_TYPE.encode()), (b"content-length", length)]
    headers.append((LOAD_HEADER.lower().encode(), load.encode()))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for number, piece in enumerate(pieces, 1):
        await send({"type": "http.response.body", "body": piece, "more_body": number < len(pieces)})
