"""Ends all processes that a process started, even if they left its group or lost their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIMIT_S = 5.0  # for processes that keep starting others


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
