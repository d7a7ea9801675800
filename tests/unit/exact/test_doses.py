"""The size of a dose: the spread of log rho over tokens, and its sum over a response."""

import math

import numpy as np
import pytest
import torch

from megatron_rl.config.rollout import ExactConfig, NoiseConfig
from megatron_rl.exact.doses import make_dose, size_of
from megatron_rl.types import Rollout
from tests.support.groups import any_response
from tests.support.rounding import rounded


def rollout(*differences: float) -> Rollout:
    count = len(differences)
    mu = np.full(count, -1.0, np.float32)
    exact = mu + np.array(differences, np.float32)
    return any_response("p/0", count, inference_logprobs=mu, exact_logprobs=exact)


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


def held(**noise):
    return make_dose(ExactConfig(noise=NoiseConfig(**noise)), seed=0)


@pytest.mark.parametrize(
    ("measured", "factor"),
    [(0.36, 1.0), (0.36 / 0.75**4, 0.75), (0.36 / 1.2**4, 1.2), (36.0, 0.5), (0.01, 2.0), (0.0, 2.0)],
    ids=["held", "too much", "too little", "at most halved", "at most doubled", "no mismatch at all"],
)
def test_a_dose_is_multiplied_by_the_fourth_root_of_what_it_lacks(measured, factor):
    dose = held(kind="router", std=0.5, hold=0.36)
    dose.adjust(measured)
    assert dose.size == rounded(0.5 * factor)


@pytest.mark.parametrize("power", [1.0, 4.6])
def test_a_held_dose_comes_to_its_goal_and_follows_the_policy(power):
    dose = held(kind="weights", bits="int4", hold=0.39)
    assert dose.size == 1.0
    for response in (0.1, 2.0):  # log rho's spread over a power of the size: another policy halfway
        for _ in range(200):  # 0.75^200 of the error is left, or less
            dose.adjust(response * dose.size**power)
        assert response * dose.size**power == rounded(0.39)


def test_without_hold_a_dose_stays():
    dose = held(kind="hidden", std=0.5)
    dose.adjust(3.0)
    assert dose.size == 0.5


def test_weights_are_moved_by_the_strength():
    weight, goal = torch.tensor([1.0, -2.0]), torch.tensor([2.0, -2.5])
    moved = held(kind="weights", bits="int4", strength=0.5)._moved(weight, goal)
    assert moved.tolist() == [1.5, -2.25]
    assert held(kind="weights", bits="int4")._moved(weight, goal) is goal


@pytest.mark.parametrize(
    ("noise", "said"),
    [
        ({"kind": "stale", "updates": 2, "hold": 0.1}, "hold: 0.1 with kind stale"),
        ({"kind": "router", "std": 0.1, "strength": 0.5}, "strength: 0.5 has no effect with kind router; use std"),
    ],
)
def test_sizes_that_a_kind_does_not_have_are_refused(noise, said):
    with pytest.raises(ValueError, match=said):
        NoiseConfig(**noise)
