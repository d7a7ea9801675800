"""Waiting for a library's threads before Python ends, and a time limit on calls that may never return.

The limit also ends calls inside native code that holds Python's lock.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.errors import EXIT_FAULT

GLOO_CALLS = "pt_gloo_runloop"
"""Name of the threads of torch that carry out the calls of a gloo group."""
TASKS = Path("/proc/self/task")  # one folder a thread, on Linux
LOOK_S, LONGEST_S = 0.005, 10.0


def wait_until_idle(name: str = GLOO_CALLS, longest_s: float = LONGEST_S, tasks: Path = TASKS) -> bool:
    """Wait until no thread of this ``name`` runs or wants to, as two looks in a row find; False after ``longest_s``.

    A thread of gloo lets go of a call's tensors after it has told that the call is over, and takes Python's lock for
    it. Where Python is being taken apart by then, the process is aborted with all its work done. Without `/proc` there
    is nothing to see, and nothing is waited for.
    """
    end, idle_looks = time.monotonic() + longest_s, 0
    while idle_looks < 2:
        if time.monotonic() > end:
            return False
        time.sleep(LOOK_S)  # without Python's lock, which the threads may want
        idle_looks = 0 if _is_any_busy(name, tasks) else idle_looks + 1
    return True


def _is_any_busy(name: str, tasks: Path) -> bool:
    for file in tasks.glob("*/stat"):
        try:
            # "number (name) state …"; a name may have blanks and brackets.
            before, _, after = file.read_text().rpartition(")")
        except OSError:  # it has ended meanwhile
            continue
        if before.partition("(")[2] == name and after.split()[0] in ("R", "D"):
            return True
    return False


_GRACE_S = 5.0  # from the message to the end of the process, which needs no Python thread


@contextlib.contextmanager
def limited(seconds: float | None, what: str) -> Iterator[None]:
    """End this process with `EXIT_FAULT` if the body takes longer than ``seconds`` (None: no limit).

    First comes one line that names ``what``, then the stacks of all threads. Nothing can be saved, because the
    thread that would save is the one that hangs. The launcher ends the other ranks, and a restart continues from the
    last checkpoint. One such limit at a time per process.
    """
    if seconds is None:
        yield
        return

    def give_up() -> None:
        print(f"run failed: {what} did not return within {seconds:g} s; stacks of all threads follow", file=sys.stderr)
        sys.stderr.flush()
        faulthandler.dump_traceback()
        os._exit(EXIT_FAULT)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(seconds + _GRACE_S, exit=True)
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()
