"""What is reckoned from the responses of a batch."""

from __future__ import annotations

import numpy as np

from megatron_rl.monitor.samples import repetition_fraction, rollout_metrics
from tests.support.groups import group
from tests.support.rounding import rounded


def test_repetition_fraction():
    assert repetition_fraction(list(range(100)), 4) == 0.0
    assert repetition_fraction([1, 2, 3], 4) == 0.0
    loop = [1, 2, 3, 4, 5] * 20  # 97 four-grams, 5 of them different
    assert repetition_fraction(loop, 4) == rounded(92 / 97)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 3, 500).tolist()
    grams = [tuple(tokens[i : i + 5]) for i in range(496)]
    assert repetition_fraction(tokens, 5) == rounded(1 - len(set(grams)) / 496)


def test_rollout_metrics():
    groups = [group([1.0, 0.0], [[5] * 10, [1, 2]]), group([0.5, 0.5], [[1], [1, 2, 3]], reason="length")]
    metrics = rollout_metrics(groups, ngram=2)
    assert metrics["critic/rewards/mean"] == 0.5
    assert (metrics["response_length/mean"], metrics["response_length/max"]) == (4.0, 10.0)
    assert metrics["response_length/clip_ratio"] == 0.5
    assert metrics["groups/no_signal_frac"] == 0.5
    assert metrics["response/repetition_frac"] == rounded(8 / 9 / 4)
    assert metrics["response/repetitive_responses"] == 0.25
    assert rollout_metrics([], 2) == {}
