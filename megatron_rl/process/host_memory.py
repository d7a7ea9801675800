"""Memory that this process has freed and glibc keeps; `train` gives it back between steps.

A training step frees blocks of many sizes and threads. glibc raises the size from which a block gets pages of its own
to the largest that was freed (up to 32 MiB), takes such blocks from the heap from then on, and gives back only what
lies at the heap's end. In 300 steps of two data-parallel ranks the free part of the heap grows from 40 to 400 MiB while
141 MiB are in use. `tools/dev/heap_growth.py` shows both numbers, with and without giving back.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

KEPT_BYTES = 64 << 20  # taking less than this again would cost more page faults than it is worth
KEPT_FRAC = 0.25  # the same, as a part of the process
SETTLING_STEPS = 4  # until the heap has what a step takes and frees: giving that back would cost its page faults again
# at every step, which were a twentieth of one


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def _find() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2") or not hasattr(library, "malloc_trim"):
        return None  # musl, or glibc before 2.33
    library.mallinfo2.restype = _Mallinfo2
    library.malloc_trim.argtypes = [ctypes.c_size_t]
    return library


_LIBRARY = _find()


class FreedMemory:
    """Gives freed pages back to the system when the process has grown well beyond what its steps need."""

    def __init__(self) -> None:
        self._settling, self._needed = SETTLING_STEPS, 0

    def give_back(self) -> bool:
        """Call after every step: whether memory was given back. Takes microseconds where there is nothing to do."""
        if _LIBRARY is None:
            return False
        resident = resident_bytes()
        if self._settling:
            self._settling -= 1
            self._needed = max(self._needed, resident)
            return False
        allowed = max(KEPT_BYTES, KEPT_FRAC * self._needed)
        # glibc also counts as free what it has given back, so its count alone does not decide.
        if resident - self._needed <= allowed or heap().fordblks <= allowed:
            return False
        self._settling, self._needed = SETTLING_STEPS, 0
        return bool(_LIBRARY.malloc_trim(0))


def heap() -> Any:
    """glibc's count of its main heap in bytes: ``uordblks`` in use, ``fordblks`` free (given back or not)."""
    assert _LIBRARY is not None, "only glibc counts"
    return _LIBRARY.mallinfo2()


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
