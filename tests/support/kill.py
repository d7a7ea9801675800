"""Replace the files of a tree in a process that is killed at a chosen moment."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from megatron_rl.patching import states
from megatron_rl.patching.series import Files


def is_killed(tree: Path, old: Files, new: Files, moment: int) -> bool:
    """Turn ``old`` into ``new`` in a process that is killed at the ``moment``-th thing that it does to files.

    Returns whether it was: False says that it had ended before. Python reports each call that opens, makes, links,
    renames or removes a file.
    """
    return _replace(tree, old, new, moment)[0]


def moments(tree: Path, old: Files, new: Files) -> int:
    """Turn ``old`` into ``new``; how many things that does to files."""
    return _replace(tree, old, new, None)[1]


def _replace(tree: Path, old: Files, new: Files, moment: int | None) -> tuple[bool, int]:
    """Whether the process was killed, and what it counted if it was not."""
    outlet, inlet = os.pipe()
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
            states.replace_files(tree, old, new)
            os.write(inlet, str(seen).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(inlet)
    with open(outlet, "rb") as stream:
        told = stream.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), f"replacing files ended with {status}"
    return status == -signal.SIGKILL, int(told or 0)
