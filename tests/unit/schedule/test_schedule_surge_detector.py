"""The surge detector on made-up curves with known answers: when it must fire, when it must not, and that it resumes."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from megatron_rl.config.learner import DetectorConfig
from megatron_rl.schedule import SurgeDetector
from tools.dev import length_curves

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
