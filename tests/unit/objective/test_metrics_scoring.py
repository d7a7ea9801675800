"""Metrics of the policy in another precision, against numpy from their definitions."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_rl.config.objective import ObjectiveConfig
from megatron_rl.objective import ObjectiveInputs, compute_objective
from megatron_rl.types import MIN_LOGPROB
from tests.support.rounding import rounded


def inputs(po: np.ndarray, s: np.ndarray, mu: np.ndarray, mask: np.ndarray) -> ObjectiveInputs:
    po, s, mu = (torch.from_numpy(np.where(mask, x, np.nan)) for x in (po, s, mu))
    return ObjectiveInputs(po, po, mu, torch.ones(len(po)), torch.from_numpy(mask), scoring_logprobs=s)


def metrics(given: ObjectiveInputs) -> dict[str, float]:
    computed = compute_objective(given, ObjectiveConfig()).metrics
    return {name.removeprefix("scoring/"): value for name, value in computed.items() if "scoring/" in name}


def definitions(po: np.ndarray, s: np.ndarray, mu: np.ndarray) -> dict[str, float]:
    """Of the trained tokens [n]: log rho = log po - log mu, in two parts."""
    learner, rest, log_rho = po - s, s - mu, po - mu
    return {
        "learner_mean": learner.mean(),
        "learner_std": learner.std(ddof=1),
        "learner_max": np.abs(learner).max(),
        "rest_mean": rest.mean(),
        "rest_std": rest.std(ddof=1),
        "rest_max": np.abs(rest).max(),
        "learner_share": np.cov(learner, log_rho)[0, 1] / np.var(log_rho, ddof=1),
    }


@pytest.mark.parametrize("impossible", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_both_parts_are_their_definitions(seed, impossible):
    random = np.random.default_rng(seed)
    mask = random.random((4, 7)) < 0.7
    s = -random.exponential(1.0, mask.shape) - 0.5
    po, mu = s + random.normal(0, 0.1, mask.shape), s + random.normal(0, 0.2, mask.shape)
    if impossible:
        s[tuple(np.argwhere(mask)[0])] = -np.inf
    wanted = definitions(po[mask], s[mask].clip(min=MIN_LOGPROB), mu[mask])
    assert metrics(inputs(po, s, mu, mask)) == rounded(wanted, 1000, scale=-MIN_LOGPROB if impossible else 1.0)


def test_shares_of_both_parts_are_one():
    """Where s is po, the learner has no part; where s is mu, it has all of it."""
    random, mask = np.random.default_rng(7), np.ones((2, 9), bool)
    po, mu = (-random.exponential(1.0, mask.shape) - 0.5 for _ in range(2))
    assert metrics(inputs(po, po, mu, mask))["learner_share"] == 0.0
    assert metrics(inputs(po, mu, mu, mask))["learner_share"] == rounded(1.0, 100)


def test_what_is_not_known_is_not_said():
    """The share of what does not vary; a log-prob that is no number leaves none of the learner's part."""
    mask = np.ones((1, 3), bool)
    po, s = np.array([[-1.0, -2.0, -3.0]]), np.array([[-1.5, -2.0, -2.5]])
    same = metrics(inputs(po, s, po, mask))
    assert "learner_share" not in same
    assert same["learner_max"] == same["rest_max"] == 0.5
    broken = metrics(inputs(po, np.array([[-1.5, np.nan, -2.5]]), po - 0.1 * s, mask))
    assert len(broken) == 7
    assert all(np.isnan(value) for value in broken.values())
    without = replace(inputs(po, s, po, mask), scoring_logprobs=None)
    assert metrics(without) == {}
