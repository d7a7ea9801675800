"""A reward worker: reads one request at a time, answers it from a child that a hard limit may kill.

The process that the pool starts imports what it needs once and then only forks. Its child computes; timers of the
kernel end a child that uses too much processor or wall time, wherever it is (a C loop inside an integer power as well
as Python code), and a replacement is one ``fork`` away, a few milliseconds. Memory is limited likewise. Nothing heavy
is imported: a worker that grades mathematics holds some 60 MB, most of it shared with its child.

Frames on both pipes are 4 bytes of length and that much JSON: what comes back from a process that handled hostile text
is data, never a pickle.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.rewards.custom import call_reward, check_signature, load_function

Handler = Callable[[dict[str, Any]], float]

_OWN_FILES = (os.path.dirname(os.path.abspath(__file__)) + os.sep, "<frozen ")
_MAX_IDLE_DEATHS = 3  # children that died without work in a row: something is wrong that a new one will not mend


def write_frame(fd: int, message: dict[str, Any]) -> None:
    payload = json.dumps(message, default=str).encode()  # `extra_info` may hold dates and other objects
    data = memoryview(struct.pack("<I", len(payload)) + payload)
    while data:
        data = data[os.write(fd, data) :]


def read_frame(fd: int) -> dict[str, Any] | None:
    """The next message, or None at the end of the stream."""
    header = _read_exactly(fd, 4)
    payload = _read_exactly(fd, struct.unpack("<I", header)[0]) if header else None
    return json.loads(payload) if payload else None


def _read_exactly(fd: int, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = os.read(fd, size - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


def _handlers(setup: dict[str, Any]) -> dict[str, Handler]:
    """What this worker can compute. Imports happen here, before any child exists."""
    handlers: dict[str, Handler] = {}
    if setup["algebra"]:
        from megatron_rl.rewards.algebra import algebra_equal
        from megatron_rl.rewards.compare import same

        def grade(task: dict[str, Any]) -> float:
            try:
                return float(same(task["candidate"], task["gold"], algebra_equal))
            except MemoryError:
                raise
            except Exception:  # noqa: BLE001  whatever SymPy stumbles over in a model's text, it is not the answer
                return 0.0

        handlers["math"] = grade
        handlers["algebra"] = lambda task: float(algebra_equal(task["candidate"], task["gold"]))
    for name in setup["functions"]:
        function = load_function(name)
        check_signature(name, function)
        handlers[name] = lambda task, function=function: call_reward(function, task)
    return handlers


def _trace(error: BaseException) -> str:
    """The traceback without the frames of this package: what is left is the user's."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OWN_FILES)]
    head = ["Traceback (most recent call last):\n", *traceback.format_list(frames[-4:])] if frames else []
    return "".join([*head, *traceback.format_exception_only(error)])


def _limit_memory(more_mib: int) -> None:
    with open("/proc/self/statm") as statm:
        held = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + (more_mib << 20),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _serve(requests: int, replies: int, busy: mmap.mmap, handlers: dict[str, Handler], setup: dict[str, Any]) -> None:
    """The child: compute until the requests end."""
    _limit_memory(setup["memory_limit_mib"])
    while (task := read_frame(requests)) is not None:
        busy[:8] = struct.pack("<q", task["id"])
        signal.setitimer(signal.ITIMER_PROF, setup["cpu_s"])
        signal.setitimer(signal.ITIMER_REAL, setup["wall_s"])
        reply: dict[str, Any] = {"id": task["id"]}
        try:
            value = float(handlers[task["kind"]](task))
            reply |= {"value": value} if math.isfinite(value) else {"error": f"the reward was {value}"}
        except MemoryError:
            reply["failure"] = "limit"
        except (Exception, SystemExit) as error:  # noqa: BLE001  a reward function may raise anything
            reply["error"] = _trace(error)[-2000:]
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_frame(replies, reply)
        busy[:8] = bytes(8)


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
    busy = mmap.mmap(-1, 8)  # id of the task at hand, shared: a killed child cannot say what it was doing
    write_frame(replies, {"ready": os.getpid()})
    idle_deaths = 0
    while idle_deaths < _MAX_IDLE_DEATHS:
        pid = os.fork()
        if pid == 0:
            _serve(requests, replies, busy, handlers, setup)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if os.waitstatus_to_exitcode(status) == 0:
            return
        task_id = struct.unpack("<q", busy[:8])[0]
        busy[:8] = bytes(8)
        idle_deaths = 0 if task_id else idle_deaths + 1
        if task_id:
            out_of_time = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM)
            write_frame(replies, {"id": task_id, "failure": "limit" if out_of_time else "crash"})
    sys.exit("reward worker: its child keeps dying before it is given any work")
