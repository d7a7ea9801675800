"""Advantages and group filters by worked numbers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.errors import InputError
from megatron_rl.objective import ADVANTAGES, compute_advantages, group_filter_metrics, informative_groups
from tests.support.rounding import assert_rounded, rounded
from tests.unit.objective.reference import optimal_baseline

REWARDS = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0, 0.0], dtype=torch.float64)
GROUPS = torch.tensor([7, -3, 7, 7, -3, 12])  # any ids, interleaved: {1, 0.5, 1}, {0, 0}, {0}


def test_dr_grpo_and_reinforce():
    mean = 2.5 / 3
    want = [1 - mean, 0, 0.5 - mean, 1 - mean, 0, 0]
    assert compute_advantages(REWARDS, GROUPS, "dr_grpo").tolist() == rounded(want)
    assert compute_advantages(REWARDS, GROUPS, "reinforce").tolist() == REWARDS.tolist()


def test_grpo_divides_by_the_sample_deviation():
    std = np.std([1, 0.5, 1], ddof=1) + 1e-6
    mean = 2.5 / 3
    want = [(1 - mean) / std, 0, (0.5 - mean) / std, (1 - mean) / std, 0, 0]
    assert compute_advantages(REWARDS, GROUPS, "grpo").tolist() == rounded(want)


def test_rloo_leaves_one_out():
    advantages = compute_advantages(REWARDS[:5], GROUPS[:5], "rloo").tolist()
    assert advantages == rounded([1 - 0.75, 0, 0.5 - 1, 1 - 0.75, 0])


def test_rloo_refuses_a_group_of_one():
    with pytest.raises(InputError, match="1 group"):
        compute_advantages(REWARDS, GROUPS, "rloo")


def test_min_variance_weighs_the_mean_of_the_group():
    """u = 3, 1 of rewards 1, 0: b = 3/4. In the second group one response has a weight, so that its A is 0."""
    rewards = torch.tensor([1.0, 0.0, 0.5, 2.0, 1.0, 0.0], dtype=torch.float64)
    groups, u = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([3.0, 1.0, 0.0, 7.0, 0.0, 0.0], dtype=torch.float64)
    advantages = compute_advantages(rewards, groups, "min_variance", weights=u).tolist()
    assert advantages == rounded([0.25, -0.75, -1.5, 0.0, 0.0, 0.0])
    assert compute_advantages(REWARDS, GROUPS, "min_variance").tolist() == rounded(
        compute_advantages(REWARDS, GROUPS, "dr_grpo").tolist()
    )
    same = torch.full((4,), 0.1, dtype=torch.float64)
    assert compute_advantages(same, torch.zeros(4), "min_variance", weights=torch.arange(4)).tolist() == [0.0] * 4
    with pytest.raises(InputError, match=r"weights \[2\] must be \[B\] = \[6\]"):
        compute_advantages(REWARDS, GROUPS, "min_variance", weights=torch.ones(2))


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0.01, 100)), min_size=2, max_size=9))
@settings(max_examples=50, deadline=None)
def test_no_other_baseline_has_less_variance(members):
    """Σ w² |g|² (R - b)² has its minimum at b*: the paper's formula, and a step to either side."""
    rewards, u = zip(*members)
    tensors = (torch.tensor(rewards, dtype=torch.float64), torch.zeros(len(u), dtype=torch.int64))
    advantages = compute_advantages(*tensors, "min_variance", weights=torch.tensor(u, dtype=torch.float64)).tolist()
    b = optimal_baseline(list(rewards), list(u))
    assert advantages == rounded([R - b for R in rewards], roundings=4 * len(u), scale=5.0)

    def second_moment(shift: float) -> float:
        return sum(u_i * (a - shift) ** 2 for u_i, a in zip(u, advantages))

    assert second_moment(0.0) < min(second_moment(-0.01), second_moment(0.01))


