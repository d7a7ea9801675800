"""The lab's statistics against closed forms, and against other ways to compute the same."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from megatron_rl.instruments.lab import foresight as power
from megatron_rl.instruments.lab.results import (
    Effect,
    _RandomIntercept,
    holm,
    mixed_regression,
    paired_effect,
    restricted_mean,
    restricted_mean_values,
    trend_effect,
)
from tests.support.rounding import printed, rounded


def pairs(differences):
    return dict(enumerate(differences)), dict.fromkeys(range(len(differences)), 0.0)


def test_holm_is_the_closed_bonferroni_test():
    """The adjusted p-value of a hypothesis is the largest Bonferroni p-value of the families that hold it."""
    rng = np.random.default_rng(0)
    for m in range(1, 7):
        p = list(rng.uniform(size=m) ** 3)
        p[-1] = p[0]  # a tie
        families = [f for size in range(1, m + 1) for f in itertools.combinations(range(m), size)]
        closed = [max(min(1.0, len(f) * min(p[j] for j in f)) for f in families if i in f) for i in range(m)]
        assert holm(p) == closed
    assert holm([]) == []


def test_p_values_are_those_of_two_and_of_one_sided_t_tests():
    rng = np.random.default_rng(1)
    for n in (2, 3, 8):
        differences = rng.normal(0.2, 1.0, size=n)
        effect = paired_effect(*pairs(differences), margin=0.7)
        assert effect.p == rounded(stats.ttest_1samp(differences, 0.0).pvalue, 500)
        sides = [
            stats.ttest_1samp(differences, -0.7, alternative="greater").pvalue,
            stats.ttest_1samp(differences, 0.7, alternative="less").pvalue,
        ]
        assert effect.p_same == rounded(max(sides), 500)


def test_equal_differences_and_few_seeds_decide_nothing():
    equal = paired_effect(*pairs([0.5, 0.5, 0.5]), margin=0.1)
    assert (equal.p, equal.p_same, equal.verdict("higher")) == (1.0, 1.0, "undecided")
    same = paired_effect(*pairs([0.0, 0.0, 0.0]), margin=0.1)
    assert (same.p, same.p_same, same.verdict("same")) == (1.0, 0.0, "as predicted")
    two = paired_effect(*pairs([0.5, 0.5001]), margin=0.1)
    assert two.p < 0.001
    assert [two.verdict(expected) for expected in ("higher", "lower", "same")] == ["undecided"] * 3


def test_a_ratio_has_its_margin_as_a_factor():
    one, other = {0: 2.0, 1: 2.2, 2: 1.9}, dict.fromkeys(range(3), 2.0)
    logs = {seed: math.log(value) for seed, value in one.items()}
    linear = paired_effect(logs, dict.fromkeys(range(3), math.log(2.0)), margin=math.log(1.25))
    ratio = paired_effect(one, other, ratio=True, margin=1.25)
    assert (ratio.p, ratio.p_same) == (rounded(linear.p, 500), rounded(linear.p_same, 500))


def effect(mean=0.0, p=1.0, p_same=math.nan, beyond=True):
    return Effect(5, mean, mean - 1, mean + 1, 0.0, 0.0, p, p_same, beyond)


@pytest.mark.parametrize(
    ("measured", "verdicts"),
    [
        (effect(1.0, p=0.01), ("as predicted", "contrary", "contrary")),
        (effect(-1.0, p=0.01), ("contrary", "as predicted", "contrary")),
        (effect(1.0, p=0.2), ("undecided", "undecided", "not contradicted")),
        (effect(1.0, p=0.2, p_same=0.2), ("undecided", "undecided", "undecided")),
        (effect(0.1, p=0.6, p_same=0.01, beyond=False), ("no effect", "no effect", "as predicted")),
        # significant, and as small as what two runs of one recipe differ by
        (effect(0.1, p=0.01, p_same=0.2, beyond=False), ("undecided", "undecided", "undecided")),
        (effect(0.1, p=0.01, p_same=0.01, beyond=False), ("no effect", "no effect", "as predicted")),
    ],
)
def test_verdicts(measured, verdicts):
    assert tuple(measured.verdict(expected) for expected in ("higher", "lower", "same")) == verdicts


def test_a_verdict_is_of_corrected_p_values():
    assert effect(1.0, p=0.01).verdict("higher", adjusted=0.06) == "undecided"
    judged = effect(1.0, p=0.01, p_same=0.04)
    assert judged.verdict("higher", adjusted=0.06, family=2) == "undecided"
    assert judged.verdict("higher", adjusted=0.04) == "as predicted"
    # "same" is what is tested: the difference, which the family does not count, is corrected by its full number
    assert judged.verdict("same", adjusted=0.08, family=4) == "contrary"
    assert judged.verdict("same", adjusted=0.08, family=6) == "undecided"


def test_restricted_mean_without_censoring_is_a_mean():
    times = [3.0, 20.0, 7.0, 12.0, 20.0]
    collapsed = [True, False, True, True, False]
    assert restricted_mean(times, collapsed, 20.0) == rounded(np.mean(times))
    assert restricted_mean(times, collapsed, 10.0) == rounded(np.mean([3, 10, 7, 10, 10]))
    assert restricted_mean_values(times, collapsed, 20.0) == rounded(times, scale=100)
    assert restricted_mean([5.0, 6.0], [False, False], 9.0) == 9.0
    assert restricted_mean_values([5.0], [True], 9.0) == [5.0]


def test_without_differences_between_seeds_it_is_least_squares():
    doses = np.array([0.0, 1.0, 2.0, 0.0, 1.0, 2.0])
    values = np.array([0.0, 1.2, 1.8, 0.2, 0.8, 2.0])  # both seeds have the mean 1
    fitted = mixed_regression([0, 0, 0, 1, 1, 1], doses, values)
    least = stats.linregress(doses, values)
    assert (fitted.seed_variance, fitted.degrees) == (0.0, 3)
    assert (fitted.slope, fitted.error) == (rounded(least.slope), rounded(least.stderr))


def test_its_likelihood_is_that_of_the_dense_covariance():
    rng = np.random.default_rng(5)
    seeds = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, 3])  # unequal: some runs are missing
    x = rng.normal(size=10)
    y = 2 * x + rng.normal(size=4)[seeds] + rng.normal(size=10)
    design = np.stack([np.ones(10), x], axis=1)
    fit = _RandomIntercept(seeds, design, y)

    def dense(ratio):
        covariance = np.eye(10) + ratio * (seeds[:, None] == seeds[None])
        inverse = np.linalg.inv(covariance)
        information = design.T @ inverse @ design
        left = y - design @ np.linalg.solve(information, design.T @ inverse @ y)
        log_dets = np.linalg.slogdet(covariance)[1] + np.linalg.slogdet(information)[1]
        return 8 * math.log(left @ inverse @ left / 8) + log_dets

    for ratio in (0.0, 0.1, 1.0, 30.0):
        assert fit.deviance(ratio) == rounded(dense(ratio), 10_000, scale=10)
    fitted = mixed_regression(seeds, x, y)
    best = fit.deviance(fitted.seed_variance / fitted.residual_variance)
    assert all(best <= dense(ratio) + 10 * 1e-12 for ratio in np.geomspace(1e-4, 1e3, 200))


def test_a_trend_of_two_doses_is_the_paired_test():
    rng = np.random.default_rng(6)
    control, arm = rng.normal(0, 3, size=8), rng.normal(0.5, 3, size=8)
    seeds = [*range(8), *range(8)]
    trend = trend_effect(seeds, [0.0] * 8 + [2.0] * 8, [*control, *arm], margin=0.4)
    paired = paired_effect(dict(enumerate(arm)), dict(enumerate(control)), margin=0.8)
    assert trend.mean == rounded(paired.mean / 2, 1000, scale=10)
    assert trend_effect([0, 1], [1.0, 1.0], [0.0, 1.0]) is None
    assert trend_effect([0, 1], [0.0, 1.0], [0.0, 1.0]) is None


def test_smallest_effect_and_seeds_are_inverse():
    for n in (2, 3, 8, 40):
        d = power.smallest_effect(n, 0.05 / 7)
        assert power.power_of_pairs(d, n, 0.05 / 7) == printed(power.POWER, 9)
        assert power.seeds_needed(d * 1.001, 0.05 / 7) == n
    assert power.smallest_effect(1, 0.05) == math.inf
    assert power.seeds_needed(1e-6, 0.05) is None
    assert power.power_of_pairs(500.0, 10, 0.05) == printed(1.0, 9)


def test_the_smallest_slope_of_two_doses_is_the_smallest_paired_effect():
    # A paired difference has √2 of the residual's deviation, and the doses are one apart.
    for n in (3, 10):
        expected = power.smallest_effect(n, 0.01) * math.sqrt(2)
        assert power.smallest_slope([0.0, 1.0], n, 0.01) == printed(expected, 9)
    assert power.smallest_slope([1.0, 1.0], 9, 0.05) == math.inf
