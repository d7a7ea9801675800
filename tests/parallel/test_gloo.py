"""The launcher of gloo ranks: results in rank order, and failures that name the rank and show its output."""

from __future__ import annotations

import pytest

from tests.parallel.gloo import RankFailure, run_ranks

PROGRAMS = "tests.parallel.programs.gloo"


def test_results_come_back_in_rank_order():
    results = run_ranks(PROGRAMS, "scaled_sum", 2, scale=3.0)
    assert [rank for rank, _ in results] == [0, 1]
    assert [value.item() for _, value in results] == [9.0, 9.0]


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_failure_shows_the_rank_that_raised_first(bad_rank):
    with pytest.raises(RankFailure, match=f"rank {bad_rank} left with status 1") as caught:
        run_ranks(PROGRAMS, "one_rank_raises", 2, bad_rank=bad_rank)
    assert f"ValueError: broken on purpose at rank {bad_rank}" in str(caught.value)


def test_a_rank_that_hangs_is_ended():
    with pytest.raises(RankFailure, match="rank 0 did not finish in time"):
        run_ranks(PROGRAMS, "never_returns", 1, timeout_s=3)
