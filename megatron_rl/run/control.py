"""One run directory, one writer; and how a run is asked to save and leave: signals, or a file.

The lock survives kills, other hosts, and file systems without working locks. The file is for jobs that a scheduler
keeps signals from.

The kernel's lock on ``RUN/LOCK`` (flock) ends with the process that holds it, however it ends. Some shared file systems
keep such locks per host, or have none. So the holder also writes who it is and, every few seconds, a number that grows;
whoever finds the traces of another host watches that number for a while. No clock is compared with another.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.monitor.run_directory import STOP_FILE
from megatron_rl.process.ranks import any_rank, world_rank

_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_POLL_S = 0.2


class RunLock:
    """`acquire` before anything is written, `release` at the end.

    ``patience_s``: how long to wait for a holder that may be about to end. ``heartbeat_s``: seconds between its signs
    of life; three of them missed from a holder on another host count as its end.
    """

    def __init__(self, path: Path, patience_s: float = 10.0, heartbeat_s: float = 5.0) -> None:
        self.path, self.patience_s, self.heartbeat_s = path, patience_s, heartbeat_s
        self._descriptor: int | None = None
        self._released = threading.Event()
        self._beats: threading.Thread | None = None

    def acquire(self) -> str:
        """Take the lock. Returns a line worth saying, or "". Raises `InputError` that names the process holding it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            note = self._displace(self._flock())
        except BaseException:
            os.close(self._descriptor)
            self._descriptor = None
            raise
        self._write(0)
        self._beats = threading.Thread(target=self._beat, name="run-lock", daemon=True)
        self._beats.start()
        return note

    def release(self) -> None:
        """Give it back. May be called twice."""
        if self._descriptor is None:
            return
        self._released.set()
        if self._beats is not None:
            self._beats.join()
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)
        self._descriptor = None

    def _flock(self) -> bool:
        """True once the kernel has given the lock; False where this file system has none."""
        deadline = time.monotonic() + self.patience_s
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise self._refusal(self._owner()) from None
            except OSError as error:
                if error.errno in _NO_LOCKS_HERE:
                    return False
                raise
            time.sleep(_POLL_S)

    def _displace(self, kernel_knows: bool) -> str:
        """Make sure that the holder whose traces are in the file is gone."""
        owner = self._owner()
        if owner is None:
            return ""
        if kernel_knows and owner["boot"] == _boot_id():
            return f"the run's last process (pid {owner['pid']}) did not end in order; continuing after it"
        for _ in range(3):
            time.sleep(self.heartbeat_s)
            if (now := self._owner()) is not None and now != owner:
                raise self._refusal(now)
        return (
            f"the run's last process (pid {owner['pid']} on {owner['host']}) gave no sign of life; continuing after it"
        )

    def _refusal(self, owner: dict[str, Any] | None) -> InputError:
        who = f"process {owner['pid']} on {owner['host']}" if owner else "another process"
        return InputError(
            f"run directory {self.path.parent} is in use by {who}; wait for it (`touch {self.path.parent}/STOP` has it "
            "save and leave), or give this run another name (--set name=…)"
        )

    def _owner(self) -> dict[str, Any] | None:
        """Who wrote the lock file last, read anew (other hosts' writes show on opening); None where nobody holds it."""
        try:
            owner = json.loads(self.path.read_text(encoding="utf-8"))
            return owner if {"host", "pid", "boot", "beat"} <= owner.keys() else None
        except (OSError, ValueError, AttributeError, RecursionError):
            return None

    def _write(self, beat: int) -> None:
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "boot": _boot_id()}
        data = json.dumps(owner | {"beat": f"{beat:012d}"}).encode() + b"\n"
        with contextlib.suppress(OSError):  # a full disk: the kernel's lock still stands
            os.pwrite(self._descriptor, data, 0)
            os.ftruncate(self._descriptor, len(data))
            os.fsync(self._descriptor)

    def _beat(self) -> None:
        beat = 0
        while not self._released.wait(self.heartbeat_s):
            beat += 1
            self._write(beat)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def _boot_id() -> str:
    """Names this host since its last start: a pid means something only together with it."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + "/" + os.readlink("/proc/self/ns/pid")
    return socket.gethostname()


# A scheduler's, a person's, and those of a terminal or session that closes.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@contextlib.contextmanager
def taking(numbers: tuple[int, ...], take: Callable[..., None]) -> Iterator[None]:
    """Let ``take`` handle these signals while the context is open, in the main thread; then restore the old handlers.

    SIGHUP stays ignored where it is (`nohup`).
    """
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = tuple(number for number in numbers if not (number == signal.SIGHUP and ignored))
    before = [(number, signal.signal(number, take)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


class StopRequest:
    """Whether somebody asked the run in ``folder`` to stop."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / STOP_FILE
        self._was_there = self._file.exists()
        self._signals: list[int] = []  # received since `listening` began

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take signals as requests, from the main thread. A second SIGINT (Ctrl-C) ends the run at once."""
        with taking(SIGNALS, self._take):
            yield

    def _take(self, number: int, _frame: object = None) -> None:
        if number == signal.SIGINT:
            if number in self._signals:
                raise KeyboardInterrupt
            # Not print: its buffer may be the one that was interrupted.
            os.write(2, b"\nstopping after this step; once more Ctrl-C ends the run at once\n")
        self._signals.append(number)

    def here(self) -> bool:
        """Whether this rank knows of a request."""
        return bool(self._signals) or self._file.exists()

    def is_urgent(self) -> bool:
        """Whether this rank was asked since it started: to wait for others is then given up. A file that was there
        before lets the run make one step."""
        return bool(self._signals) or (self._file.exists() and not self._was_there)

    def anywhere(self) -> bool:
        """Whether any rank does, the same on all of them. Collective: once a step."""
        return any_rank(self.here())

    def met(self) -> None:
        """The request is met: take the STOP file away, or the command that continues would stop as well."""
        if world_rank() == 0:
            with contextlib.suppress(OSError):  # a folder: it asks for a stop each time
                self._file.unlink(missing_ok=True)
