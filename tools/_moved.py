"""What the old command lines `python tools/NAME.py …` start: `python -m megatron_rl COMMAND …`, installed or not."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]


def start(command: str) -> NoReturn:
    """Become ``megatron_rl COMMAND`` with the arguments of this process and the package of this checkout."""
    print(f"note: tools/{Path(sys.argv[0]).name} is an old name of `megatron-rl {command}`", file=sys.stderr)
    search = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    arguments = [sys.executable, "-m", "megatron_rl", command, *sys.argv[1:]]
    os.execve(sys.executable, arguments, {**os.environ, "PYTHONPATH": os.pathsep.join(search)})
