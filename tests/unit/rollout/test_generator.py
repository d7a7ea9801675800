"""What a generator hands over beside responses."""

from __future__ import annotations

from megatron_rl.rollout.generator import LegCounts


def test_counts_of_two_parts_are_sums_and_means_are_by_response():
    both = LegCounts(legs=5, versions=4, recomputed_tokens=70) + LegCounts(legs=3, versions=2, recomputed_tokens=30)
    assert both == LegCounts(legs=8, versions=6, recomputed_tokens=100)
    assert both.metrics(num_responses=4) == {
        "rollout/recomputed_tokens": 100.0,
        "rollout/legs_mean": 2.0,
        "rollout/versions_mean": 1.5,
    }
