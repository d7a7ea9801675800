"""What generation says of itself: means over its turns."""

from __future__ import annotations

from megatron_rl.exact.turns import Counts


def test_means_over_turns_and_the_most():
    counts = Counts()
    for running, waiting, pages in ((4, 3, 8), (4, 0, 12), (1, 0, 1)):
        counts.add(running, waiting, pages)
    assert counts.metrics(preempted=2, num_pages=12, num_replicas=1) == {
        "perf/rollout_preempted": 2.0,
        "perf/rollout_running": 3.0,
        "perf/rollout_waiting": 1.0,
        "perf/rollout_pages": 7.0,
        "perf/rollout_pages_max": 12.0,
        "perf/rollout_pages_there": 12.0,
    }


def test_without_a_cache_there_are_no_pages_and_without_prompts_no_turns():
    assert Counts().metrics(preempted=0, num_pages=None, num_replicas=1) == {
        "perf/rollout_preempted": 0.0,
        "perf/rollout_running": 0.0,
        "perf/rollout_waiting": 0.0,
    }


def test_replicas_are_summed_once_whatever_their_ranks(monkeypatch):
    counts = Counts()
    counts.add(running=4, waiting=2, pages=8)
    other = (5, 2, 0, 3, 3)  # preempted, running, waiting, pages, most pages of the second replica
    monkeypatch.setattr("megatron_rl.exact.turns.gather_objects", lambda mine: [mine, mine, other, other])
    assert counts.metrics(preempted=1, num_pages=12, num_replicas=2) == {
        "perf/rollout_preempted": 6.0,
        "perf/rollout_running": 3.0,
        "perf/rollout_waiting": 1.0,
        "perf/rollout_pages": 5.5,
        "perf/rollout_pages_max": 8.0,
        "perf/rollout_pages_there": 12.0,
    }
