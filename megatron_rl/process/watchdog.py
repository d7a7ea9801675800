"""A limit on calls that may never return, also inside native code that holds Python's lock."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Iterator

from megatron_rl.errors import EXIT_FAULT

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
