"""The trainer's end of one server: HTTP with token ids, as `pool` needs it.

What answers at an address may be anything: a server of this run, one of another, a proxy's page. So nothing of an
answer is used before it is typed data of bounded size. Everything else is a `ServerLost` that says what came.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np

from megatron_rl.config.rollout import InFlightMode
from megatron_rl.rollout.generator import Sampling, sampling_fields
from megatron_rl.rollout.requests import Request
from megatron_rl.rollout.servers.rendezvous import (
    INTRODUCTION,
    NONCE_HEADER,
    PROOF_HEADER,
    Address,
    key_for,
    printable,
    proof,
)
from megatron_rl.rollout.servers.weight_broadcast import Amount, GroupPlace
from megatron_rl.rollout.servers.wire import (
    IDLE_S,
    LOAD_HEADER,
    MEDIA_TYPE,
    Damaged,
    Expected,
    Load,
    ModelLimits,
    unpack,
)
from megatron_rl.types import Rollout

SETTINGS, WEIGHTS, GENERATE = "/megatron_rl/settings", "/megatron_rl/weights", "/megatron_rl/generate"
CONNECT_S = 10.0  # to a server that is there, a connection takes milliseconds
HEALTH_S = 10.0
READ_BYTES = 4 << 20  # of an answer that may wait to be read: 8k tokens with routes are 3.3 MB
JSON_BYTES = 256 << 10  # settings and the answer to a weight update have less than 4 KB
CHECKSUMS_BYTES = 64 << 20  # a line for each parameter
ERROR_BYTES, ERROR_CHARS = 4 << 10, 300  # of an error's text: read, and kept
NO_PROOF = "what answers there does not prove that it knows this run's token, or was started anew"


class ServerError(RuntimeError):
    """A call failed. The subclasses say what to do about it. ``is_final``: asking again is known to be useless."""

    def __init__(self, message: str, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


class ServerLost(ServerError):
    """The server cannot be reached, or its engine has stopped, or what it says cannot be used."""


class Stranger(ServerLost):
    """What answers at the address does not speak as a server of this run does. Always final."""

    def __init__(self, message: str) -> None:
        super().__init__(message, is_final=True)


class StaleServer(ServerError):
    """The server holds other weights than the request is for."""


class UpdateInterrupted(ServerError):
    """A broadcast of weights broke off. The server is closed; it can take part in the next one."""


class RequestRefused(ServerError):
    """The server understood and said no: asking again, here or elsewhere, would not help."""


# What a status means, by the path that was asked; others are `Stranger`, or from 500 on `ServerLost`.
_KINDS = {
    (WEIGHTS, 400): RequestRefused,
    (WEIGHTS, 409): StaleServer,
    (WEIGHTS, 503): UpdateInterrupted,
    (GENERATE, 400): RequestRefused,
    (GENERATE, 409): StaleServer,
    (GENERATE, 413): RequestRefused,
}


@dataclass(frozen=True)
class Weights:
    """One policy's weights and how a server gets them: from ``files`` that it can read (empty: the checkpoint that it
    started from), or, with ``broadcast``, in a group. ``files`` None: nobody can read them, they were broadcast.
    ``amount``: what the files hold, where that is known."""

    version: int
    files: tuple[str, ...] | None = ()
    broadcast: GroupPlace | None = None
    amount: Amount | None = None


def request_body(request: Request, sampling: Sampling, stop_token_ids: list[int]) -> dict[str, Any]:
    """What is asked of a server for one response; the same numbers that the in-process engine is given."""
    fields = sampling_fields(sampling, request.seed, stop_token_ids)
    return {
        "id": request.sequence_id,
        "token_ids": request.prompt.tokens,
        "sampling_params": fields,
        "wants_routes": sampling.wants_routes,
    }


class ServerClient:
    """One server. Made and used inside the event loop. ``deadline_s``: limit of every call that does work.

    ``mode``: what an update does to responses under way (`InFlightMode`). ``model``: what bounds the numbers in a
    response; None: the request alone does. ``wants_proof``: every answer has to prove that the server knows the token
    (`rendezvous`), as each real server's does; without, only `_call`'s checks tell a server from a stranger.

    The token itself is never sent. A server that has proved itself is shown a key that is made for it from the token.
    """

    _model: ModelLimits | None = None

    def __init__(
        self,
        address: Address,
        token: str,
        deadline_s: float,
        mode: InFlightMode = "finish",
        model: ModelLimits | None = None,
        wants_proof: bool = False,
    ) -> None:
        self.address, self._deadline_s, self._mode, self._model = address, deadline_s, mode, model
        self.load, self.elsewhere = Load(), 0  # as the server last said: how busy it is; requests of other ranks
        self._in_flight = 0
        self._token, self._wants_proof = token, wants_proof
        self._instance: str | None = None  # which start of the server this is; None: it has not been asked yet
        self._introducing = asyncio.Lock()
        self._session = aiohttp.ClientSession(
            headers={"Accept-Encoding": "identity"},
            # The pool bounds how many requests are in flight.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            read_bufsize=READ_BYTES,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def settings(self) -> dict[str, Any]:
        """What the server says of itself, not yet checked: `settings.ServerSettings` does that."""
        reply = await self._call("GET", SETTINGS, limit_s=HEALTH_S)
        if not isinstance(reply, dict):
            raise Stranger(f"{SETTINGS}: expected a JSON object, got {printable(json.dumps(reply), ERROR_CHARS)}")
        return reply

    async def check_health(self) -> None:
        """Raises `ServerLost` unless the server's engine is alive."""
        await self._call("GET", "/health", limit_s=HEALTH_S, read=_nothing)

    async def push(self, weights: Weights) -> dict[str, int]:
        """Replace the server's weights, then let it answer for this version.

        Returns the number of ``tensors`` and ``bytes`` that every worker of the server got. Raises `ServerLost` where
        the answer does not name the version or these numbers, or names other numbers than ``weights.amount``;
        `UpdateInterrupted` where a broadcast broke off.
        """
        how = (
            {"files": list(weights.files or ())}
            if weights.broadcast is None
            else {"broadcast": asdict(weights.broadcast)}
        )
        body = {"version": weights.version, "mode": self._mode, **how}
        reply = await self._call("POST", WEIGHTS, body)
        names = ("version", "tensors", "bytes")
        if not isinstance(reply, dict) or any(type(reply.get(name)) is not int or reply[name] < 0 for name in names):
            text = printable(json.dumps(reply), ERROR_CHARS)
            raise ServerLost(f"{WEIGHTS}: expected a version and numbers of tensors and bytes, got {text}")
        if reply["version"] != weights.version:
            raise ServerLost(f"{WEIGHTS}: version {weights.version} was sent, the server holds {reply['version']}")
        amount = Amount(reply["tensors"], reply["bytes"])
        if weights.amount not in (None, amount):
            raise ServerLost(f"{WEIGHTS}: the server got {amount}, but {weights.amount} were sent")
        return {"tensors": amount.tensors, "bytes": amount.bytes}

    async def generate(self, body: dict[str, Any], version: int) -> Rollout:
        """One response, begun by the weights of ``version``.

        Under mode `finish` no others sample any of it. Else ones that came meanwhile may have sampled its end (see
        `Rollout.policy_versions`), or it was cut for them (finish reason "abort"). Raises `ServerLost` for an answer
        that is not one to this request.
        """
        headers = {"X-Policy-Version": str(version)}
        expected = Expected.of(body, self._model)
        self._in_flight += 1
        try:
            reply = await self._call("POST", GENERATE, body, headers, read=partial(self._within, expected.most_bytes))
        finally:
            self._in_flight -= 1
        try:
            answer = unpack(reply)
            expected.check(answer)
        except Damaged as error:
            raise ServerLost(f"{GENERATE}: the answer is damaged: {printable(str(error), ERROR_CHARS)}") from error
        if self._mode == "finish" and answer.finish_reason == "abort":
            raise StaleServer("the response was aborted")
        if self._mode == "finish" and (answer.policy_versions != version).any():
            raise StaleServer(f"tokens of other policy versions than {version}")
        if (answer.policy_versions < version).any() or (np.diff(answer.policy_versions) < 0).any():
            raise ServerLost(f"{GENERATE}: tokens of older policy versions than {version}, or in a wrong order")
        return answer

    async def checksums(self) -> dict[str, int]:
        """Checksums of every stored parameter. Closes the server until the next push."""
        read = partial(_json, limit=CHECKSUMS_BYTES)
        return (await self._call("POST", "/collective_rpc", {"method": "checksums"}, read=read))["results"][0]

    async def close(self) -> None:
        """Drop all connections; calls in progress fail."""
        await self._session.close()

    # ---------------------------------------------------------------- one call

    async def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        limit_s: float = 0.0,
        read: Callable[[aiohttp.ClientResponse], Awaitable[Any]] | None = None,
    ) -> Any:
        """What ``read`` makes of the answer; None: its JSON. Raises `ServerError`, whatever came."""
        limit_s = limit_s or self._deadline_s
        try:
            async with asyncio.timeout(limit_s):
                instance = await self._known_instance()
                key = {"Authorization": f"Bearer {key_for(self._token, instance)}"} if instance else {}
                return await self._request(method, path, body, {**key, **(headers or {})}, read or _json, instance)
        except ServerError:
            raise
        except TimeoutError as error:
            raise ServerLost(f"{path}: no answer in {limit_s:g} s") from error
        except Exception as error:
            refused = isinstance(error, aiohttp.ClientConnectorError)
            text = printable(str(error), ERROR_CHARS)
            raise ServerLost(f"{path}: {type(error).__name__}: {text}", refused) from error

    async def _known_instance(self) -> str:
        """Ask the server once, before it is shown a key. "" where it proves nothing and does not have to."""
        async with self._introducing:
            if self._instance is None:
                self._instance = await self._introduced()
        return self._instance

    async def _introduced(self) -> str:
        nonce = secrets.token_hex(16)
        try:
            reply = await self._request("GET", INTRODUCTION, None, {NONCE_HEADER: nonce}, _json)
        except ServerLost:
            if self._wants_proof:
                raise
            return ""
        if isinstance(reply, dict) and isinstance(instance := reply.get("instance"), str):
            if self.address.instance or self.address.url.startswith("https:"):  # there a certificate names the place
                is_due = self.address.instance in ("", instance)
                shown, due = reply.get("proof"), [proof(self._token, instance, nonce)] if is_due else []
            else:
                shown, due = reply.get("here"), [proof(self._token, instance, nonce, *x) for x in await self._sockets()]
            if shown in due:
                return instance
        if self._wants_proof:
            raise Stranger(f"{INTRODUCTION}: {NO_PROOF}")
        return ""

    async def _sockets(self) -> list[tuple[str, int]]:
        """IP addresses and port that the server's URL leads to."""
        url = urlsplit(self.address.url)
        found = await asyncio.get_running_loop().getaddrinfo(url.hostname, url.port or 80, type=socket.SOCK_STREAM)
        return [where[:2] for *_, where in found]

    async def _request(
        self,
        method: str,
        path: str,
        body: Any,
        headers: dict[str, str],
        read: Callable[[aiohttp.ClientResponse], Awaitable[Any]],
        instance: str | None = None,
    ) -> Any:
        """Send a request and return its answer. ``instance``: of the server that has to prove itself in the answer's
        head; None: none has to."""
        nonce = secrets.token_hex(16)
        async with self._session.request(
            method, self.address.url + path, json=body, headers={NONCE_HEADER: nonce, **headers}, allow_redirects=False
        ) as response:
            shown = response.headers.get(PROOF_HEADER)
            if self._wants_proof and instance is not None and shown != proof(self._token, instance, nonce):
                raise Stranger(f"{path}: {NO_PROOF} (status {response.status}: {await _error(response)})")
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise Stranger(f"{path}: the answer is compressed, which was not asked for")
            if response.status == 200:
                return await read(response)
            message, is_json = f"{path}: status {response.status}: {await _error(response)}", _is_json(response)
        if is_json and (path, response.status) in _KINDS:
            raise _KINDS[path, response.status](message, is_final=True)
        raise ServerLost(message, is_final=True) if response.status >= 500 else Stranger(message)

    async def _within(self, most_bytes: int, response: aiohttp.ClientResponse) -> memoryview:
        """The body of `_whole`, if it is announced to have at most ``most_bytes``."""
        if (response.content_length or 0) > most_bytes:
            raise ServerLost(
                f"{GENERATE}: an answer of {response.content_length} bytes; to this request it has at most {most_bytes}"
            )
        return await self._whole(response)

    async def _whole(self, response: aiohttp.ClientResponse) -> memoryview:
        """The body, in memory of its own that is written once. Takes note of the server's load."""
        if response.content_type != MEDIA_TYPE or response.content_length is None:
            return memoryview(b"")  # what is between us and the server answered in its place
        self.load = Load.of(response.headers.get(LOAD_HEADER))
        self.elsewhere = max(0, self.load.queue - (self._in_flight - 1))  # the answered one is not among them
        body, position = memoryview(np.empty(response.content_length, np.uint8)), 0
        async for piece, _ in response.content.iter_chunks():
            body[position : position + len(piece)] = piece
            position += len(piece)
        return body


