"""What torch.compile needs on a CPU, looked for before anything is computed."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path


def compiler_problem(key: str) -> str:
    """Why torch.compile cannot work here, and what to do; "" where it can. ``key``: the setting that asks for it."""
    compiler = os.environ.get("CXX", "g++")  # as torch chooses it
    missing = [] if shutil.which(compiler) else [f"a C++ compiler ({compiler!r} was not found)"]
    if not (header := Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        missing.append(f"Python's headers ({header} is not there)")
    if not missing:
        return ""
    return (
        f"{key} compiles, which on a CPU needs {' and '.join(missing)}; install them (Debian: g++, python3-dev; CXX "
        "names another compiler), or leave the key out"
    )
