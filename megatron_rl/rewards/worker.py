"""A reward worker: reads one request at a time and answers it from a child that hard limits may kill.

The process that the pool starts imports its modules once and then only forks. Its child computes. Kernel timers end a
child that uses too much processor or wall time, in C loops as well as in Python code; a new fork takes a few
milliseconds. Memory is limited in the same way. Imports are light: a worker that grades mathematics takes about 60 MB,
most of it shared with its child.

Frames on both pipes are 4 bytes of length and JSON of that length. Data from a process that handled untrusted text is
never unpickled.

Reward functions of users are named `path/to/file.py:function` or `package.module:function`. A function is called as
``f(response, answer)``, or by keyword as ``f(data_source, solution_str, ground_truth, extra_info)`` if it has these
arguments (verl's convention). It returns a number, a bool or a mapping with `score`, and may be an ``async def``. Only
worker processes load functions; the trainer's process never runs their file.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import json
import math
import mmap
import numbers
import os
import resource
import select
import signal
import struct
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.process.user_functions import load_function

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIMIT_S = 5.0  # for processes that keep starting others
_VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
_loop = asyncio.Runner()  # one loop for all calls of a process, because a module's clients are bound to it
Handler = Callable[[dict[str, Any]], float]
_OWN_FILES = (os.path.dirname(os.path.abspath(__file__)) + os.sep, "<frozen ")
_OVER_MEMORY = 77  # exit status of a child over its memory limit; processes that its task started still run
_MAX_IDLE_DEATHS = 3  # after so many consecutive deaths of idle children, a new child would not help


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent dies, so that `end_descendants` finds them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Make the kernel end this process when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


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


def check_signature(name: str, function: Callable[..., Any]) -> None:
    """Raise InputError if ``function`` takes neither ``(response, answer)`` nor verl's arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C: its parameters cannot be read
        return
    try:
        if _is_verl_style(signature):
            signature.bind(**dict.fromkeys(_verl_arguments(signature)))
        else:
            signature.bind(None, None)
    except TypeError as error:
        raise InputError(
            f"reward {name}: takes {signature}, which fits neither f(response, answer) nor "
            f"f({', '.join(_VERL_ARGUMENTS)}): {error}"
        ) from error


def _is_verl_style(signature: inspect.Signature) -> bool:
    return {"solution_str", "ground_truth"} <= signature.parameters.keys()


def _verl_arguments(signature: inspect.Signature) -> list[str]:
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    return [key for key in _VERL_ARGUMENTS if takes_any or key in signature.parameters]


def call_reward(function: Callable[..., Any], task: Mapping[str, Any]) -> float:
    """Call ``function`` with the arguments that its signature asks for and return its result as a number."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        signature = inspect.Signature()
    if _is_verl_style(signature):
        result = function(**{key: task[key] for key in _verl_arguments(signature)})
    else:
        result = function(task["solution_str"], task["ground_truth"])
    return _number(_loop.run(_awaited(result)) if inspect.isawaitable(result) else result)


async def _awaited(found: Awaitable[Any]) -> Any:
    return await found


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


def _handlers(setup: dict[str, Any]) -> dict[str, Handler]:
    """Return the functions that this worker can compute. All imports happen here, before any child exists."""
    handlers: dict[str, Handler] = {}
    if setup["algebra"]:
        from megatron_rl.rewards.algebra import NumericAlgebra
        from megatron_rl.rewards.compare import same

        algebra = NumericAlgebra()
        handlers["math"] = lambda task: float(
            same(task["candidate"], task["gold"], algebra, task.get("accept_unevaluated", False))
        )
    for name in setup["functions"]:
        function = load_function(name)
        check_signature(name, function)
        handlers[name] = lambda task, function=function: call_reward(function, task)
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


def _serve(requests: int, replies: int, busy: mmap.mmap, handlers: dict[str, Handler], setup: dict[str, Any]) -> None:
    """Run the child: compute until the requests end."""
    die_with_parent()
    _limit_memory(setup["memory_limit_mib"])
    while (task := read_frame(requests)) is not None:
        busy[:8] = struct.pack("<q", task["id"])
        signal.setitimer(signal.ITIMER_PROF, setup["cpu_s"])
        signal.setitimer(signal.ITIMER_REAL, setup["wall_s"])
        reply: dict[str, Any] = {"id": task["id"]}
        ends = False
        try:
            value = float(handlers[task["kind"]](task))
            reply |= {"value": value} if math.isfinite(value) else {"error": f"the reward was {value}"}
        except MemoryError:
            reply["failure"] = "limit"
            ends = True
        except (Exception, SystemExit) as error:  # noqa: BLE001  a reward function may raise anything
            reply["error"] = _trace(error)[-2000:]
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_frame(replies, reply)
        busy[:8] = bytes(8)
        if ends:
            os._exit(_OVER_MEMORY)


def _wait_for(pid: int) -> int:
    """Return the exit status of the child ``pid``. Meanwhile collect orphans of reward functions that end."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            return status


def main() -> None:
    setup = json.loads(sys.argv[1])
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a reward function prints goes to the log, not into the frames
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer decides when to stop
    try:
        handlers = _handlers(setup)
    except InputError as error:
        write_frame(replies, {"fatal": str(error)})
        return
    except (Exception, SystemExit) as error:  # noqa: BLE001  the user's module may raise anything; the pool reports it
        write_frame(replies, {"fatal": f"a reward function could not be loaded:\n{_trace(error)[-4000:]}"})
        return
    busy = mmap.mmap(-1, 8)  # id of the current task, in shared memory because a killed child cannot report it
    adopt_orphans()
    write_frame(replies, {"ready": os.getpid()})
    idle_deaths = 0
    while idle_deaths < _MAX_IDLE_DEATHS:
        pid = os.fork()
        if pid == 0:
            _serve(requests, replies, busy, handlers, setup)
            os._exit(0)
        status = _wait_for(pid)
        end_descendants(os.getpid(), reap=True)  # end the processes that the task started
        if os.waitstatus_to_exitcode(status) == 0:
            return
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _OVER_MEMORY:
            continue
        task_id = struct.unpack("<q", busy[:8])[0]
        busy[:8] = bytes(8)
        idle_deaths = 0 if task_id else idle_deaths + 1
        if task_id:
            out_of_time = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM)
            write_frame(replies, {"id": task_id, "failure": "limit" if out_of_time else "crash"})
    sys.exit("reward worker: its child keeps dying before it is given any work")
