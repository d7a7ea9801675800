"""The formula of length decay, and the schema of schedules."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_rl.config.learner import ScheduleConfig
from megatron_rl.schedule import LengthDecay, length_decay_lr
from tests.support.rounding import rounded


@given(st.integers(0, 10**7), st.floats(1e-12, 1.0), st.floats(0.0, 1.0), st.one_of(st.none(), st.integers(1, 10**5)))
@settings(max_examples=200)
def test_formula_is_exact(step, lr, fraction, period):
    floor = lr * fraction
    halvings = 0 if period is None else min(step // period, 2000)  # beyond 2000 any float has become 0
    exact = max(Fraction(lr) / 2**halvings, Fraction(floor))
    assert length_decay_lr(step, lr, floor, period) == float(exact)


def test_floor_defaults_to_a_tenth_of_the_peak():
    assert length_decay_lr(10**6, lr=3e-5, decay_period=10) == rounded(3e-6, scale=0)
    assert length_decay_lr(10**6) == 1e-7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((-1,), "counted from 0"), ((0, 1e-6, 2e-6), "min_lr"), ((0, 1e-6, 0.0, 0), "decay_period 0")],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        length_decay_lr(*arguments)


def test_a_surge_at_step_0_has_a_period():
    """Step 0 is observed again where its first update overflowed."""
    detector = {"smoothing_steps": 1, "baseline_window": 2, "confirm_steps": 1, "min_step": 0}
    schedule = LengthDecay(ScheduleConfig(style="length-decay", mode="auto", detector=detector))
    assert schedule.observe(0, 10.0) is None
    assert schedule.observe(0, 1000.0) == 0
    assert schedule.decay_period == 1
    assert [schedule.lr(step, 1.0, 0.25) for step in range(3)] == [1.0, 0.5, 0.25]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"style": "length-decay"}, "mode: missing"),
        ({"style": "length-decay", "mode": "manual"}, "decay_period: missing"),
        ({"style": "length-decay", "mode": "auto", "decay_period": 204}, "mode auto finds it"),
        ({"style": "cosine", "mode": "auto"}, "has no effect with style 'cosine'"),
        ({"style": "constant", "decay_steps": 10}, "decay_steps: has no effect"),
        ({"style": "cosine", "decay_phase": 10}, "decay_phase: 10 has no effect with style 'cosine'"),
        ({"style": "length-decay", "mode": "manual", "decay_period": 50, "warmup_steps": 50}, "shorten the warm-up"),
        ({"style": "stairs"}, "length-decay"),
    ],
)
def test_impossible_combinations_fail_at_load(keys, message):
    with pytest.raises(ValidationError, match=message):
        ScheduleConfig.model_validate(keys)
