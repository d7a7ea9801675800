"""Unit costs of a rollout server for `megatron_rl.instruments.plan.fleet`, measured on an idle one over HTTP.

A decoding step by the number of running responses: long responses beside short ones. A request: responses of
`LONG` tokens on all slots, beside fewer of them while short ones come and go on the slots that are left. So a request
costs what it takes away from those that decode, without what a burst of requests adds: steps of the engine that no
response decodes in, and the client's own work, which goes on beside the server's.
"""

from __future__ import annotations

import asyncio
import statistics
import time

import numpy as np

from megatron_rl.instruments.plan.fleet import ServerCosts
from megatron_rl.rollout import Sampling
from megatron_rl.rollout.requests import Request
from megatron_rl.rollout.servers.client import ServerClient, ServerLost, Weights, request_body
from megatron_rl.rollout.servers.rendezvous import Address
from megatron_rl.types import Prompt

SHORT, LONG = 16, 192  # tokens of a response
RUNNING = (1, 4, 16, 32, 64)  # responses at a time; the last fill all slots
COMING, COMING_TOKENS = 16, 15  # slots of the responses that come and go, and their length; it does not divide `LONG`
PREFILLED = (8, 200)  # tokens of a prompt


class Probe:
    """Asks an idle server for responses of fixed lengths to prompts that no cache holds."""

    def __init__(self, client: ServerClient, vocab_size: int) -> None:
        self._client, self._random = client, np.random.default_rng(0)
        self._vocab_size = vocab_size

    async def _respond(self, tokens: int, prompt_tokens: int = PREFILLED[0]) -> None:
        prompt = self._random.integers(0, self._vocab_size, prompt_tokens).tolist()
        request = Request(0, Prompt("", prompt, ""), 0, int(self._random.integers(1 << 62)))
        await self._client.generate(request_body(request, Sampling(tokens, 1.0), []), 0)

    async def seconds(self, number: int, tokens: int, prompt_tokens: int = PREFILLED[0]) -> float:
        """Of ``number`` responses of ``tokens`` tokens at once."""
        start = time.perf_counter()
        await asyncio.gather(*(self._respond(tokens, prompt_tokens) for _ in range(number)))
        return time.perf_counter() - start

    async def seconds_beside(self, number: int, coming: int) -> tuple[float, int]:
        """Of ``number`` responses of `LONG` tokens while ``coming`` places are taken by short ones, one after the
        other; and how many of these came after the first of each place."""
        came = 0

        async def place() -> None:
            nonlocal came
            while not ended.done():
                await self._respond(COMING_TOKENS)
                came += not ended.done()

        start = time.perf_counter()
        ended = asyncio.gather(*(self._respond(LONG) for _ in range(number)))
        places = [asyncio.create_task(place()) for _ in range(coming)]
        await ended
        seconds, batches = time.perf_counter() - start, came
        await asyncio.gather(*places)
        return seconds, batches

    async def request_s(self) -> float:
        """Of a request to a server whose slots are all taken, before and after it."""
        alone = await self.seconds(RUNNING[-1], LONG)
        seconds, came = await self.seconds_beside(RUNNING[-1] - COMING, COMING)
        return max(0.0, seconds - alone) / came

    async def median(self, rounds: int, *shapes: tuple[int, ...]) -> list[float]:
        """Seconds of each of ``shapes``, in turns."""
        times = [[await self.seconds(*shape) for shape in shapes] for _ in range(rounds)]
        return [statistics.median(column) for column in zip(*times, strict=True)]


async def until_up(client: ServerClient) -> None:
    """A server says where it is just before it answers."""
    while True:
        try:
            return await client.check_health()
        except ServerLost:
            await asyncio.sleep(0.1)


async def server_costs(address: Address, token: str, vocab_size: int, rounds: int) -> ServerCosts:
    """Medians over ``rounds``. The server gets its own checkpoint as weights of version 0."""
    client = ServerClient(address, token, 600.0)
    probe, steps, slots = Probe(client, vocab_size), [], RUNNING[-1]
    try:
        await until_up(client)
        await client.push(Weights(0))
        await probe.seconds(slots, LONG)  # compilation and caches
        for number in RUNNING:
            short, long = await probe.median(rounds, (number, SHORT), (number, LONG))
            steps.append((long - short) / (LONG - SHORT))
        request_s = statistics.median([await probe.request_s() for _ in range(rounds)])
        low, high = await probe.median(rounds, *((slots, 1, tokens) for tokens in PREFILLED))
    finally:
        await client.close()
    read = np.interp(np.arange(slots + 1), [0, *RUNNING], [steps[0], *steps])
    token_s = max(0.0, (high - low) / slots / (PREFILLED[1] - PREFILLED[0]))
    return ServerCosts(slots=slots, overhead=0.0, read=read.tolist(), request=request_s, prefill=(token_s, 0.0))
