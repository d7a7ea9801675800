"""A reward worker: reads one request at a time and answers it from a child that hard limits may kill.

The process that the pool starts imports its modules once and then only forks. Its child computes. Kernel timers end a
child that uses too much processor or wall time, in C loops as well as in Python code; a new fork takes milliseconds.
Memory is limited too. Frames on both pipes are 4 bytes of length and JSON of that length: data from a process that
handled untrusted text is never unpickled.

A user's function is called as ``f(response, answer)``, or by keyword as ``f(data_source, solution_str, ground_truth,
extra_info)`` if it has these arguments (verl's convention); with their plurals it takes lists. Calls of an ``async
def`` wait beside each other in one event loop, where no kernel timer can tell them apart: each has a time limit of its
own, and the pool replaces a worker whose loop does not go on. Only worker processes load functions.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import itertools
import json
import math
import mmap
import numbers
import os
import random
import resource
import select
import signal
import struct
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.process.user_functions import load_function

WALL_PER_CPU = 4.0  # wall seconds per allowed processor second, for tasks that sleep and busy machines
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIMIT_S = 5.0  # for processes that keep starting others
VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
_LIST_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
_LONGEST_RETRY_S = 30.0  # most that a call waits before it is made again
_MANY = -1  # in the place of the current task: calls of async functions are under way
_loop = asyncio.Runner()  # one loop for all calls of a process, because a module's clients are bound to it
_OWN_FILES = (os.path.dirname(os.path.abspath(__file__)) + os.sep, "<frozen ")
_OVER_MEMORY = 77  # exit status of a child over its memory limit; processes that its task started still run
_MAX_IDLE_DEATHS = 3  # after so many consecutive deaths of idle children, a new child would not help


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # without this system call, such processes are not found
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """Return the ids of running processes below ``root``."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError, ValueError):
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(name))
    pids, level = [], [root]
    while level:
        level = [child for parent in level for child in children.get(parent, ())]
        pids += level
    return pids


def end_descendants(root: int, *, reap: bool = False) -> None:
    """Kill all processes below ``root``. ``reap``: also collect those that are children of this process."""
    deadline = time.monotonic() + _LIMIT_S
    while (pids := descendants(root)) and time.monotonic() < deadline:
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stop them first, so that none starts another process
            for pid in pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        if reap:
            reap_ended()
        time.sleep(0.001)
    if reap:
        reap_ended()


