"""Loss, gradients and every metric of a mini-batch on one rank and on two, reduced over gloo."""

from __future__ import annotations

from tests.parallel.gloo import run_ranks
from tests.support.rounding import rounded
from tests.unit.objective.batches import BATCH

CONFIG = {
    "policy_term": {"name": "ppo_clip", "dual_clip": 1.2},
    "correction": [
        {"mode": "icepop", "lower": 0.7, "upper": 1.5},
        {"mode": "reject", "statistic": "seq_mean_k3", "upper": 0.02, "renormalize": True},
    ],
    "aggregation": "seq-mean-token-mean",
    "distortion": {"delta": 1.2},
    "variance": {"sigma": 0.2},
}


def test_two_data_parallel_ranks_agree_with_one():
    [(loss, gradients, metrics)] = run_ranks("tests.parallel.programs.objective", "share", 1, config=CONFIG, seed=4)
    shares = run_ranks("tests.parallel.programs.objective", "share", 2, config=CONFIG, seed=4)
    assert loss != 0
    for got_loss, _, got_metrics in shares:
        assert got_loss == rounded(loss, BATCH)
        assert got_metrics == rounded(metrics, BATCH)
    got_gradients = {**shares[0][1], **shares[1][1]}
    assert got_gradients.keys() == gradients.keys()
    for place, gradient in gradients.items():
        assert got_gradients[place] == rounded(gradient, BATCH)
