"""How a run is asked to save and leave: signals, and a file for jobs that a scheduler keeps signals from."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_rl.monitor.run_directory import STOP_FILE
from megatron_rl.process.ranks import any_rank, world_rank

# A scheduler's, a person's, and those of a terminal or session that closes.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@contextlib.contextmanager
def taking(numbers: tuple[int, ...], take: Callable[..., None]) -> Iterator[None]:
    """``take`` handles these signals within, in the main thread; the handlers from before come back.

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
