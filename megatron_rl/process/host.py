"""The process on its host: output that outlives its readers, memory that is given back, threads that are waited for.

Standard output and error may go to a pipe or to a terminal of a closed session. Calls that may never return have
a time limit, which also ends native code that holds Python's lock.

`train` gives back memory every so many steps that is freed and that glibc keeps. A training step frees blocks of many
sizes and threads. glibc raises the size from which a block gets pages of its own to the largest that was freed (up to
32 MiB), takes such blocks from the heap from then on, and gives back only what lies at the heap's end. In 300 steps of
two data-parallel ranks the free part of the heap grows from 40 to 400 MiB while 141 MiB are in use.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import EXIT_FAULT, InputError

_NEEDED_DESCRIPTORS = 256  # an engine, its processes and a run's files


def raise_descriptor_limit() -> None:
    """Allow this process as many open files as it may have. InputError where that is too few for a run."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most != resource.RLIM_INFINITY and most < _NEEDED_DESCRIPTORS:
        raise InputError(
            f"this process may open {most} files, and a run needs {_NEEDED_DESCRIPTORS}; raise the limit "
            "(`ulimit -n 4096`, or LimitNOFILE of the service that starts it)"
        )


class _Lasting(io.FileIO):
    """A descriptor that takes everything: once nobody can read it, it becomes /dev/null."""

    def __init__(self, descriptor: int, on_loss: Any) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._on_loss = on_loss

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())  # also for libraries and child processes to come
            os.close(null)
            self._on_loss(self.fileno(), error)
            return len(data)


@contextlib.contextmanager
def outlasting_readers(hint: str) -> Iterator[None]:
    """Within, a write to standard output or error never fails. The first one that would have is said on the other,
    with ``hint``: where the lines can be read instead."""
    streams = {1: sys.stdout, 2: sys.stderr}
    names = {1: "standard output", 2: "standard error"}

    def on_loss(descriptor: int, error: OSError) -> None:
        other = 3 - descriptor
        text = f"{names[descriptor]} cannot be written any more ({error.strerror}); the run goes on: {hint}\n"
        with contextlib.suppress(OSError):
            os.write(other, text.encode())

    try:
        if all(stream.fileno() == descriptor for descriptor, stream in streams.items()):
            sys.stdout, sys.stderr = (
                io.TextIOWrapper(
                    io.BufferedWriter(_Lasting(descriptor, on_loss)),
                    encoding=stream.encoding,
                    errors=stream.errors,
                    line_buffering=stream.line_buffering or descriptor == 2,
                )
                for descriptor, stream in streams.items()
            )
    except (OSError, ValueError):  # no files: a test's
        pass
    replaced = sys.stdout, sys.stderr
    try:
        yield
    finally:
        for stream in replaced:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        sys.stdout, sys.stderr = streams.values()


def write_whole(path: Path, content: str | bytes, durable: bool = False) -> None:
    """Write ``content`` to ``path``: a reader finds the former file or the whole new one. A link there is replaced.

    ``durable``: it survives a loss of power from the moment this returns.
    """
    partial = path.with_name(f".partial-{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    try:
        with partial.open("xb") as file:  # no link: its target is another's
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell, the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in [header, ["-" * width for width in widths], *rows]
    ]
    return "\n".join(lines)


TRIM_EVERY = 50  # steps; what a step takes again after each costs its page faults, a twentieth of one step


def give_back_memory() -> None:
    """Give pages of the heap that are free back to the system. Does nothing where the C library cannot (musl)."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


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


def available_gib(proc: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> float:
    """Return GiB of memory: what the host says is available, or what the control group leaves where that is less."""
    lines = dict(line.split(":", 1) for line in proc.read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return available / 2**30
    if limit != "max":
        # Cached files count as used and are given back when memory is short.
        available = min(available, int(limit) - used + int(statistics.get("inactive_file", 0)))
    return available / 2**30
