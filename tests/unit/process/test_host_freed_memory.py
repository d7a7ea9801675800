"""Freed memory goes back to the system, where it is worth it.

Every test is a process of its own: what others left free in the heap would be taken first, without growth, and counts.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

import pytest

from megatron_rl.process import host
from megatron_rl.process.host import SETTLING_STEPS, FreedMemory

KEPT_BYTES = 16 << 20  # a quarter of what runs keep: page faults are what these tests take their time for
BLOCK = 64 << 10  # below the size from which a block has pages of its own
pytestmark = pytest.mark.skipif(host._LIBRARY is None, reason="no glibc")


def taken(size: int) -> list[bytearray]:
    return [bytearray(BLOCK) for _ in range(size // BLOCK)]


def settled() -> FreedMemory:
    freed = FreedMemory()
    assert not any(freed.give_back() for _ in range(SETTLING_STEPS + 1))
    return freed


def what_lies_between_blocks_in_use_is_given_back():
    freed = settled()
    blocks = taken(16 * KEPT_BYTES)
    kept = blocks[::100]  # the end of the heap stays in use
    assert not freed.give_back(), "all of it is in use"
    del blocks
    before = host.resident_bytes()
    assert freed.give_back()
    assert before - host.resident_bytes() > 12 * KEPT_BYTES
    assert not any(freed.give_back() for _ in range(SETTLING_STEPS + 1)), "nothing was left to give"
    assert sum(map(len, kept)) == len(kept) * BLOCK


def what_every_step_takes_and_frees_is_kept():
    freed, kept = FreedMemory(), []
    for step in range(3 * SETTLING_STEPS):
        blocks = taken(16 * KEPT_BYTES if step else BLOCK)  # the first step may be a smaller one
        kept.append(blocks[-1])
        del blocks
        assert not freed.give_back(), f"step {step}"
    assert host.heap().fordblks > 12 * KEPT_BYTES, "there was something to give"


def once_is_enough_where_more_is_in_use_than_before():
    freed = settled()
    kept = taken(32 * KEPT_BYTES)
    times = 0
    for _ in range(3 * SETTLING_STEPS):
        blocks = taken(16 * KEPT_BYTES)
        kept.append(blocks[-1])
        del blocks
        times += freed.give_back()
    assert times == 1


def growth_beyond_the_first_steps_is_given_back_every_time():
    freed = settled()
    for _ in range(2):
        blocks = taken(16 * KEPT_BYTES)
        kept = blocks[::100]
        del blocks
        assert freed.give_back()
        assert not any(freed.give_back() for _ in range(SETTLING_STEPS))
        del kept


def the_largest_of_the_first_steps_is_what_they_need():
    blocks = taken(16 * KEPT_BYTES)
    kept = blocks[::100]
    del blocks  # something to give
    freed = FreedMemory()
    for step in range(3 * SETTLING_STEPS):
        pages = None if step % 2 else bytearray(16 * KEPT_BYTES)  # a block so large goes back by itself
        assert not freed.give_back(), f"step {step}"
        del pages
    assert kept


def run_small(program: Callable[[], None]) -> None:
    host.KEPT_BYTES = KEPT_BYTES
    program()


@pytest.mark.parametrize(
    "program",
    [
        what_lies_between_blocks_in_use_is_given_back,
        what_every_step_takes_and_frees_is_kept,
        once_is_enough_where_more_is_in_use_than_before,
        growth_beyond_the_first_steps_is_given_back_every_time,
        the_largest_of_the_first_steps_is_what_they_need,
    ],
)
def test_in_a_process_of_its_own(program):
    process = multiprocessing.get_context("spawn").Process(target=run_small, args=(program,))
    process.start()
    process.join()
    assert process.exitcode == 0, "see its traceback above"
