"""Length decay: formula, surge detector, factor by effective sample size, the study's recipes."""

import re
import warnings
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_rl.config import load_recipe
from megatron_rl.config.learner import DetectorConfig, EffectiveSampleConfig, OptimizerConfig, ScheduleConfig
from megatron_rl.learner.optimizer import build_scheduler
from megatron_rl.schedule import (
    LearningRateSchedule,
    LengthDecay,
    SurgeDetector,
    bounded_factor,
    length_decay_lr,
    rate_factor,
)
from tests.support.rounding import rounded
from tests.unit.objective.reference import effective_sample_size
from tools.dev import length_curves


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


def eta_eff(eta: float, w: list[float], rho_base: float = 1.0) -> float:
    """η_eff = η sqrt(min(1, ρ_ess / ρ_base)) [arXiv 2602.17616]; ρ_base is the authors' code's."""
    rho_ess = effective_sample_size(w)
    return eta * min(1.0, rho_ess / rho_base) ** 0.5


@pytest.mark.parametrize("w", [[1.0] * 8, [3.0, 1.0], [1.0, 1e-6, 1e-6, 1e-6], [0.2, 0.5, 4.0, 1.0, 1.1]])
@pytest.mark.parametrize("reference", [1.0, 0.4])
def test_the_factor_is_the_papers(w, reference):
    config = EffectiveSampleConfig(reference=reference)
    assert 1e-6 * rate_factor(effective_sample_size(w), config) == rounded(eta_eff(1e-6, w, reference))


@pytest.mark.parametrize(
    ("share", "config", "want"),
    [
        (1.0, {}, 1.0),
        (0.25, {}, 0.5),
        (0.25, {"rule": "linear"}, 0.25),
        (0.25, {"reference": 0.25}, 1.0),
        (0.3, {"reference": 0.25}, 1.0),
        (0.125, {"reference": 0.5, "rule": "linear"}, 0.25),
    ],
)
def test_worked_numbers_on_both_sides_of_the_reference(share, config, want):
    assert rate_factor(share, EffectiveSampleConfig(**config)) == rounded(want)


def test_a_rule_stands_for_its_defaults_and_bounds_are_held():
    assert ScheduleConfig(effective_sample="linear").effective_sample == EffectiveSampleConfig(rule="linear")
    assert ScheduleConfig().effective_sample is None
    for wrong in ({"reference": 0.0}, {"reference": 1.1}, {"rule": "cube"}):
        with pytest.raises(ValidationError):
            ScheduleConfig(effective_sample=wrong)


@pytest.mark.parametrize("S", [1, 2, 7, 256])
@pytest.mark.parametrize("eta", [1e-6, 3e-5])
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_the_rate_keeps_the_papers_first_constraint(eta, S, factor):
    """η <= R_batch / (S G_upd) [arXiv 2607.01083], and nothing else lowers it."""
    R_batch, G_upd = 3e-4, 50.0
    found = eta * bounded_factor(factor, eta, S, R_batch / G_upd)
    assert found == rounded(min(eta * factor, R_batch / (S * G_upd)), 4)


def test_without_age_rate_or_bound_nothing_is_bounded():
    assert bounded_factor(0.3, 1e-6, 0, 1e-9) == 0.3
    assert bounded_factor(0.3, 0.0, 5, 1e-9) == 0.3
    assert bounded_factor(0.3, 1e-6, 5, None) == 0.3


def test_every_group_is_scaled_for_one_update_alone():
    groups = [{"lr": 0.0, "weight_decay": 0.0, "lr_mult": mult, "params": []} for mult in (1.0, 0.5)]
    scheduler = build_scheduler(ScheduleConfig(), OptimizerConfig(lr=1e-3), SimpleNamespace(param_groups=groups), 10)
    before = [group["lr"] for group in groups]
    with scheduler.scaled(0.25):
        assert [group["lr"] for group in groups] == [0.25 * rate for rate in before]
    assert [group["lr"] for group in groups] == before
    with pytest.raises(RuntimeError), scheduler.scaled(0.25):
        raise RuntimeError
    assert [group["lr"] for group in groups] == before


FOLDER = Path(__file__).parents[3] / "recipes" / "length_decay"

ARMS = sorted(path.stem for path in FOLDER.glob("*-*.yaml"))


