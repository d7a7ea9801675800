"""Responses under way inside a server, and which policy sampled which of their tokens.

vLLM's engine runs in a process of its own, ahead of what this one has seen: finished steps are on their way here, and
with asynchronous scheduling a further step runs whose tokens nobody knows. So a weight update counts tokens at a moment
at which none are on their way (`UnderWay.hold`):

1. No request is between this module and the engine; the guard lets no others in.
2. The scheduler is paused. vLLM answers when no step runs and none waits to be processed, and the answer takes the
   way of all outputs before it.
3. A mark is put into the queue of these outputs. When it is reached, every output before it has been processed.

A response's tokens that are known then were sampled by the old weights, and all others will be by the new ones.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from megatron_rl.rollout.generator import RolloutError

ALL = np.iinfo(np.int32).max


class Overtaken(Exception):
    """The weights that a response is for were replaced before its request reached the engine."""


class UnderWay:
    """All responses of ``engine``, vLLM's AsyncLLM. Lives in one event loop."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._numbers = engine, itertools.count()
        self._version = 0  # of the weights that sample now
        self._num_updates = 0
        self.num_prompt_tokens = self.num_cached_tokens = 0  # of all requests; of these, found in the prefix cache
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
        self.num_prompt_tokens += len(prompt)
        self.num_cached_tokens += getattr(output, "num_cached_tokens", None) or 0
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