def reap_ended() -> None:
    """Collect all children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@dataclass(frozen=True)
class Setup:
    """What a worker computes, and the limits of a task.

    ``algebra``: it grades mathematics. ``functions``: names of custom reward functions to load. ``timeout_s``: of
    processor time, and `WALL_PER_CPU` times that of wall time. ``memory_limit_mib``: beyond a worker's memory at start.
    ``wait_s``: limit of one call of a function that is async or takes lists; a call that fails is made again up to
    ``retries`` times, after ``retry_wait_s`` and then twice as long each time.
    """

    timeout_s: float
    memory_limit_mib: int
    algebra: bool = True
    functions: Sequence[str] = ()
    wait_s: float = 60.0
    retries: int = 0
    retry_wait_s: float = 1.0

    @property
    def wall_s(self) -> float:
        return self.timeout_s * WALL_PER_CPU

    @property
    def longest_wait_s(self) -> float:
        """The most seconds that a call takes with all its retries, where functions are async or take lists."""
        return self.wait_s * (self.retries + 1) + sum(map(self.before_retry_s, range(self.retries)))

    def before_retry_s(self, number: int) -> float:
        return min(self.retry_wait_s * 2.0**number, _LONGEST_RETRY_S)


@dataclass(frozen=True)
class RewardFunction:
    """A reward function and how it is called.

    ``is_async``: an ``async def``; one worker then scores many responses at once. ``takes_lists``: one call scores many
    responses.
    """

    call: Callable[..., Any]
    is_async: bool = False
    takes_lists: bool = False
    keywords: tuple[tuple[str, str], ...] = ()  # its arguments and their keys in a task; without: response, answer

    @classmethod
    def of(cls, name: str, function: Callable[..., Any]) -> RewardFunction:
        """Raises InputError if ``function`` takes none of the allowed arguments. ``name`` begins the message."""
        called = getattr(function, "__call__", None)  # noqa: B004  an object may have an async __call__
        is_async = any(map(inspect.iscoroutinefunction, (function, called)))
        try:
            signature = inspect.signature(function)
        except ValueError:  # written in C: its parameters cannot be read
            return cls(function, is_async)
        names = signature.parameters.keys()
        takes_lists = {"responses", "answers"} <= names or {"solution_strs", "ground_truths"} <= names
        own = _LIST_ARGUMENTS if takes_lists else VERL_ARGUMENTS
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
        keywords = tuple(pair for pair in zip(own, VERL_ARGUMENTS, strict=True) if takes_any or pair[0] in names)
        keywords = keywords if {own[1], own[2]} <= names else ()
        try:
            signature.bind(*([] if keywords else (1, 2)), **dict(keywords))
        except TypeError as error:
            raise InputError(
                f"reward {name}: takes {signature}, which fits neither f(response, answer) nor "
                f"f({', '.join(VERL_ARGUMENTS)}) nor, for lists, f(responses, answers) nor "
                f"f({', '.join(_LIST_ARGUMENTS)}): {error}"
            ) from error
        return cls(function, is_async, takes_lists, keywords)

    def begin(self, tasks: Sequence[Mapping[str, Any]]) -> Any:
        """Call the function for ``tasks``, one where it takes no lists. Returns what it returns."""

        def given(key: str) -> Any:
            return [task[key] for task in tasks] if self.takes_lists else tasks[0].get(key)

        if self.keywords:
            return self.call(**{name: given(key) for name, key in self.keywords})
        return self.call(given("solution_str"), given("ground_truth"))

    def scores(self, result: Any, count: int) -> list[dict[str, Any]]:
        """Return a reply for each of ``count`` tasks. Raises TypeError or ValueError for what is no list of them."""
        if not self.takes_lists:
            return [_reply(result)]
        if isinstance(result, Mapping | str | bytes) or not isinstance(result, Iterable):
            raise TypeError(f"the reward function returned {type(result).__name__}; expected a list of {count} scores")
        items = list(result)
        if len(items) != count:
            raise ValueError(f"the reward function returned {len(items)} scores for {count} responses")
        return [_reply(item) for item in items]


async def _awaited(reward: Awaitable[Any]) -> Any:
    return await reward


def _reply(item: Any) -> dict[str, Any]:
    try:
        value = _number(item)
    except (TypeError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"value": value} if math.isfinite(value) else {"error": f"the reward was {value}"}


def _number(result: Any) -> float:
    """Return the ``result`` of a reward function as a number.

    Raises TypeError if it is not a number, bool or mapping, ValueError for a mapping without `score`.
    """
    value = result
    if isinstance(result, Mapping):
        if "score" not in result:
            raise ValueError(f"the reward function returned a mapping without `score`; its keys are {list(result)}")
        value = result["score"]
    if isinstance(value, numbers.Real):
        return float(value)
    if not isinstance(value, str | bytes) and callable(getattr(value, "item", None)):  # NumPy's and PyTorch's scalars
        return float(value.item())
    shown = repr(result)
    raise TypeError(
        f"the reward function returned {shown if len(shown) <= 80 else shown[:80] + ' …'} ({type(result).__name__}); "
        "expected a number, a bool or a mapping with `score`"
    )


class BrokenFrames(Exception):
    """Raised for invalid frames: a reward function wrote into the pipe or read from it."""


def write_frame(fd: int, message: dict[str, Any], deadline: float = math.inf) -> None:
    """Send ``message``. Raises `BrokenFrames` if it is not read before ``deadline`` (of `time.monotonic`).

    With a deadline, the descriptor must be non-blocking.
    """
    payload = json.dumps(message, default=str).encode()  # `extra_info` may hold dates and other objects
    data = memoryview(struct.pack("<I", len(payload)) + payload)
    while data:
        _await(fd, select.POLLOUT, deadline)
        data = data[os.write(fd, data) :]


def read_frame(fd: int, deadline: float = math.inf, most: int | None = None) -> dict[str, Any] | None:
    """Return the next message, or None at the end of the stream.

    Raises `BrokenFrames` for an invalid message, more than ``most`` bytes, or one not complete before ``deadline``.
    """
    header = _read_exactly(fd, 4, deadline)
    if not header:
        return None
    size = struct.unpack("<I", header)[0]
    if most is not None and size > most:
        raise BrokenFrames(f"a frame of {size} bytes")
    payload = _read_exactly(fd, size, deadline)
    if payload is None:
        return None
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise BrokenFrames(str(error)) from error
    if not isinstance(message, dict):
        raise BrokenFrames(f"a {type(message).__name__}")
    return message


def _await(fd: int, event: int, deadline: float) -> None:
    if deadline == math.inf:
        return
    waiting = select.poll()
    waiting.register(fd, event)
    if not waiting.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
        raise BrokenFrames("the other end does not move")


def _read_exactly(fd: int, size: int, deadline: float) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        _await(fd, select.POLLIN, deadline)
        piece = os.read(fd, size - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


def _handlers(setup: Setup) -> dict[str, RewardFunction]:
    """Return the functions that this worker can compute. All imports happen here, before any child exists."""
    handlers: dict[str, RewardFunction] = {}
    if setup.algebra:
        from megatron_rl.rewards.algebra import NumericAlgebra
        from megatron_rl.rewards.compare import same

        names = ("candidate", "gold", "accept_unevaluated")
        handlers["math"] = RewardFunction(partial(same, algebra=NumericAlgebra()), keywords=tuple(zip(names, names)))
    for name in setup.functions:
        handlers[name] = RewardFunction.of(name, load_function(name))
    return handlers


def _trace(error: BaseException) -> str:
    """Return the traceback without this package's frames, so that only the user's are left."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OWN_FILES)]
    head = ["Traceback (most recent call last):\n", *traceback.format_list(frames[-4:])] if frames else []
    return "".join([*head, *traceback.format_exception_only(error)])


