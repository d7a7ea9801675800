"""What test_zygote.py runs in children of the helper process."""

from __future__ import annotations

import os
import subprocess
import sys
import time


def tell() -> None:
    """Process group, environment and modules of this child, in lines."""
    own, shared = os.environ.get("OWN"), os.environ.get("SHARED")
    print(os.getpgid(0) == os.getpid(), own, shared, "torch" in sys.modules, flush=True)  # before the next, in one file
    print("an error", file=sys.stderr)


def spoil() -> None:
    """What must not be seen by the next child."""
    import torch

    os.environ["OWN"] = "of another"
    torch.set_default_dtype(torch.float64)
    torch.ones(8).sum()


def default_dtype() -> int:
    import torch

    return int(torch.get_default_dtype() != torch.float32)


def leave_a_child_behind() -> int:
    """Start a process that outlives this one, and tell its number."""
    print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
    return 3


def sleep() -> None:
    time.sleep(600)


def setting_at_import() -> str:
    """An environment variable as this interpreter found it when it started."""
    with open("/proc/self/environ", "rb") as file:
        variables = dict(item.split(b"=", 1) for item in file.read().split(b"\0") if b"=" in item)
    return variables.get(b"ATEN_CPU_CAPABILITY", b"").decode()
