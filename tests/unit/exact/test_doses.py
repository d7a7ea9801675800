"""The size of a dose: the spread of log rho over tokens, and its sum over a response."""

from __future__ import annotations

import math

import numpy as np

from megatron_rl.exact.doses import size_of
from megatron_rl.types import Rollout
from tests.support.rounding import rounded


def rollout(*differences: float) -> Rollout:
    count = len(differences)
    mu = np.full(count, -1.0, np.float32)
    exact = mu + np.array(differences, np.float32)
    return Rollout("p", 0, np.ones(count, np.int32), mu, "stop", np.zeros(count, np.int32), exact_logprobs=exact)


def test_the_size_of_two_responses_by_hand():
    size = size_of([rollout(0.5, -0.25), rollout(1.0)])
    # Mean 5/12; deviations 1/12, -8/12 and 7/12: their squares are 114/144, over n - 1 = 2.
    assert size == {
        "exact/log_rho_std": rounded(math.sqrt(57 / 144)),
        "exact/abs_log_rho_sum": (0.5 + 0.25 + 1.0) / 2,
    }


def test_without_noise_it_is_0_and_without_tokens_there_is_none():
    assert size_of([rollout(0.0, 0.0), rollout(0.0)]) == {"exact/log_rho_std": 0.0, "exact/abs_log_rho_sum": 0.0}
    assert size_of([rollout(0.5)]) == {"exact/log_rho_std": 0.0, "exact/abs_log_rho_sum": 0.5}
    assert size_of([]) == {}