def _limit_memory(more_mib: int) -> None:
    with open("/proc/self/statm") as statm:
        held = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + (more_mib << 20),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@dataclass(eq=False)
class _Child:
    """Computes what it reads from ``requests`` until they end. ``busy``: shows the parent the call at hand.

    A function that is no ``async def`` has the process to itself. The calls of the others run in one event loop.
    """

    requests: int
    replies: int
    busy: mmap.mmap
    functions: dict[str, RewardFunction]
    setup: Setup
    calls: set[asyncio.Task] = field(default_factory=set)

    def serve(self) -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends when its parent does
        _limit_memory(self.setup.memory_limit_mib)
        if any(function.is_async for function in self.functions.values()):
            asyncio.run(self._serve_many())
            return
        while (call := read_frame(self.requests)) is not None:
            self._compute(call)

    async def _serve_many(self) -> None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def arrived() -> None:
            try:
                call = read_frame(self.requests)
                if call is None:
                    loop.remove_reader(self.requests)
                    ended.set_result(None)
                elif self.functions[call["kind"]].is_async:
                    self._mark(_MANY)
                    task = loop.create_task(self._await(call))
                    self.calls.add(task)
                    task.add_done_callback(self._done)
                else:
                    self._compute(call)
            except BaseException as error:  # noqa: BLE001  else the event loop logs it and goes on
                ended.set_exception(error)

        loop.add_reader(self.requests, arrived)
        await ended

    def _done(self, task: asyncio.Task) -> None:
        self.calls.discard(task)
        if not self.calls:
            self._mark(0)

    def _mark(self, number: int) -> None:
        self.busy[:8] = struct.pack("<q", number)

    def _timers(self, cpu_s: float, wall_s: float) -> None:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        signal.setitimer(signal.ITIMER_REAL, wall_s)

    def _compute(self, call: dict[str, Any]) -> None:
        """Answer a call whose function may be killed."""
        function, setup = self.functions[call["kind"]], self.setup
        limits = (0.0, setup.wait_s) if function.takes_lists else (setup.timeout_s, setup.wall_s)
        self._mark(call["id"])
        reply: dict[str, Any] = {"id": call["id"]}
        for number in itertools.count():
            self._timers(*limits)
            try:
                result = function.begin(call["tasks"])
                if inspect.isawaitable(result):
                    result = _loop.run(_awaited(result))
                reply["results"] = function.scores(result, len(call["tasks"]))
            except MemoryError:
                reply["failure"] = "limit"
            except (Exception, SystemExit) as error:  # noqa: BLE001  a reward function may raise anything
                reply["error"] = _trace(error)[-2000:]
            self._timers(0, 0)
            if "error" not in reply or not function.takes_lists or number == setup.retries:
                break
            del reply["error"]
            time.sleep(setup.before_retry_s(number) * random.uniform(0.5, 1.0))  # failed together, not made again so
        write_frame(self.replies, reply | {"retries": number})
        self._mark(0)
        if "failure" in reply:
            os._exit(_OVER_MEMORY)

    async def _await(self, call: dict[str, Any]) -> None:
        """Answer a call of an async function. Each attempt has `reward.wait_s`."""
        function, setup = self.functions[call["kind"]], self.setup
        for number in itertools.count():
            reply: dict[str, Any] = {"id": call["id"], "retries": number}
            try:
                async with asyncio.timeout(setup.wait_s) as limit:
                    result = await function.begin(call["tasks"])
                reply["results"] = function.scores(result, len(call["tasks"]))
                break
            except MemoryError:
                reply["failure"] = "limit"
            except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001  it may raise anything
                reply |= {"failure": "limit"} if limit.expired() else {"error": _trace(error)[-2000:]}
            if number == setup.retries:
                break
            await asyncio.sleep(setup.before_retry_s(number) * random.uniform(0.5, 1.0))
        write_frame(self.replies, reply)


