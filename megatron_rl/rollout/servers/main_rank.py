"""Work in the background, in an event loop in a thread, and what only rank 0 does, with results for all ranks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from megatron_rl.process.ranks import broadcast_object, world_rank
from megatron_rl.rollout.servers.fetching import HEARTBEAT_S, as_fault

T = TypeVar("T")


class MainRank:
    """The same object on every rank. ``works``: whether coroutines run on this rank, as they always do on rank 0."""

    def __init__(self, works: bool = False) -> None:
        self.is_this = world_rank() == 0
        self.works = works or self.is_this
        self._loop: asyncio.AbstractEventLoop | None = None
        if self.works:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="rollout servers", daemon=True)
            self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Begin ``work``, on a rank that works."""
        assert self._loop is not None, "only some ranks work, and only until close"
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, action: Callable[[], Any]) -> None:
        """Have ``action`` done in the event loop, after what is at hand."""
        assert self._loop is not None, "only some ranks work, and only until close"
        self._loop.call_soon_threadsafe(action)

    def wait(self, future: concurrent.futures.Future | None) -> Any:
        """Rank 0's result, or its error, on every rank. ``future``: None on the other ranks."""
        while True:
            done = future is not None and bool(concurrent.futures.wait([future], HEARTBEAT_S).done)
            if self.share(lambda done=done: done):
                return self.share(lambda: future.result())

    def share(self, action: Callable[[], T]) -> T:
        """What ``action`` returns or raises on rank 0, on every rank."""
        outcome: list[Any] = [None, None]
        if self.is_this:
            try:
                outcome[0] = action()
            except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks are waiting
                outcome[1] = as_fault(error)
        result, error = broadcast_object(outcome)
        if error is not None:
            raise error
        return result

    def close(self, last: Coroutine[Any, Any, None] | None = None) -> None:
        """Cancel what still runs, then run ``last``, then end the thread. Safe to call twice."""
        if self._loop is None:
            if last is not None:
                last.close()
            return

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            if last is not None:
                await last

        loop, self._loop = self._loop, None
        asyncio.run_coroutine_threadsafe(end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join()
        loop.close()
