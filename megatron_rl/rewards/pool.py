"""A pool of reward workers. Each has one task at a time; a task that exceeds its limits is ended."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_rl.errors import InputError, printable
from megatron_rl.rewards.worker import BrokenFrames, end_descendants, read_frame, write_frame

WALL_PER_CPU = 4.0  # wall seconds per allowed processor second, for tasks that sleep and busy machines
_START_S = 300.0  # longest start of a worker, with imports over a slow file system
_GRACE_S = 10.0  # time beyond the worker's own wall limit until its process is replaced
_MOST_REPLY_BYTES = 1 << 20  # a number, or the end of a traceback
_PROGRAM = "from megatron_rl.rewards.worker import main; main()"
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True)
class Outcome:
    """Result of one task: a value, or the reason for its absence."""

    value: float = 0.0
    failure: Literal["", "limit", "crash", "error"] = ""
    detail: str = ""


@dataclass
class _Worker:
    process: subprocess.Popen
    deadline: float
    ready: bool = False
    task: int | None = None  # index of the task at hand

    @property
    def replies(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    @property
    def requests(self) -> int:
        assert self.process.stdin is not None
        return self.process.stdin.fileno()


class WorkerPool:
    """Persistent worker processes. They are not forked from this process, which may have threads and GPUs.

    ``algebra``: workers grade mathematics. ``functions``: names of custom reward functions to load. Limits are per
    task: ``timeout_s`` of processor time, ``WALL_PER_CPU`` times that of wall time, ``memory_limit_mib`` beyond a
    worker's memory at start. Workers start with the pool and get ready while the caller continues.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        timeout_s: float,
        memory_limit_mib: int,
        algebra: bool = True,
        functions: Sequence[str] = (),
    ) -> None:
        self._setup = {
            "cpu_s": timeout_s,
            "wall_s": timeout_s * WALL_PER_CPU,
            "memory_limit_mib": memory_limit_mib,
            "algebra": algebra,
            "functions": list(functions),
        }
        self._lock = threading.Lock()
        self._next_id = 1
        self.num_restarts = 0
        self._workers: list[_Worker] = []
        for _ in range(num_workers):
            self._workers.append(self._start())

    def _start(self) -> _Worker:
        paths = [_PACKAGE_ROOT, *(path for path in sys.path if path)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps(self._setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment,
            start_new_session=True,  # one signal then ends a worker together with its child
        )
        os.set_blocking(process.stdin.fileno(), False)
        return _Worker(process, deadline=time.monotonic() + _START_S)

    def run(self, tasks: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        """Run ``tasks`` and return their outcomes in order. Calls from several threads run one after another."""
        with self._lock:
            return self._run(tasks)

    def _run(self, tasks: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        outcomes: list[Outcome | None] = [None] * len(tasks)
        waiting = deque(range(len(tasks)))
        first_id, self._next_id = self._next_id, self._next_id + len(tasks)
        remaining = len(tasks)
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.replies, selectors.EVENT_READ, worker)
            while remaining:
                for worker in [w for w in self._workers if w.ready and w.task is None]:
                    if waiting and not self._send(worker, waiting, tasks, first_id):
                        self._replace(worker, selector)
                soonest = min(w.deadline for w in self._workers if w.task is not None or not w.ready)
                events = selector.select(timeout=max(0.0, soonest - time.monotonic()))
                for key, _ in events:
                    remaining -= self._receive(key.data, outcomes, first_id, selector)
                if not events:
                    remaining -= self._expire(outcomes, selector)
        assert all(outcome is not None for outcome in outcomes)
        return [outcome for outcome in outcomes if outcome is not None]

    def _send(self, worker: _Worker, waiting: deque[int], tasks: Sequence[Mapping[str, Any]], first_id: int) -> bool:
        """Send the next waiting task to ``worker``; return False if the worker has ended."""
        deadline = time.monotonic() + self._setup["wall_s"] + _GRACE_S
        try:
            write_frame(worker.requests, {**tasks[waiting[0]], "id": first_id + waiting[0]}, deadline)
        except (OSError, BrokenFrames):
            return False
        worker.task, worker.deadline = waiting.popleft(), deadline
        return True

    def _receive(
        self, worker: _Worker, outcomes: list[Outcome | None], first_id: int, selector: selectors.BaseSelector
    ) -> int:
        """Read one message and return the number of tasks that it ends."""
        try:
            message = read_frame(worker.replies, worker.deadline, _MOST_REPLY_BYTES)
        except BrokenFrames:
            message = None
        if message is None:  # the process is gone, or a reward function wrote into its pipe
            return self._lose(worker, outcomes, selector, "crash")
        if not worker.ready and "fatal" in message:
            raise InputError(message["fatal"])
        if "ready" in message:
            worker.ready = True
            return 0
        if worker.task is None or message.get("id") != first_id + worker.task:
            return 0
        outcomes[worker.task] = _outcome(message)
        worker.task = None
        return 1

    def _expire(self, outcomes: list[Outcome | None], selector: selectors.BaseSelector) -> int:
        now = time.monotonic()
        late = [w for w in self._workers if (w.task is not None or not w.ready) and w.deadline <= now]
        return sum(self._lose(worker, outcomes, selector, "limit") for worker in late)

    def _lose(
        self, worker: _Worker, outcomes: list[Outcome | None], selector: selectors.BaseSelector, failure: str
    ) -> int:
        if not worker.ready:
            raise RuntimeError(
                f"a reward worker did not start (exit status {worker.process.poll()}); its messages are on stderr"
            )
        if worker.task is not None:
            outcomes[worker.task] = Outcome(failure=failure)  # type: ignore[arg-type]
        self._replace(worker, selector)
        return int(worker.task is not None)

    def _replace(self, worker: _Worker, selector: selectors.BaseSelector) -> None:
        selector.unregister(worker.replies)
        _end(worker.process)
        fresh = self._start()
        self._workers[self._workers.index(worker)] = fresh
        selector.register(fresh.replies, selectors.EVENT_READ, fresh)
        self.num_restarts += 1

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """End all workers. May be called twice."""
        workers, self._workers = self._workers, []
        for worker in workers:
            _end(worker.process)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _outcome(message: Mapping[str, Any]) -> Outcome:
    """Return the outcome in a worker's message; a crash if the message is not valid."""
    value, detail = message.get("value", 0.0), message.get("error", "")
    failure = message.get("failure") or ("error" if "error" in message else "")
    if type(value) not in (int, float) or not math.isfinite(value) or not isinstance(detail, str):
        return Outcome(failure="crash")
    if failure not in ("", "limit", "crash", "error"):
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