def main() -> None:
    setup = Setup(**json.loads(sys.argv[1]))
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a reward function prints goes to the log, not into the frames
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer decides when to stop
    try:
        handlers = _handlers(setup)
    except (Exception, SystemExit) as error:  # noqa: BLE001  the user's module may raise anything; the pool reports it
        traced = f"a reward function could not be loaded:\n{_trace(error)[-4000:]}"
        write_frame(replies, {"fatal": str(error) if isinstance(error, InputError) else traced})
        return
    busy = mmap.mmap(-1, 8)  # id of the current task, in shared memory because a killed child cannot report it
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # `end_descendants` then finds processes whose own parent died
    styles = {name: [function.is_async, function.takes_lists] for name, function in handlers.items()}
    write_frame(replies, {"ready": os.getpid(), "styles": styles})
    idle_deaths = 0
    while idle_deaths < _MAX_IDLE_DEATHS:
        pid = os.fork()
        if pid == 0:
            _Child(requests, replies, busy, handlers, setup).serve()
            os._exit(0)
        ended = 0
        while ended != pid:  # others that end are orphans of reward functions
            ended, status = os.waitpid(-1, 0)
        end_descendants(os.getpid(), reap=True)  # end the processes that the task started
        if os.waitstatus_to_exitcode(status) == 0:
            return
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _OVER_MEMORY:
            continue
        task_id = struct.unpack("<q", busy[:8])[0]
        if task_id == _MANY:
            sys.exit("reward worker: ended by one of several calls that were under way; the pool starts another")
        busy[:8] = bytes(8)
        idle_deaths = 0 if task_id else idle_deaths + 1
        if task_id:
            out_of_time = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM)
            write_frame(replies, {"id": task_id, "failure": "limit" if out_of_time else "crash"})
    sys.exit("reward worker: its child keeps dying before it is given any work")
