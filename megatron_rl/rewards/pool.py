"""A pool of reward workers. A task that exceeds its limits is ended; tasks that wait share a worker.

A thread of the pool hands tasks out and collects their outcomes, so that responses are scored while others are sampled.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from megatron_rl.errors import InputError, printable
from megatron_rl.rewards.worker import BrokenFrames, Setup, end_descendants, read_frame, write_frame

_START_S = 300.0  # longest start of a worker, with imports over a slow file system
_GRACE_S = 10.0  # time beyond the worker's own wall limit until its process is replaced
_MOST_REPLY_BYTES = 1 << 20  # a number, or the end of a traceback
_PROGRAM = "from megatron_rl.rewards.worker import main; main()"
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
Task = Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """Result of one task: a value, or the reason for its absence. ``retries``: calls that were made again for it."""

    value: float = 0.0
    failure: Literal["", "limit", "crash", "error", "unjudged"] = ""
    detail: str = ""
    retries: int = 0


@dataclass(eq=False)
class _Item:
    """A task that waits or is under way."""

    task: Task
    future: Future[Outcome]
    was_lost: bool = False  # with a worker that it shared: it may not be to blame


@dataclass(frozen=True)
class _Style:
    is_async: bool = False
    takes_lists: bool = False


@dataclass(eq=False)
class _Call:
    """What a worker computes: one task, or several with one call of a function that takes lists."""

    items: list[_Item]
    style: _Style
    deadline: float


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen
    requests: int  # the ends of its pipes
    replies: int
    share: int  # of `concurrency`
    start_deadline: float
    ready: bool = False
    calls: dict[int, _Call] = field(default_factory=dict)  # by id

    @property
    def deadline(self) -> float:
        """When the next of its calls is over time, or its start; infinite where it has nothing to do."""
        if not self.ready:
            return self.start_deadline
        return min((call.deadline for call in self.calls.values()), default=math.inf)

    def room(self, style: _Style) -> int:
        """Return how many tasks of ``style`` it can be given in one call."""
        if not style.is_async:
            return 0 if self.calls else self.share if style.takes_lists else 1
        if any(not call.style.is_async for call in self.calls.values()):
            return 0
        left = self.share - sum(len(call.items) for call in self.calls.values())
        return left if style.takes_lists else min(1, left)


class WorkerPool(contextlib.AbstractContextManager):
    """Persistent worker processes. They are not forked from this process, which may have threads and GPUs.

    ``concurrency``: tasks of async functions that are under way at a time, over all workers. ``setup``: of `Setup`.
    Workers start with the pool and get ready while the caller continues.
    """

    def __init__(self, num_workers: int, *, concurrency: int = 1, **setup: Any) -> None:
        self._setup = Setup(**setup)
        self._lock = threading.Lock()  # around what other threads see: queue, thread, end
        self._queue: deque[_Item] = deque()
        self._styles: dict[str, _Style] = {}
        self._thread: threading.Thread | None = None
        self._ends = False
        self._problem: BaseException | None = None  # why nothing can be computed any more
        self._bell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # wakes the thread
        self._next_id = 1
        self.num_restarts = 0
        at = [concurrency * number // num_workers for number in range(num_workers + 1)]
        self._workers = [self._start(end - begin) for begin, end in pairwise(at)]

    def _start(self, share: int) -> _Worker:
        paths = [_PACKAGE_ROOT, *(path for path in sys.path if path)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        environment.setdefault("MALLOC_ARENA_MAX", "2")  # a thread's arena would count 64 MiB against the memory limit
        command = [sys.executable, "-c", _PROGRAM, json.dumps(asdict(self._setup))]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        # one signal ends a worker together with its child: they are a session of their own
        process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
        requests, replies = (pipe.fileno() for pipe in (process.stdin, process.stdout) if pipe is not None)
        os.set_blocking(requests, False)
        return _Worker(process, requests, replies, share, time.monotonic() + _START_S)

    # ---------------------------------------------------------------- for any thread

    def submit(self, tasks: Sequence[Task]) -> list[Future[Outcome]]:
        """Begin to run ``tasks`` and return at once. A future that is cancelled before its task begins saves the call.

        Futures raise `InputError` if a function cannot be loaded, RuntimeError if no worker starts or the pool closes.
        """
        items = [_Item(task, Future()) for task in tasks]
        with self._lock:
            if self._problem is not None:
                raise self._problem
            self._queue += items
            if items and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="rewards", daemon=True)
                self._thread.start()
            self._ring()
        return [item.future for item in items]

    def run(self, tasks: Sequence[Task]) -> list[Outcome]:
        """Run ``tasks`` and return their outcomes in order."""
        return [future.result() for future in self.submit(tasks)]

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self._bell[1], b".")

    # ---------------------------------------------------------------- in the pool's thread

    def _work(self) -> None:
        problem: BaseException = RuntimeError("the pool of reward workers is closed")
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._bell[0], selectors.EVENT_READ)
                for worker in self._workers:
                    selector.register(worker.replies, selectors.EVENT_READ, worker)
                while not self._ends:
                    self._turn(selector)
        except BaseException as error:  # noqa: BLE001  whatever it is, callers wait for their outcomes
            problem = error
        with self._lock:
            self._problem, waiting = problem, list(self._queue)
            self._queue.clear()
        under_way = [item for worker in self._workers for call in worker.calls.values() for item in call.items]
        for item in under_way + waiting:
            if not item.future.cancelled() and not item.future.done():
                item.future.set_exception(problem)

    def _turn(self, selector: selectors.BaseSelector) -> None:
        self._hand_out(selector)
        soonest = min((worker.deadline for worker in self._workers), default=math.inf)
        patience = None if soonest == math.inf else max(0.0, soonest - time.monotonic())
        for key, _ in selector.select(patience):
            if key.data is None:
                os.read(self._bell[0], 1 << 16)
            elif key.data in self._workers:
                self._receive(key.data, selector)
        now = time.monotonic()
        for worker in [worker for worker in self._workers if worker.deadline <= now]:
            self._lose(worker, selector, "limit")

    def _hand_out(self, selector: selectors.BaseSelector) -> None:
        """Give workers the tasks that come next."""
        for worker in [worker for worker in self._workers if worker.ready]:
            while self._queue:
                style = self._styles.get(self._queue[0].task["kind"], _Style())
                room = worker.room(style)
                if not room:
                    break
                items = self._take(room)
                if items and not self._send(worker, items, style):
                    self._give_back(items)
                    self._replace(worker, selector)
                    break

    def _take(self, most: int) -> list[_Item]:
        """Take up to ``most`` tasks of one kind from the queue, without those that nobody wants any more."""
        with self._lock:
            kind, items = self._queue[0].task["kind"], []
            while self._queue and self._queue[0].task["kind"] == kind and len(items) < most:
                item = self._queue.popleft()
                if item.was_lost or item.future.set_running_or_notify_cancel():
                    items.append(item)
        return items

    def _give_back(self, items: Sequence[_Item]) -> None:
        with self._lock:
            for item in reversed(items):
                item.was_lost = True
                self._queue.appendleft(item)

    def _send(self, worker: _Worker, items: list[_Item], style: _Style) -> bool:
        """Send a call to ``worker``; return False if the worker has ended."""
        waits = style.is_async or style.takes_lists
        now, number = time.monotonic(), self._next_id
        limit = self._setup.longest_wait_s if waits else self._setup.wall_s
        call = _Call(items, style, now + limit + _GRACE_S)
        kind, self._next_id = items[0].task["kind"], number + 1
        try:
            message = {"id": number, "kind": kind, "tasks": [item.task for item in items]}
            write_frame(worker.requests, message, now + _GRACE_S)
        except (OSError, BrokenFrames):
            return False
        worker.calls[number] = call
        return True

    def _receive(self, worker: _Worker, selector: selectors.BaseSelector) -> None:
        """Read one message of ``worker``."""
        try:
            message = read_frame(worker.replies, time.monotonic() + _GRACE_S, _MOST_REPLY_BYTES)
        except BrokenFrames:
            message = None
        if message is None:  # the process is gone, or a reward function wrote into its pipe
            self._lose(worker, selector, "crash")
        elif not worker.ready and "fatal" in message:
            raise InputError(message["fatal"])
        elif "ready" in message:
            worker.ready = True
            self._styles = {kind: _Style(*style) for kind, style in message["styles"].items()}
        elif isinstance(number := message.get("id"), int) and number in worker.calls:
            items = worker.calls.pop(number).items
            for item, outcome in zip(items, _outcomes(message, len(items)), strict=True):
                item.future.set_result(outcome)

    def _lose(self, worker: _Worker, selector: selectors.BaseSelector, failure: Literal["limit", "crash"]) -> None:
        """End ``worker``, which died or is over time. A task that was not alone on it is computed once more."""
        if not worker.ready:
            status = worker.process.poll()
            raise RuntimeError(f"a reward worker did not start (exit status {status}); its messages are on stderr")
        now, calls, lost = time.monotonic(), list(worker.calls.values()), []
        worker.calls = {}
        for call in calls:
            is_late = failure == "limit" and call.deadline <= now
            if len(calls) > 1 and not is_late and not any(item.was_lost for item in call.items):
                self._give_back(call.items)
            else:
                lost += call.items
        try:
            self._replace(worker, selector)
        finally:  # who waits for an outcome finds a pool that is whole again
            for item in lost:
                item.future.set_result(Outcome(failure=failure))

    def _replace(self, worker: _Worker, selector: selectors.BaseSelector) -> None:
        for call in worker.calls.values():
            self._give_back(call.items)
        selector.unregister(worker.replies)
        _end(worker.process)
        fresh = self._start(worker.share)
        self._workers[self._workers.index(worker)] = fresh
        selector.register(fresh.replies, selectors.EVENT_READ, fresh)
        self.num_restarts += 1

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """End all workers. May be called twice."""
        with self._lock:
            was_closed, self._ends = self._ends, True
            self._problem = self._problem or RuntimeError("the pool of reward workers is closed")
        if was_closed:
            return
        if self._thread is not None:
            self._ring()
            self._thread.join(2 * _GRACE_S)
        for worker in self._workers:
            _end(worker.process)
        self._workers = []
        for end in self._bell:
            os.close(end)

    def __exit__(self, *_: object) -> None:
        self.close()


def _outcomes(message: Mapping[str, Any], count: int) -> list[Outcome]:
    """Return the outcomes of a call's ``count`` tasks from a worker's message; crashes if it is not valid."""
    results = message.get("results", [message] * count)
    if not isinstance(results, list) or len(results) != count:
        return [Outcome(failure="crash")] * count
    outcomes = [_outcome(result) for result in results]
    retries = message.get("retries", 0)
    if outcomes and type(retries) is int and retries > 0:
        outcomes[0] = replace(outcomes[0], retries=retries)
    return outcomes


def _outcome(result: Any) -> Outcome:
    """Return the outcome of a task from a worker's answer; a crash if it is not valid."""
    answer = result if isinstance(result, dict) else {"failure": "no answer"}
    value, detail = answer.get("value", 0.0), answer.get("error", "")
    failure = answer.get("failure") or ("error" if "error" in answer else "")
    is_number = type(value) in (int, float) and math.isfinite(value)
    if not is_number or not isinstance(detail, str) or failure not in ("", "limit", "crash", "error"):
        return Outcome(failure="crash")
    return Outcome(float(value), failure, printable(detail))


def _end(process: subprocess.Popen) -> None:
    """End a worker and all that its tasks have started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process.pid, signal.SIGSTOP)  # or it replaces its child
    end_descendants(process.pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait()
