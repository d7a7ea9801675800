"""What servers ask of vLLM's AsyncLLM, without an engine: requests, outputs that arrive late, pauses and aborts."""

import asyncio
from types import SimpleNamespace
from typing import Any


class Collector:
    """What `AsyncLLM.add_request` returns: the queue of one request's outputs."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self.put, self.get = self._queue.put_nowait, self._queue.get

    def get_nowait(self) -> Any:
        return None if self._queue.empty() else self._queue.get_nowait()

    def close(self) -> None:
        pass


class State:
    """vLLM's `RequestState`."""

    def __init__(self, name: str, collector: Collector) -> None:
        self.external_req_id, self.collector, self.tokens = name, collector, []
        self.detokenizer = SimpleNamespace(num_output_tokens=lambda: len(self.tokens))

    def end(self, reason: str) -> None:
        completion = SimpleNamespace(token_ids=list(self.tokens), finish_reason=reason)
        self.collector.put(SimpleNamespace(finished=True, outputs=[completion]))


class MadeUpEngine:
    """`AsyncLLM` whose engine samples when the test says so (`step`), and whose outputs are processed one by one.

    A token's value is the weights that sampled it. ``calls``: what was asked of the engine, in order.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.asked: list[tuple] = []
        self.weights, self.is_paused, self.fails = 0, False, False
        self.engine_core = self
        self.outputs_queue: asyncio.Queue[Any] = asyncio.Queue()
        self.output_processor = SimpleNamespace(request_states={})
        self.output_handler: asyncio.Task | None = None
        self.may_enter, self.may_process = asyncio.Event(), asyncio.Event()
        self.may_enter.set()
        self.may_process.set()
        self._running: dict[str, int] = {}  # by name: tokens that are left

    async def add_request(self, name: str, prompt: dict[str, Any], params: Any) -> Collector:
        self.asked.append((prompt, params, name))
        await self.may_enter.wait()
        if self.output_handler is None:
            self.output_handler = asyncio.create_task(self._process())
        collector = Collector()
        self.output_processor.request_states[name] = State(name, collector)
        self._running[name] = params.max_tokens
        return collector

    def step(self) -> None:
        """Sample one token for every request; this process does not know of it yet."""
        assert not self.is_paused
        outputs = []
        for name in list(self._running):
            self._running[name] -= 1
            is_last = not self._running[name]
            outputs.append((name, self.weights, is_last))
            if is_last:
                del self._running[name]
        self.outputs_queue.put_nowait(SimpleNamespace(outputs=outputs))

    async def _process(self) -> None:
        while True:
            for name, token, is_last in (await self.outputs_queue.get()).outputs:
                await self.may_process.wait()
                state = self.output_processor.request_states.get(name)
                if state is not None:
                    state.tokens.append(token)
                    if is_last:
                        del self.output_processor.request_states[name]
                        state.end("stop")

    async def abort(self, names: str | list[str]) -> None:
        for name in [names] if isinstance(names, str) else names:
            self.calls.append(f"abort {name}")
            self._running.pop(name, None)
            if (state := self.output_processor.request_states.pop(name, None)) is not None:
                state.end("abort")

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        self.calls.append(f"pause {mode} {clear_cache}")
        self.is_paused = True

    async def resume_scheduler_async(self) -> None:
        self.calls.append("resume")
        self.is_paused = False

    async def collective_rpc(self, method: str, args: tuple) -> list[dict]:
        self.calls.append(f"{method} {args[0]['files']}")
        if self.fails:
            raise RuntimeError("lost")
        self.weights += 1
        return [{"tensors": 1, "bytes": 4}]