def _is_json(response: aiohttp.ClientResponse) -> bool:
    return response.content_type == "application/json"


async def _body(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """The body, at most ``limit`` bytes of it and those that came with the last."""
    pieces, size = [], 0
    async for piece in response.content.iter_any():
        pieces.append(piece)
        size += len(piece)
        if size > limit:
            break
    return b"".join(pieces)


async def _json(response: aiohttp.ClientResponse, limit: int = JSON_BYTES) -> Any:
    """The body as JSON (RFC 8259: no NaN). Raises `Stranger` for anything else, and for more than ``limit`` bytes."""
    path = response.url.path
    if not _is_json(response):
        raise Stranger(f"{path}: expected JSON, got {printable(response.content_type, 60)}: {await _error(response)}")
    text = await _body(response, limit)
    if len(text) > limit:
        raise Stranger(f"{path}: the answer has more than {limit} bytes")
    try:
        return json.loads(text.decode(), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        why = printable(str(error), ERROR_CHARS)
        raise Stranger(f"{path}: the answer is not JSON ({type(error).__name__}: {why})") from error


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


async def _error(response: aiohttp.ClientResponse) -> str:
    """The beginning of a text that is not understood, in printable characters."""
    return printable((await _body(response, ERROR_BYTES))[:ERROR_BYTES].decode(errors="replace"), ERROR_CHARS)


async def _nothing(response: aiohttp.ClientResponse) -> None:
    """For an answer that says all with its status."""
