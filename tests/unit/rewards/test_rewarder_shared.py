"""Scores of the parts of a batch."""

from __future__ import annotations

from megatron_rl.rewards.rewarder import Failure, Scores, merged_scores

SCORES = [
    f"reward/{name}"
    for name in ("timeouts", "worker_failures", "errors", "retries", "unjudged", "masked_frac", "unscored_frac")
]


def test_scores_of_parts_are_those_of_the_whole():
    def share(count, failed, masked):
        failures = [Failure("error", failed, "p", "r", "")] * bool(failed)
        metrics = {"reward/errors": failed, "reward/masked_frac": masked, "reward/unscored_frac": failed / count}
        return Scores(dict.fromkeys(SCORES, 0.0) | metrics, failures, count)

    scores = merged_scores([share(2, 1, 1.0), share(6, 0, 0.5)])
    assert scores.metrics == {
        "reward/timeouts": 0,
        "reward/worker_failures": 0,
        "reward/errors": 1,
        "reward/retries": 0,
        "reward/unjudged": 0,
        "reward/masked_frac": 5 / 8,
        "reward/unscored_frac": 1 / 8,
    }
    assert (scores.num_failed, scores.num_scored, len(scores.failures)) == (1, 8, 1)
