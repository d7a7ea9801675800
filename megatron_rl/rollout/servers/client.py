"""The trainer's end of one server: HTTP with token ids, as `pool` needs it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp
import numpy as np

from megatron_rl.config.rollout import InFlightMode
from megatron_rl.rollout.generator import Sampling
from megatron_rl.rollout.requests import Request
from megatron_rl.rollout.sampling_params import sampling_fields
from megatron_rl.rollout.servers.load import LOAD_HEADER, Load
from megatron_rl.rollout.servers.rendezvous import Address
from megatron_rl.rollout.servers.weight_group import GroupPlace
from megatron_rl.rollout.servers.wire import IDLE_S, MEDIA_TYPE, Answer, Damaged, unpack

CONNECT_S = 10.0  # to a server that is there, a connection takes milliseconds
HEALTH_S = 10.0
READ_BYTES = 4 << 20  # of an answer that may wait to be read: 8k tokens with routes are 3.3 MB


class ServerError(RuntimeError):
    """A call failed. The subclasses say what to do about it. ``is_final``: asking again is known to be useless."""

    def __init__(self, message: str, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


class ServerLost(ServerError):
    """The server cannot be reached, or its engine has stopped."""


class StaleServer(ServerError):
    """The server holds other weights than the request is for."""


class UpdateInterrupted(ServerError):
    """A broadcast of weights broke off. The server is closed; it can take part in the next one."""


class RequestRefused(ServerError):
    """The server understood and said no: asking again, here or elsewhere, would not help."""


_KINDS = {409: StaleServer, 503: UpdateInterrupted}


@dataclass(frozen=True)
class Weights:
    """One policy's weights and how a server gets them: from ``files`` that it can read (empty: the checkpoint that it
    started from), or, with ``broadcast``, in a group. ``files`` None: nobody can read them, they were broadcast."""

    version: int
    files: tuple[str, ...] | None = ()
    broadcast: GroupPlace | None = None


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

    ``mode``: what an update does to responses under way (`InFlightMode`).
    """

    def __init__(self, address: Address, token: str, deadline_s: float, mode: InFlightMode = "finish") -> None:
        self.address, self._deadline_s, self._mode = address, deadline_s, mode
        self.load, self.elsewhere = Load(), 0  # as the server last said: how busy it is; requests of other ranks
        self._in_flight = 0
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {token}"},
            # The pool bounds how many requests are in flight.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            read_bufsize=READ_BYTES,
        )

    async def settings(self) -> dict[str, Any]:
        """What the server says of itself: `server._settings`."""
        return await self._call("GET", "/megatron_rl/settings", limit_s=HEALTH_S)

    async def check_health(self) -> None:
        """Raises `ServerLost` unless the server's engine is alive."""
        await self._call("GET", "/health", limit_s=HEALTH_S)

    async def push(self, weights: Weights) -> dict[str, int]:
        """Replace the server's weights, then let it answer for this version.

        Returns the number of ``tensors`` and ``bytes`` that every worker of the server got. Raises `UpdateInterrupted`
        where a broadcast broke off.
        """
        how = (
            {"files": list(weights.files or ())}
            if weights.broadcast is None
            else {"broadcast": asdict(weights.broadcast)}
        )
        body = {"version": weights.version, "mode": self._mode, **how}
        return await self._call("POST", "/megatron_rl/weights", body)

    async def generate(self, body: dict[str, Any], version: int) -> Answer:
        """One response, begun by the weights of ``version``.

        Under mode `finish` no others sample any of it. Else ones that came meanwhile may have sampled its end (see
        `Answer.versions`), or it was cut for them (finish reason "abort").
        """
        headers = {"X-Policy-Version": str(version)}
        self._in_flight += 1
        try:
            found = await self._call("POST", "/megatron_rl/generate", body, headers, read=self._whole)
        finally:
            self._in_flight -= 1
        try:
            answer = unpack(found)
        except Damaged as error:
            raise ServerLost(f"/megatron_rl/generate: the answer is damaged: {error}") from error
        if self._mode == "finish" and answer.finish_reason == "abort":
            raise StaleServer("the response was aborted")
        if self._mode == "finish" and (answer.versions != version).any():
            raise StaleServer(f"tokens of other policy versions than {version}")
        return answer

    async def checksums(self) -> dict[str, int]:
        """Checksums of every stored parameter. Closes the server until the next push."""
        return (await self._call("POST", "/collective_rpc", {"method": "checksums"}))["results"][0]

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
        """What ``read`` makes of the answer; None: its JSON."""
        limit_s = limit_s or self._deadline_s
        try:
            async with (
                asyncio.timeout(limit_s),
                self._session.request(method, self.address.url + path, json=body, headers=headers) as response,
            ):
                if response.status == 200:
                    return await (read or _json)(response)
                text = " ".join((await response.text()).split())[:300]
        except TimeoutError as error:
            raise ServerLost(f"{path.partition('?')[0]}: no answer in {limit_s:g} s") from error
        except (aiohttp.ClientError, OSError, RuntimeError) as error:  # RuntimeError: the session was closed
            refused = isinstance(error, aiohttp.ClientConnectorError)
            raise ServerLost(f"{path.partition('?')[0]}: {type(error).__name__}: {error}", refused) from error
        kind = _KINDS.get(response.status, ServerLost if response.status >= 500 else RequestRefused)
        raise kind(f"{path.partition('?')[0]}: status {response.status}: {text}", is_final=True)

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


async def _json(response: aiohttp.ClientResponse) -> Any:
    return await response.json() if response.content_type == "application/json" else None
