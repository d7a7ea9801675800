"""The launcher of gloo ranks: results in rank order, and failures that name the rank and show its output."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from tests.parallel.gloo import RAISED, RankFailure, run_ranks, wait_for

PROGRAMS = "tests.parallel.programs.gloo"


def test_results_come_back_in_rank_order():
    results = run_ranks(PROGRAMS, "scaled_sum", 2, scale=3.0)
    assert [rank for rank, _ in results] == [0, 1]
    assert [value.item() for _, value in results] == [9.0, 9.0]


def test_a_program_may_join_the_group_itself():
    assert run_ranks(PROGRAMS, "joins_by_itself", 2, init_process_group=False) == [2, 2]


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_failure_shows_the_rank_that_raised_first(bad_rank):
    with pytest.raises(RankFailure, match=f"rank {bad_rank} left with status 1") as caught:
        run_ranks(PROGRAMS, "one_rank_raises", 2, bad_rank=bad_rank)
    assert f"ValueError: broken on purpose at rank {bad_rank}" in str(caught.value)


@pytest.mark.parametrize(
    ("codes", "raised", "first"),
    [
        ((1, 1), (20, 10), (1, "left with status 1")),
        ((1, 1), (10, 20), (0, "left with status 1")),
        ((1, -signal.SIGABRT), (10, None), (1, "was ended by SIGABRT")),
    ],
)
def test_of_ranks_that_failed_at_once_the_first_is_named(tmp_path, codes, raised, first):
    ranks = []
    for rank, (code, at) in enumerate(zip(codes, raised, strict=True)):
        log = tmp_path / f"rank{rank}.log"
        ranks.append(SimpleNamespace(poll=lambda code=code: code, log=log))
        if at is not None:
            log.with_suffix(RAISED).write_text(str(at))
    assert wait_for(ranks, deadline=0.0) == first


def test_failure_of_a_rank_that_dies_names_the_signal():
    with pytest.raises(RankFailure, match="rank 1 was ended by SIGABRT"):
        run_ranks(PROGRAMS, "one_rank_dies", 2, bad_rank=1)


def test_a_rank_that_hangs_is_ended():
    with pytest.raises(RankFailure, match="rank 0 did not finish in time"):
        run_ranks(PROGRAMS, "never_returns", 1, timeout_s=3)


def test_unknown_function_is_reported_as_such():
    with pytest.raises(RankFailure, match="has no attribute 'no_such_program'"):
        run_ranks(PROGRAMS, "no_such_program", 1)
