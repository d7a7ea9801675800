"""Loss, gradients and every metric of a mini-batch on one rank and on two, reduced over gloo."""

from __future__ import annotations

import pytest

from megatron_rl.config import ObjectiveConfig
from megatron_rl.objective import Denominators, compute_denominators
from tests.parallel.gloo import run_ranks
from tests.support.rounding import rounded
from tests.unit.objective.batches import BATCH, padded, random_batch

RENORMALIZED = {
    "policy_term": {"name": "ppo_clip", "dual_clip": 1.2},
    "correction": [
        {"mode": "icepop", "lower": 0.7, "upper": 1.5},
        {"mode": "reject", "statistic": "seq_mean_k3", "upper": 0.02, "renormalize": True},
    ],
    "aggregation": "seq-mean-token-mean",
    "distortion": {"delta": 1.2},
    "variance": {"sigma": 0.2},
}

NORMALIZED = {"correction": [{"mode": "tis", "cap": 1.1, "normalize": True}]}
CONFIGS = {
    "renormalize": RENORMALIZED,
    "normalize tokens": NORMALIZED,
    "normalize sequences": {
        "correction": [{"mode": "is", "level": "sequence", "normalize": True}, {"mode": "veto", "threshold": 0.6}],
        "aggregation": "seq-mean-token-mean",
    },
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_two_data_parallel_ranks_agree_with_one(config):
    [(loss, gradients, metrics)] = run_ranks("tests.parallel.programs.objective", "share", 1, config=config, seed=4)
    shares = run_ranks("tests.parallel.programs.objective", "share", 2, config=config, seed=4)
    assert loss != 0
    for got_loss, _, got_metrics in shares:
        assert got_loss == rounded(loss, BATCH)
        assert got_metrics == rounded(metrics, BATCH)
    got_gradients = {**shares[0][1], **shares[1][1]}
    assert got_gradients.keys() == gradients.keys()
    for place, gradient in gradients.items():
        assert got_gradients[place] == rounded(gradient, BATCH)


def test_the_mean_of_one_ranks_weights_is_another_one():
    """A rank that divided by the mean of its own weights would show in the loss above."""

    def mean(counts: Denominators) -> float:
        return float(counts.weight_sum / counts.num_weights)

    batch, config = random_batch(4, num_sequences=9), ObjectiveConfig.model_validate(NORMALIZED)
    shares = [compute_denominators(padded(batch[rank::2])[0], config) for rank in range(2)]
    whole = mean(shares[0] + shares[1])
    assert whole == rounded(mean(compute_denominators(padded(batch)[0], config)), BATCH)
    assert all(mean(share) != rounded(whole, BATCH) for share in shares)
