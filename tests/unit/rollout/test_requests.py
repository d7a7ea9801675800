"""Which engine samples what, and which of its ranks keeps it."""

from __future__ import annotations

import pytest

from megatron_rl.rollout.requests import consecutive_ranks, engines_of, owners_of, share_of


@pytest.mark.parametrize("num_requests", [0, 1, 7, 24])
@pytest.mark.parametrize("num_engines", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_ranks_of_an_engine_take_turns_over_its_share(num_requests, num_engines, ranks):
    requests, owners = list(range(num_requests)), owners_of(num_requests, consecutive_ranks(num_engines, ranks))
    assert len(owners) == num_requests
    for engine in range(num_engines):
        share = share_of(requests, engine, num_engines)
        assert all(engines_of(num_requests, num_engines)[i] == engine for i in share)
        for rank in range(ranks):
            assert [i for i in requests if owners[i] == engine * ranks + rank] == share[rank::ranks]
    dealt = [request for engine in range(num_engines) for request in share_of(requests, engine, num_engines)]
    assert sorted(dealt) == requests


def test_ranks_of_an_engine_need_not_be_neighbours():
    """Stages of a pipeline are not: with two stages and two replicas ranks 0 and 2 share a replica."""
    assert owners_of(6, [[0, 2], [1, 3]]) == [0, 1, 2, 3, 0, 1]
