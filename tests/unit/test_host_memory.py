"""Freed memory goes back to the system, where it is worth it."""

from __future__ import annotations

import pytest

from megatron_rl import host_memory

BLOCK = 64 << 10  # below the size from which a block has pages of its own
pytestmark = pytest.mark.skipif(host_memory._LIBRARY is None, reason="no glibc")


def test_what_lies_between_blocks_in_use_is_given_back():
    freed = host_memory.FreedMemory()
    assert not freed.give_back()
    blocks = [bytearray(BLOCK) for _ in range(16 * host_memory.KEPT_BYTES // BLOCK)]
    kept = blocks[::100]  # the end of the heap stays in use
    assert not freed.give_back(), "all of it is in use"
    del blocks
    before = host_memory.resident_bytes()
    assert freed.give_back()
    assert before - host_memory.resident_bytes() > 12 * host_memory.KEPT_BYTES
    assert not freed.give_back(), "nothing was left to give"
    assert sum(map(len, kept)) == len(kept) * BLOCK
