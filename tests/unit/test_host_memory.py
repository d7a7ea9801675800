"""Freed memory goes back to the system, where it is worth it."""

from __future__ import annotations

import pytest

from megatron_rl import host_memory
from megatron_rl.host_memory import KEPT_BYTES, SETTLING_STEPS, FreedMemory

BLOCK = 64 << 10  # below the size from which a block has pages of its own
pytestmark = pytest.mark.skipif(host_memory._LIBRARY is None, reason="no glibc")


@pytest.fixture(autouse=True)
def _whatever_was_tested_before(monkeypatch):
    """Free parts of the heap would be taken first, without growth; and how large the process is, is others' doing."""
    host_memory._LIBRARY.malloc_trim(0)
    monkeypatch.setattr(host_memory, "KEPT_FRAC", 0.0)


def taken(size: int) -> list[bytearray]:
    return [bytearray(BLOCK) for _ in range(size // BLOCK)]


def settled() -> FreedMemory:
    freed = FreedMemory()
    assert not any(freed.give_back() for _ in range(SETTLING_STEPS + 1))
    return freed


def test_what_lies_between_blocks_in_use_is_given_back():
    freed = settled()
    blocks = taken(16 * KEPT_BYTES)
    kept = blocks[::100]  # the end of the heap stays in use
    assert not freed.give_back(), "all of it is in use"
    del blocks
    before = host_memory.resident_bytes()
    assert freed.give_back()
    assert before - host_memory.resident_bytes() > 12 * KEPT_BYTES
    assert not any(freed.give_back() for _ in range(SETTLING_STEPS + 1)), "nothing was left to give"
    assert sum(map(len, kept)) == len(kept) * BLOCK


def test_what_every_step_takes_and_frees_is_kept():
    freed, kept = FreedMemory(), []
    for step in range(3 * SETTLING_STEPS):
        blocks = taken(16 * KEPT_BYTES if step else BLOCK)  # the first step may be a smaller one
        kept.append(blocks[-1])
        del blocks
        assert not freed.give_back(), f"step {step}"
    assert host_memory.heap().fordblks > 12 * KEPT_BYTES, "there was something to give"


def test_once_is_enough_where_more_is_in_use_than_before():
    freed = settled()
    kept = taken(32 * KEPT_BYTES)
    times = 0
    for _ in range(3 * SETTLING_STEPS):
        blocks = taken(16 * KEPT_BYTES)
        kept.append(blocks[-1])
        del blocks
        times += freed.give_back()
    assert times == 1


def test_growth_beyond_the_first_steps_is_given_back_every_time():
    freed = settled()
    for _ in range(2):
        blocks = taken(16 * KEPT_BYTES)
        kept = blocks[::100]
        del blocks
        assert freed.give_back()
        assert not any(freed.give_back() for _ in range(SETTLING_STEPS))
        del kept
