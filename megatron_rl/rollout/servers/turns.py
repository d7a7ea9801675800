"""Conversations of a user's `rollout.function` on servers: every turn is one more request of the batch's `Dispatch`.

Functions run in an event loop and a thread of their own, so that one which computes or blocks does not keep the rank
from looking after its servers. A turn asks for the routes from the last row on that the conversation has, so that no
row is sent twice. A server seals the routes of each turn for the response's id and place, and the seals of all turns
add up to those of the whole (`routing.payload`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from megatron_rl.rollout.conversation import Client, Conversation, Talk, Turn, converse
from megatron_rl.rollout.generator import RolloutError, Sampling
from megatron_rl.rollout.requests import Request
from megatron_rl.rollout.servers.dispatch import Dispatch
from megatron_rl.rollout.servers.wire import Answer

CLOSE_S = 5.0  # for functions to notice that they are cancelled; one that blocks ends with the process

ChangeBody = Callable[[Request, dict[str, Any]], None]


class TalkLoop:
    """The event loop of the functions. It lasts as long as the run, so that they can keep connections open."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="conversations", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cancel what still runs and end the thread. May be called twice."""
        if self.loop.is_closed():
            return
        self.loop.call_soon_threadsafe(self._end)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self.loop.close()

    def _end(self) -> None:
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        if left:
            asyncio.gather(*left, return_exceptions=True).add_done_callback(lambda _: self.loop.stop())
        else:
            self.loop.stop()


class Conversations:
    """The conversations of one batch on one rank. Lives in the event loop of the servers.

    ``dispatch``: of the batch, open for requests. ``stop_token_ids``: the recipe's. ``change_body``: called with every
    request and what its server is sent. ``deadline_s``: how long all may wait for tools; None: without limit.
    """

    def __init__(
        self,
        talk: Talk,
        loop: asyncio.AbstractEventLoop,
        dispatch: Dispatch,
        requests: Sequence[Request],
        sampling: Sampling,
        stop_token_ids: list[int],
        vocab_size: int,
        change_body: ChangeBody,
        deadline_s: float | None,
    ) -> None:
        self._talk, self._loop, self._dispatch, self._requests = talk, loop, dispatch, requests
        self._sampling, self._stop_token_ids, self._vocab_size = sampling, stop_token_ids, vocab_size
        self._change_body, self._deadline_s = change_body, deadline_s
        self._turns: dict[int, asyncio.Future[Answer]] = {}  # under way, by their number in the dispatch
        self._moved = time.monotonic()  # when a turn last began or ended
        self._home: asyncio.AbstractEventLoop  # of the servers; set by `completions`

    async def completions(self) -> AsyncIterator[tuple[int, Conversation]]:
        """Yield the number of a request and its conversation as conversations end; fewer where the batch is given up.

        Raises `RolloutError` where a function fails, where all wait for tools for ``deadline_s``, and what `Dispatch`
        raises. The other conversations are then cancelled.
        """
        self._home, ended = asyncio.get_running_loop(), asyncio.Queue[tuple[int, concurrent.futures.Future] | None]()
        pump = asyncio.create_task(self._pump())
        pump.add_done_callback(lambda _: ended.put_nowait(None))
        begun = [asyncio.run_coroutine_threadsafe(self._hold(request), self._loop) for request in self._requests]
        for index, future in enumerate(begun):

            def tell(future: concurrent.futures.Future, index: int = index) -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._home.call_soon_threadsafe(ended.put_nowait, (index, future))

            future.add_done_callback(tell)
        try:
            for _ in begun:
                news = await self._next(ended)
                if news is None:
                    pump.result()  # raises what ended it; else the batch was given up
                    return
                index, future = news
                yield index, future.result()
        finally:
            for future in begun:
                future.cancel()
            self._dispatch.is_open = False
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)

    async def _next(self, ended: asyncio.Queue) -> Any:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._deadline_s):
                    return await ended.get()
            if not self._turns and time.monotonic() - self._moved >= self._deadline_s:
                raise RolloutError(
                    f"rollout.function {self._talk.name}: no conversation went on for rollout.deadline_s "
                    f"({self._deadline_s} s); give its tools a time-out of their own"
                )

    async def _pump(self) -> None:
        async with contextlib.aclosing(self._dispatch.completions()) as completions:
            async for number, answer in completions:
                if (future := self._turns.get(number)) is not None and not future.done():
                    future.set_result(answer)

    async def _ask(self, body: dict[str, Any], name: str, row: int) -> tuple[Answer, int]:
        """In the servers' loop: the answer to one turn, and its number in the dispatch."""
        number, self._moved = self._dispatch.add(body, name, row), time.monotonic()
        future = self._turns[number] = asyncio.get_running_loop().create_future()
        try:
            return await future, number
        except asyncio.CancelledError:  # the function gave the turn up
            self._dispatch.give_up([number])
            raise
        finally:
            del self._turns[number]
            self._moved = time.monotonic()

    # ---------------------------------------------------------------- in the functions' loop

    async def _hold(self, request: Request) -> Conversation:
        turns = _TurnsOf(request, self)
        client = Client(self._talk, request, turns, self._sampling, self._stop_token_ids, self._vocab_size)
        try:
            return await converse(self._talk, client, request)
        except RolloutError:
            if asyncio.current_task().cancelling():  # by `completions`: nobody asks why it failed
                raise asyncio.CancelledError from None
            raise

    async def sample(self, request: Request, tokens: list[int], fields: dict[str, Any], first_row: int) -> Turn:
        """Return the turn of ``request`` after ``tokens``."""
        body = {
            "id": request.sequence_id,
            "token_ids": tokens,
            "sampling_params": fields,
            "wants_routes": self._sampling.wants_routes,
            "first_route": first_row,
        }
        self._change_body(request, body)
        name = f"prompt {request.prompt.id!r}, sample {request.sample}"
        asked = asyncio.run_coroutine_threadsafe(self._ask(body, name, request.row), self._home)
        answer, number = await asyncio.wrap_future(asked)
        return Turn(
            tokens,
            answer.tokens.tolist(),
            answer.logprobs.tolist(),
            answer.finish_reason,
            answer.routes,
            first_row,
            answer.route_checksums,
            answer.versions,
            self._dispatch.legs[number].counts(0),
        )


class _TurnsOf:
    """`TurnSource` of one of the conversations."""

    def __init__(self, request: Request, conversations: Conversations) -> None:
        self._request, self._conversations = request, conversations

    async def answer(self, tokens: list[int], fields: dict[str, Any], first_row: int) -> Turn:
        return await self._conversations.sample(self._request, tokens, fields, first_row)
