"""The trainer's end of one server: HTTP with token ids, as `pool` needs it. Whatever fails is a `ServerError`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp
import numpy as np

from megatron_rl.config.rollout import InFlightMode
from megatron_rl.rollout.generator import Sampling, sampling_fields
from megatron_rl.rollout.requests import Request
from megatron_rl.rollout.servers.rendezvous import Address, printable
from megatron_rl.rollout.servers.weight_broadcast import Amount, GroupPlace
from megatron_rl.rollout.servers.wire import (
    COMPLETIONS,
    GENERATE,
    IDLE_S,
    LOAD_HEADER,
    SCORE,
    SETTINGS,
    WEIGHTS,
    Damaged,
    Load,
    unpack,
)
from megatron_rl.types import Rollout, Scores

CONNECT_S = 10.0  # to a server that is there, a connection takes milliseconds
HEALTH_S = 10.0
READ_BYTES = 4 << 20  # of an answer that may wait to be read: 8k tokens with routes are 3.3 MB
ERROR_BYTES, ERROR_CHARS = 4 << 10, 300  # of an error's text: read, and kept


class ServerError(RuntimeError):
    """A call failed. The subclasses say what to do about it. ``is_final``: asking again is known to be useless."""

    def __init__(self, message: str, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


class ServerLost(ServerError):
    """The server cannot be reached, or its engine has stopped, or something else answers in its place."""


class StaleServer(ServerError):
    """The server holds other weights than the request is for."""


class UpdateInterrupted(ServerError):
    """A broadcast of weights broke off. The server is closed; it can take part in the next one."""


class RequestRefused(ServerError):
    """The server understood and said no: asking again, here or elsewhere, would not help."""


# What a status means, by the path that was asked; any other is `ServerLost`.
_KINDS = {
    (WEIGHTS, 400): RequestRefused,
    (WEIGHTS, 503): UpdateInterrupted,
    (GENERATE, 400): RequestRefused,
    (GENERATE, 409): StaleServer,
    (SCORE, 400): RequestRefused,
    (COMPLETIONS, 400): RequestRefused,
    (SETTINGS, 404): RequestRefused,
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
        "head": sampling.head,
    }


class ServerClient:
    """One server. Made and used inside the event loop. ``token``: goes with every request. ``deadline_s``: limit of
    every call that does work. ``mode``: what an update does to responses under way (`InFlightMode`)."""

    def __init__(self, address: Address, token: str, deadline_s: float, mode: InFlightMode = "finish") -> None:
        self.address, self._deadline_s, self._mode = address, deadline_s, mode
        self.load, self.elsewhere = Load(), 0  # as the server last said: how busy it is; requests of other ranks
        self._in_flight = 0
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"},
            # The pool bounds how many requests are in flight.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            read_bufsize=READ_BYTES,
        )

    async def settings(self) -> dict[str, Any]:
        """What the server says of itself; `ServerSettings.of` reads it. Raises `ServerLost` where its engine is
        dead."""
        return await self._call("GET", SETTINGS, limit_s=HEALTH_S)

    async def push(self, weights: Weights) -> Amount:
        """Replace the server's weights, then let it answer for this version.

        Returns what every worker of the server got. Raises `ServerLost` where this is not ``weights.amount``,
        `UpdateInterrupted` where a broadcast broke off.
        """
        how = (
            {"files": list(weights.files or ())}
            if weights.broadcast is None
            else {"broadcast": asdict(weights.broadcast)}
        )
        reply = await self._call("POST", WEIGHTS, {"version": weights.version, "mode": self._mode, **how})
        try:
            amount = Amount(reply["tensors"], reply["bytes"])
        except (TypeError, KeyError) as error:
            raise ServerLost(f"{WEIGHTS}: the answer does not say what arrived") from error
        if weights.amount not in (None, amount):
            raise ServerLost(f"{WEIGHTS}: the server got {amount}, but {weights.amount} were sent")
        return amount

    async def generate(self, body: dict[str, Any], version: int) -> Rollout:
        """One response, begun by the weights of ``version``. Ones that came meanwhile may have sampled its end (see
        `Rollout.policy_versions`), or it was cut for them (finish reason "abort")."""
        self._in_flight += 1
        try:
            reply = await self._call("POST", GENERATE, body, {"X-Policy-Version": str(version)}, read=self._whole)
        finally:
            self._in_flight -= 1
        return _unpacked(GENERATE, reply)

    async def score(self, body: dict[str, Any]) -> Scores:
        """What a server of ours says; ``body``: see `server.score`."""
        answer = _unpacked(SCORE, await self._call("POST", SCORE, body, read=self._whole))
        return Scores(answer.inference_logprobs, answer.head_tokens, answer.head_logprobs)

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON that a server of another kind answers."""
        return await self._call(method, path, body)

    async def close(self) -> None:
        """Drop all connections; calls in progress fail."""
        await self._session.close()

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
            async with (
                asyncio.timeout(limit_s),
                self._session.request(
                    method, self.address.url + path, json=body, headers=headers, allow_redirects=False
                ) as response,
            ):
                if response.status == 200:
                    return await (read or _json)(response)
                text = (await response.content.read(ERROR_BYTES)).decode(errors="replace")
        except ServerError:
            raise
        except TimeoutError as error:
            raise ServerLost(f"{path}: no answer in {limit_s:g} s") from error
        except Exception as error:
            refused = isinstance(error, aiohttp.ClientConnectorError)
            text = printable(str(error), ERROR_CHARS)
            raise ServerLost(f"{path}: {type(error).__name__}: {text}", refused) from error
        is_own = response.content_type == "application/json"  # else what is between us and the server answered
        kind = _KINDS.get((path, response.status), ServerLost) if is_own else ServerLost
        raise kind(f"{path}: status {response.status}: {printable(text, ERROR_CHARS)}", is_final=True)

    async def _whole(self, response: aiohttp.ClientResponse) -> memoryview:
        """The body, in memory of its own that is written once. Takes note of the server's load."""
        self.load = Load.of(response.headers.get(LOAD_HEADER))
        self.elsewhere = max(0, self.load.queue - (self._in_flight - 1))  # the answered one is not among them
        body, position = memoryview(np.empty(response.content_length or 0, np.uint8)), 0
        async for piece, _ in response.content.iter_chunks():
            body[position : position + len(piece)] = piece
            position += len(piece)
        return body


def _unpacked(path: str, reply: memoryview) -> Rollout:
    try:
        return unpack(reply)
    except Damaged as error:
        raise ServerLost(f"{path}: the answer is damaged: {printable(str(error), ERROR_CHARS)}") from error


async def _json(response: aiohttp.ClientResponse) -> Any:
    try:
        return json.loads(await response.read())
    except (ValueError, RecursionError) as error:
        why = printable(str(error), ERROR_CHARS)
        raise ServerLost(f"{response.url.path}: the answer is not JSON ({why})", is_final=True) from error
