"""The lab's statistics against other libraries: scipy's at hand, and what statsmodels and lifelines gave for data here.

The values were made with statsmodels 0.15.0 and lifelines 0.30.3, which are no dependency; each test names the call.
"""

from __future__ import annotations

import pytest
from scipy import stats

from megatron_rl.instruments.lab import foresight as power
from megatron_rl.instruments.lab.results import (
    holm,
    mixed_regression,
    paired_effect,
    restricted_mean,
    restricted_mean_values,
    trend_effect,
)
from tests.support.rounding import printed, rounded

# Held-out rewards of an arm and of its control in eight seeds, and of five seeds over a dose, some runs missing.
ARM = [0.922, 0.944, 0.887, 0.941, 0.903, 0.925, 0.899, 0.918]
CONTROL = [0.921, 0.918, 0.904, 0.930, 0.897, 0.936, 0.911, 0.902]
SEEDS = [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 4, 4, 4, 4]
DOSES = [0.0, 0.1, 0.4, 1.1, 0.0, 0.1, 1.2, 0.0, 0.2, 0.4, 1.0, 0.0, 1.1, 0.0, 0.1, 0.5, 1.3]
REWARDS = [0.91, 0.9, 0.86, 0.8, 0.95, 0.93, 0.85, 0.88, 0.89, 0.84, 0.79, 0.93, 0.81, 0.9, 0.91, 0.87, 0.76]
# Steps at which ten runs were last seen, and whether they had collapsed then: two are censored early.
TIMES = [34.0, 200.0, 50.0, 200.0, 61.0, 200.0, 150.0, 90.0, 200.0, 34.0]
COLLAPSED = [True, False, False, False, True, False, False, True, False, True]


def test_paired_differences_are_scipys():
    effect = paired_effect(dict(enumerate(ARM)), dict(enumerate(CONTROL)), margin=0.02)
    other = stats.ttest_rel(ARM, CONTROL)
    interval = other.confidence_interval(0.95)
    assert effect.p == rounded(other.pvalue, 5000)  # a tail of t magnifies the roundings of the statistic
    assert [effect.alike_lower, effect.alike_upper] == rounded([interval.low, interval.high], 500)
    assert effect.p == printed(0.6536069, 7)  # DescrStatsW(arm - control).ttest_mean(0)


def test_equivalence_is_statsmodels():
    """``ttost_paired(arm, control, -0.02, 0.02)[0]``"""
    effect = paired_effect(dict(enumerate(ARM)), dict(enumerate(CONTROL)), margin=0.02)
    assert effect.p_same == printed(0.006742543, 9)


def test_holm_is_statsmodels():
    """``multipletests(p, method="holm")[1]``"""
    corrected = holm([0.003, 0.021, 0.004, 0.6, 0.021, 0.17, 0.0004])
    assert corrected == rounded([0.018, 0.084, 0.02, 0.6, 0.084, 0.34, 0.0028])


def test_power_is_statsmodels():
    """``TTestPower().power(d, seeds, level)``; ``solve_power(None, seeds, level, 0.8)``"""
    for (d, seeds, level), expected in {
        (0.5, 10, 0.05): 0.2931756,
        (1.0, 3, 0.05): 0.1792554,
        (1.0, 10, 0.0125): 0.5473319,
        (1.5, 8, 0.01): 0.7409349,
    }.items():
        assert power.power_of_pairs(d, seeds, level) == printed(expected, 7)
    for (seeds, level), expected in {(10, 0.0125): 1.284297, (8, 0.01): 1.595896, (8, 0.05): 1.156035}.items():
        assert power.smallest_effect(seeds, level) == printed(expected, 6)


def test_the_mixed_regression_is_statsmodels():
    """``MixedLM.from_formula("y ~ dose", groups="seed").fit(reml=True)``: slope, ``cov_re``, ``scale``.

    The slope's error is ``normalized_cov_params`` of ``GLS`` under that covariance. MixedLM's own, 0.0066402, is by the
    Hessian of the profiled likelihood instead.
    """
    fitted = mixed_regression(SEEDS, DOSES, REWARDS)
    assert fitted.slope == printed(-0.1004063, 7)
    assert fitted.error == printed(0.00663925, 8)
    assert fitted.seed_variance == printed(0.0005233, 7)
    assert fitted.residual_variance == printed(0.00016943, 8)


def test_the_trends_interval_is_that_of_its_degrees_of_freedom():
    fit, effect = mixed_regression(SEEDS, DOSES, REWARDS), trend_effect(SEEDS, DOSES, REWARDS)
    interval = stats.t(17 - 5 - 1, loc=fit.slope, scale=fit.error).interval(0.95)
    assert [effect.alike_lower, effect.alike_upper] == rounded(list(interval), 500)


@pytest.mark.parametrize(("horizon", "expected"), [(100.0, 81.2), (200.0, 138.342857)])
def test_the_restricted_mean_is_lifelines(horizon, expected):
    """``restricted_mean_survival_time(KaplanMeierFitter().fit(times, collapsed), t=horizon)``"""
    assert restricted_mean(TIMES, COLLAPSED, horizon) == printed(expected, 6)


def test_pseudo_values_are_lifelines():
    """The same of ten runs and of nine: n θ − (n − 1) θ without one."""
    expected = [34.0, 205.9285714, 164.4285714, 205.9285714, 43.7619048]
    expected += [205.9285714, 205.9285714, 77.5952381, 205.9285714, 34.0]
    for computed, value in zip(restricted_mean_values(TIMES, COLLAPSED, 200.0), expected, strict=True):
        assert computed == printed(value, 7)
