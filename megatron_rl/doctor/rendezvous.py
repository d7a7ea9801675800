"""How the processes of a check meet: a store that the first rank holds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

WAIT_S = 60.0  # for a peer


def open_store(rank: int) -> Any:
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, None, rank == 0, timeout=timedelta(seconds=2 * WAIT_S), wait_for_workers=False)


def until(condition: Callable[[], bool], seconds: float = WAIT_S) -> bool:
    """Wait until it holds; False where it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
