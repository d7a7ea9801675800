"""Run something in a process that is killed at a chosen moment."""

import os
import signal
import sys
from collections.abc import Callable


def is_killed(work: Callable[[], object], moment: int) -> bool:
    """Do ``work`` in a process that is killed at the ``moment``-th thing that it does to files.

    Returns whether it was: False says that it had ended before. Python reports each call that opens, makes, links,
    renames or removes a file.
    """
    if (child := os.fork()) == 0:
        seen = 0

        def count(event: str, arguments: object) -> None:
            nonlocal seen
            if event == "open" or event.startswith(("os.", "shutil.", "tempfile.")):
                seen += 1
                if seen == moment:
                    os.kill(os.getpid(), signal.SIGKILL)

        status = 1
        try:
            sys.addaudithook(count)
            work()
            status = 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), f"the work ended with {status}"
    return status == -signal.SIGKILL
