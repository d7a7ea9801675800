"""Maps old command lines `python tools/NAME.py …` to `python -m megatron_rl COMMAND …`, installed or not."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]


def start(command: str) -> NoReturn:
    """Replace this process by ``megatron_rl COMMAND`` with the same arguments and the package of this checkout."""
    print(f"note: tools/{Path(sys.argv[0]).name} is an old name of `megatron-rl {command}`", file=sys.stderr)
    search = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    arguments = [sys.executable, "-m", "megatron_rl", *command.split(), *sys.argv[1:]]
    os.execve(sys.executable, arguments, {**os.environ, "PYTHONPATH": os.pathsep.join(search)})
