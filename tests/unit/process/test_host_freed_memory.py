"""Freed memory goes back to the system, in a process of its own: others' free blocks would be taken without growth."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

from megatron_rl.process.host import give_back_memory

BLOCK, SIZE = 64 << 10, 256 << 20  # blocks are below the size from which each has pages of its own


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def what_lies_between_blocks_in_use_is_given_back() -> None:
    blocks = [bytearray(BLOCK) for _ in range(SIZE // BLOCK)]
    kept = blocks[::100]  # the end of the heap stays in use
    del blocks
    before = resident_bytes()
    give_back_memory()
    assert before - resident_bytes() > 0.7 * SIZE
    assert sum(map(len, kept)) == len(kept) * BLOCK


def test_in_a_process_of_its_own():
    process = multiprocessing.get_context("spawn").Process(target=what_lies_between_blocks_in_use_is_given_back)
    process.start()
    process.join()
    assert process.exitcode == 0, "see its traceback above"
