"""When a metric left its healthy stretch: steps, trends, noise and values that are not finite."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_rl.instruments.why.departures import BEFORE, WATCHED, departure, departures, differences, trend

FACTOR, SHARE = "actor/grad_norm", "response_length/clip_ratio"


def first(metric: str, values, first_step: int = 0, last_step: int = 10**6) -> int | None:
    change = departure(metric, range(len(values)), values, first_step, last_step)
    return None if change is None else change.step


@pytest.mark.parametrize(
    ("metric", "values", "step"),
    [
        (FACTOR, [1.0] * 10 + [3.0] * 10, 10),
        (FACTOR, [1.0] * 10 + [1.9] * 10, None),  # less than a factor of 2
        (FACTOR, [1.0] * 10 + [3.0] * 2 + [1.0] * 8, None),  # two records are a spike
        (FACTOR, [1.0] * 10 + [3.0] * 2, 10),  # unless the log ends there
        (FACTOR, [1.0] * (BEFORE - 1) + [3.0] * 10, None),
        (FACTOR, [2.0 ** (0.3 * step) for step in range(20)], None),  # the trend of the records before
        (FACTOR, [2.0 ** (-0.3 * step) for step in range(10)] + [2.0**-3] * 10, None),  # a trend that ends
        (FACTOR, [1.0, 4.0] * 6 + [5.0] * 6, None),  # as far as before
        (FACTOR, [1.0] * 10 + [math.nan] * 10, 10),
        (FACTOR, [0.0] * 10, None),
        ("mismatch/rho_std", [0.0] * 10 + [1e-2] * 5, 10),  # 0 is far below
        ("mismatch/rho_std", [1e-6] * 10 + [0.3, 1e-6, 1e-6] * 5, 10),  # now and then
        (
            "actor/entropy",
            [0.3, 0.2, 0.12, 0.07, 0.05, 0.03] + [0.03, 0.02] * 5 + [1e-3] * 6,
            None,
        ),  # little is as good as none
        (SHARE, [0.0] * 10 + [0.5] * 5, 10),
        (SHARE, [0.5] * 10 + [0.0] * 5, None),  # the direction that does no harm
        ("critic/rewards/mean", [-0.2] * 10 + [-1.0] * 5, 10),
        ("critic/rewards/mean", [0.8] * 10 + [0.7] * 5, None),
        ("critic/rewards/mean", [0.8] * 10 + [0.8 - 0.04 * step for step in range(20)], 16),  # slowly
    ],
)
def test_a_departure_is_outside_of_everything_before(metric, values, step):
    assert first(metric, values) == step


def test_only_the_steps_that_are_asked_for_are_searched():
    values = [1.0] * 10 + [3.0] * 10
    assert first(FACTOR, values, 0, 9) is None
    assert first(FACTOR, values, 10, 10) == 10


def test_noise_departs_rarely():
    """Log-normal noise of 30%, as gradient norms have it: in under 1% of series of 40 records."""
    rng = np.random.default_rng(0)
    assert sum(first(FACTOR, np.exp(0.3 * rng.standard_normal(40))) is not None for _ in range(500)) < 5


def test_a_metric_that_departs_by_and_by_may_jump_later():
    drift = [1.0] * 10 + [2.2] * 10
    for jump, steps in ((30.0, [10, 20]), (2.4, [10])):
        rows = [{"step": step, FACTOR: value} for step, value in enumerate([*drift, *[jump] * 10])]
        assert [change.step for change in departures(rows, 0, 29)] == steps


def test_where_engine_and_learner_part_counts_however_early():
    rows = [{"step": step, "mismatch/rho_std": 1e-6 if step < 10 else 0.3, FACTOR: 1.0} for step in range(60)]
    assert [change.step for change in departures(rows, 40, 59)] == [10]


def test_the_trend_is_the_median_slope():
    assert trend([0.0, 1.0, 2.0, 30.0]) == 1.0 or trend([0.0, 1.0, 2.0, 30.0]) > 1.0
    assert trend([5.0, 5.0]) == 0.0


def test_departures_stand_in_order_and_only_watched_metrics_have_one():
    rows = [{"step": s, FACTOR: 1.0 + 9 * (s >= 12), SHARE: 0.5 * (s >= 9), "other": float(s >= 8)} for s in range(20)]
    assert [(change.metric, change.step) for change in departures(rows, 0, 19)] == [(SHARE, 9), (FACTOR, 12)]
    assert {FACTOR, SHARE} <= WATCHED.keys()


@pytest.mark.parametrize(
    ("metric", "here", "there", "expected"),
    [
        ("mismatch/rho_std", lambda s: 1e-6 if s < 9 else 1e-3, lambda s: 1e-6, 9),
        ("mismatch/rho_std", lambda s: 1e-3, lambda s: 1e-6, 0),
        ("critic/rewards/mean", lambda s: 0.5, lambda s: 0.5 + 0.02 * s, 12),  # the median of six
        ("critic/rewards/mean", lambda s: 0.5 + 0.02 * s, lambda s: 0.5, None),  # a higher reward is no trouble
        ("critic/rewards/mean", lambda s: 0.5, lambda s: 0.5 + 0.4 * (s % 2), None),  # the other run moves as much
        ("actor/entropy", lambda s: 0.3 if s != 9 else 0.9, lambda s: 0.3, None),  # one record
    ],
)
def test_where_a_metric_left_that_of_another_run(metric, here, there, expected):
    rows, good = ([{"step": step, metric: value(step)} for step in range(30)] for value in (here, there))
    assert next((change.step for change in differences(rows, good)), None) == expected
    assert differences(rows[:2], good) == () == differences(rows, [{"step": 0, "other": 1.0}])