def test_reinforce_pp_whitens_over_tokens():
    """Centred -1, 1, -2, 2 with 1, 2, 3, 4 tokens: as if each token were a sample."""
    rewards = torch.tensor([0.0, 2.0, 1.0, 5.0])
    lengths = torch.tensor([1, 2, 3, 4])
    tokens = np.repeat([-1.0, 1.0, -2.0, 2.0], [1, 2, 3, 4])
    advantages = compute_advantages(rewards, torch.tensor([0, 0, 1, 1]), "reinforce_pp", lengths=lengths)
    want = (np.array([-1.0, 1.0, -2.0, 2.0]) - tokens.mean()) / tokens.std()
    # Computed in float64, stored in float32: one rounding.
    assert advantages.tolist() == rounded(want.tolist(), roundings=2, dtype=torch.float32)
    whitened = np.repeat(advantages.double().numpy(), [1, 2, 3, 4])
    assert whitened.mean() == rounded(0, roundings=2, scale=2, dtype=torch.float32)
    assert whitened.std() == rounded(1, roundings=2, scale=2, dtype=torch.float32)
    unweighted = compute_advantages(rewards, torch.tensor([0, 0, 1, 1]), "reinforce_pp").tolist()
    assert unweighted == rounded([x / math.sqrt(2.5) for x in (-1, 1, -2, 2)], roundings=2, dtype=torch.float32)


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - {"reinforce"}))
@pytest.mark.parametrize("reward", [0.1, 1.0, -1e6 / 3])
def test_equal_rewards_carry_exactly_no_advantage(name, reward):
    """0.1 three times has a mean that is not 0.1 in floating point; a division by std + 1e-6 would show it."""
    rewards = torch.full((6,), reward, dtype=torch.float64)
    advantages = compute_advantages(rewards, torch.tensor([0, 0, 0, 1, 1, 1]), name)
    assert advantages.tolist() == [0.0] * 6


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_a_group_of_one_has_no_advantage(name):
    assert compute_advantages(torch.tensor([3.0]), torch.tensor([0]), name).tolist() == [0.0]


@settings(max_examples=30)
@given(
    rewards=st.lists(st.sampled_from([-1.0, 0.0, 0.25, 1.0]), min_size=4, max_size=12),
    data=st.data(),
    name=st.sampled_from(["grpo", "dr_grpo", "rloo"]),
)
def test_order_and_names_of_groups_do_not_matter(rewards, data, name):
    ids = [i % 2 for i in range(len(rewards))]
    order = data.draw(st.permutations(range(len(rewards))))
    straight = compute_advantages(torch.tensor(rewards), torch.tensor(ids), name)
    shuffled = compute_advantages(
        torch.tensor([rewards[i] for i in order]), torch.tensor([100 - 7 * ids[i] for i in order]), name
    )
    assert_rounded(shuffled, straight[torch.tensor(order)], roundings=2, dtype=torch.float32)
    for group in (0, 1):
        assert straight[torch.tensor(ids) == group].sum().item() == rounded(
            0, roundings=2 * 6, scale=3, dtype=torch.float32
        )


def test_dtypes_and_mistakes():
    assert compute_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), "grpo").dtype == torch.float32
    assert compute_advantages(torch.tensor([1, 0]), torch.tensor([0, 0]), "dr_grpo").tolist() == [0.5, -0.5]
    with pytest.raises(InputError, match=r"unknown advantage 'gae'.*rloo"):
        compute_advantages(REWARDS, GROUPS, "gae")
    with pytest.raises(InputError, match=r"\[6\] and group_ids \[3\]"):
        compute_advantages(REWARDS, GROUPS[:3], "grpo")
    with pytest.raises(InputError, match="lengths"):
        compute_advantages(REWARDS, GROUPS, "reinforce_pp", lengths=torch.ones(2))


def test_informative_groups():
    assert informative_groups(REWARDS, GROUPS).tolist() == [True, False, True, True, False, False]
    noise = torch.full((3,), 0.1, dtype=torch.float64)
    assert not informative_groups(noise, torch.zeros(3, dtype=torch.int64)).any()


def test_group_filter_metrics_count_groups_and_not_responses():
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    ids = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3])
    assert group_filter_metrics(rewards, ids) == rounded(
        {"groups/informative_frac": 0.25, "groups/all_solved_frac": 0.5, "groups/none_solved_frac": 0.25}
    )
    assert set(group_filter_metrics(torch.zeros(0), torch.zeros(0)).values()) == {0.0}