@pytest.mark.parametrize("name", ARMS)
def test_schedule_is_what_its_name_says(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recipe = load_recipe(FOLDER / f"{name}.yaml")
    stated_lr, stated_period = re.search(r"-lr([^-]+-\d)$", name), re.search(r"-t(\d+)$", name)
    peak, steps = recipe.learner.optimizer.lr, recipe.num_updates
    assert peak == (float(stated_lr[1]) if stated_lr else 1e-6)
    schedule = LearningRateSchedule(recipe.schedule, peak, steps)
    rates = [schedule.lr(t) for t in range(steps)]
    if stated_period:
        period = int(stated_period[1])
        assert rates == [max(1e-6 / 2 ** (t // period), 1e-7) for t in range(steps)]
        assert rates[-1] == 1e-7, "the run is long enough for the whole schedule"
    else:
        assert set(rates) == {peak}
    if name.endswith("-auto"):
        for t in range(150):
            schedule.observe_length(t, 1000.0 if t < 110 else 3500.0)
        assert schedule.length_decay.decay_period / 204 == pytest.approx(
            1, abs=0.1
        )  # as docs/schedule-and-alarms.md says


SEEDS = 10
NOISES = (0.0, 0.05, 0.10, 0.15)


def surge_steps(curve: length_curves.Curve, noise: float, seed: int) -> list[tuple[int, int]]:
    """(step of the observation, answer) of every answer that is not None."""
    detector = SurgeDetector.from_config(None)
    lengths = curve(np.random.default_rng(seed), noise)
    answers = [(step, detector.observe(step, length)) for step, length in enumerate(lengths)]
    return [(step, answer) for step, answer in answers if answer is not None]


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("at", [40, 110, 250])
def test_threefold_surge_is_found_once_within_five_steps(at, noise):
    for seed in range(SEEDS):
        surges = surge_steps(length_curves.step_surge(at), noise, seed)
        assert len(surges) == 1
        assert surges[0][0] == surges[0][1]
        assert at <= surges[0][1] <= at + 5


@pytest.mark.parametrize(
    "curve",
    [
        length_curves.flat(),
        length_curves.growth(0.10),
        length_curves.growth(0.20),
        length_curves.spikes(factor=3.0),
        length_curves.spikes(factor=20.0, every=11),
        length_curves.decline(),
        length_curves.ramp_surge(0, 1000, 4000.0, num_steps=1000),
    ],
    ids=["flat", "growth10", "growth20", "spikes", "dense-spikes", "decline", "ramp-of-1000-steps"],
)
@pytest.mark.parametrize("noise", NOISES)
def test_silence(curve, noise):
    assert [surges for seed in range(SEEDS) if (surges := surge_steps(curve, noise, seed))] == []


def test_first_steps_are_silent_even_in_a_surge():
    detector = SurgeDetector.from_config({"min_step": 30, "smoothing_steps": 3})
    answers = [detector.observe(step, 100.0 if step < 6 else 900.0) for step in range(40)]
    assert answers.index(30) == 30
    assert answers.count(None) == 39


@pytest.mark.parametrize(("centre", "period"), [(110, 204), (90, 160)])
@pytest.mark.parametrize("high", [3000.0, 3500.0, 4000.0])
@pytest.mark.parametrize("noise", NOISES)
def test_the_papers_curves_give_its_periods(centre, period, high, noise):
    for seed in range(SEEDS):
        ((_, surge),) = surge_steps(length_curves.paper_curve(centre, high), noise, seed)
        assert abs(round(1.8 * surge) / period - 1) <= 0.1  # as docs/schedule-and-alarms.md says


def test_lower_ratio_fires_on_a_smaller_rise():
    lengths = length_curves.step_surge(100, factor=1.7)(np.random.default_rng(0), 0.02)
    default, sensitive = SurgeDetector.from_config({}), SurgeDetector.from_config({"surge_ratio": 1.5})
    assert all(default.observe(step, length) is None for step, length in enumerate(lengths))
    assert any(sensitive.observe(step, length) is not None for step, length in enumerate(lengths))


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("curve", [length_curves.step_surge(110, factor=4.0), length_curves.paper_curve(110, 4000.0)])
def test_the_specifications_ratio_sees_a_fourfold_surge(curve, noise):
    for seed in range(SEEDS):
        detector = SurgeDetector.from_config({"surge_ratio": 3.0})
        lengths = curve(np.random.default_rng(seed), noise)
        answers = [detector.observe(step, length) for step, length in enumerate(lengths)]
        assert len(answers) - answers.count(None) == 1
        assert 110 <= detector.surge_step <= 125  # the logistic curve passes three times its start at step 114
        assert answers[detector.surge_step] == detector.surge_step


def test_steps_without_a_length_are_passed_over():
    lengths = length_curves.step_surge(60)(np.random.default_rng(1), 0.1)
    plain, holed = SurgeDetector.from_config(None), SurgeDetector.from_config(None)
    for step, length in enumerate(lengths):
        answer = plain.observe(step, length)
        assert holed.observe(step, float("nan")) is None
        assert holed.observe(step, 0.0) is None
        assert holed.observe(step, length) == answer


def test_bad_use_is_refused():
    with pytest.raises(ValidationError, match="surge_ration"):
        SurgeDetector.from_config({"surge_ration": 2.0})
    with pytest.raises(ValidationError, match="surge_ratio"):
        SurgeDetector.from_config({"surge_ratio": 1.0})
    detector = SurgeDetector(DetectorConfig())
    detector.observe(5, 100.0)
    with pytest.raises(ValueError, match="step 4 comes after step 5"):
        detector.observe(4, 100.0)


def test_explanation_names_the_numbers_it_decided_on():
    detector = SurgeDetector.from_config({"smoothing_steps": 1, "confirm_steps": 1, "min_step": 0})
    detector.observe(0, 100.0)
    detector.observe(1, 260.0)
    assert "smoothed length 260" in detector.explain()
    assert "2.60 × the baseline 100" in detector.explain()
    assert "surge confirmed at step 1" in detector.explain()
