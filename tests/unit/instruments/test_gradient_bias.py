"""The scale of a measured bias, by hand, and what is said of it."""

from __future__ import annotations

import math

import pytest

from megatron_rl.instruments.gradient_bias import GradientBias
from tests.support.rounding import rounded


def measured(g: tuple[float, float], reference: tuple[float, float], variance: float, their_variance: float):
    dot = g[0] * reference[0] + g[1] * reference[1]
    return GradientBias(math.hypot(*g), math.hypot(*reference), dot, variance, their_variance, 4)


def test_the_scale_of_two_gradients_by_hand():
    """g = (1, 1) beside g* = (2, 0): half the way, turned by 45°; Var* of a quarter of |g*|² turns by acos 3/4."""
    bias = measured((1.0, 1.0), (2.0, 0.0), variance=8.0, their_variance=1.0)
    assert bias.scale() == rounded(
        {
            "along the reference": 0.5,
            "turned by (degrees)": 45.0,
            "turned by another batch": math.degrees(math.acos(0.75)),
            "bias / noise of a batch": 0.5,  # |(-1, 1)| over the root of 8
        }
    )
    along, turned, noise = bias.reading()
    assert along.startswith("a step goes 0.50 of the reference's way")
    assert turned == "the mismatch turns the gradient by 45°, other prompts by about 41°"
    assert noise.startswith("the bias is 0.5 times the noise of one batch, or less: it adds up over steps")


def test_a_batch_of_noise_gives_no_scale():
    bias = measured((1.0, 0.0), (1.0, 0.0), variance=-0.1, their_variance=1.5)
    assert (bias.turn_of_a_batch, bias.bias_over_noise) == (None, None)
    assert bias.turn == 0.0
    assert len(bias.reading()) == 2
    assert "no scale for that" in bias.reading()[1]


@pytest.mark.parametrize(
    ("size", "said"), [(0.05, "small"), (0.5, "adds up"), (2.0, "more than the choice of prompts")]
)
def test_levels_of_the_bias(size, said):
    assert said in measured((1.0 + size, 0.0), (1.0, 0.0), variance=1.0, their_variance=0.5).reading()[-1]


def test_a_gradient_that_points_back_is_below_zero():
    bias = measured((-1.0, 0.0), (2.0, 0.0), variance=1.0, their_variance=1.0)
    assert bias.along == -0.5
    assert bias.turn == 180.0
