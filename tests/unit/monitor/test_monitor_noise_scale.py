"""Gradient noise against known covariances, and its running mean."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from megatron_rl.learner.gradient_noise import small_batch
from megatron_rl.monitor.monitor import GradientNoiseScale, NoiseMonitor, RunningMean, noise_scale_parts
from tests.support.rounding import rounded, standard_errors


def quadratic_gradients(rng: np.random.Generator, num: int) -> tuple[np.ndarray, float]:
    """Per-sample gradients ``[num, D]`` of ½(θ−x)ᵀH(θ−x) with x ~ N(0, Σ), and the true tr(HΣH) / |Hθ|²."""
    dims = 50
    hessian = np.diag(np.linspace(0.5, 2.0, dims))
    theta, std = np.full(dims, 0.3), np.linspace(0.5, 3.0, dims)
    samples = rng.standard_normal((num, dims)) * std
    truth = float((np.diag(hessian) ** 2 * std**2).sum() / ((hessian @ theta) ** 2).sum())
    return (theta - samples) @ hessian, truth


@pytest.mark.parametrize("sizes", [[16] * 8, [8, 8, 16, 16, 16, 32, 32]], ids=["equal", "unequal"])
def test_noise_scale_of_a_quadratic(sizes):
    rng = np.random.default_rng(0)
    total, scale = sum(sizes), GradientNoiseScale(decay=0.99)
    seen = []
    for _ in range(300):
        gradients, truth = quadratic_gradients(rng, total)
        parts = np.split(gradients, np.cumsum(sizes)[:-1])
        sq_small, size = small_batch([float((part.mean(0) ** 2).sum()) for part in parts], sizes)
        estimate = scale.observe(sq_small, float((gradients.mean(0) ** 2).sum()), size, total)
        seen.append(noise_scale_parts(sq_small, float((gradients.mean(0) ** 2).sum()), size, total))
    # The estimate is a ratio of means, both with the weights of decay 0.99: its relative error is that of their ratio.
    grad_sq, trace = np.array(seen).T
    weights = 0.99 ** np.arange(300)
    draws = weights.sum() ** 2 / (weights**2).sum()
    error = standard_errors((trace / trace.mean() - grad_sq / grad_sq.mean()).std(ddof=1), draws)
    assert error < 0.2
    assert abs(estimate / truth - 1) < error


def test_noise_scale_parts_undo_the_expectations():
    grad_sq, trace = 3.0, 40.0
    parts = noise_scale_parts(grad_sq + trace / 8, grad_sq + trace / 64, 8, 64)
    assert parts == rounded((grad_sq, trace))
    with pytest.raises(ValueError, match="small one first"):
        noise_scale_parts(1.0, 1.0, 8, 8)


def test_noise_drowning_the_signal_is_not_a_number():
    scale = GradientNoiseScale(0.9)
    assert math.isnan(scale.observe(10.0, 0.5, 8, 64))


def test_noise_monitor_resumes_and_passes_over_overflows():
    inputs = [
        {
            "actor/grad_norm": g,
            "noise/sq_small": 2 + g,
            "noise/sq_big": 1.0,
            "noise/batch_small": 4,
            "noise/batch_big": 8,
        }
        for g in (1.0, math.inf, 3.0, 2.0)
    ]
    whole = NoiseMonitor(0.5)
    expected = [whole.observe(metrics) for metrics in inputs]
    first, second = NoiseMonitor(0.5), NoiseMonitor(0.5)
    observed = [first.observe(metrics) for metrics in inputs[:2]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert observed + [second.observe(metrics) for metrics in inputs[2:]] == expected
    # Weights 1/2, 1/4, 1/8 from the newest back, the overflow left out.
    assert expected[-1]["noise/grad_norm_ema"] == rounded((2 / 2 + 3 / 4 + 1 / 8) / (7 / 8))
    assert expected[1]["noise/grad_norm_ema"] == 1.0
    assert second.observe({"loss": 1.0}) == {}


def test_running_mean_has_no_start_bias():
    mean = RunningMean(0.99)
    assert math.isnan(mean.observe(math.nan))
    assert [mean.observe(5.0) for _ in range(3)] == rounded([5.0] * 3)
