"""The scale of a measured bias, by hand."""

from __future__ import annotations

import math

from megatron_rl.instruments.batch.gradient_bias import GradientBias
from tests.support.rounding import rounded


def measured(g: tuple[float, float], reference: tuple[float, float], variance: float, their_variance: float):
    dot = g[0] * reference[0] + g[1] * reference[1]
    return GradientBias(math.hypot(*g), math.hypot(*reference), dot, variance, their_variance, 4)


def test_the_scale_of_two_gradients_by_hand():
    """g = (1, 1) beside g* = (2, 0): half the way, turned by 45°; Var* of a quarter of |g*|² turns by acos 3/4."""
    bias = measured((1.0, 1.0), (2.0, 0.0), variance=8.0, their_variance=1.0)
    assert [bias.along, bias.turn, bias.turn_of_a_batch, bias.bias_over_noise] == rounded(
        [0.5, 45.0, math.degrees(math.acos(0.75)), 0.5]  # the last: |(-1, 1)| over the root of 8
    )


def test_a_batch_of_noise_gives_no_scale():
    bias = measured((1.0, 0.0), (1.0, 0.0), variance=-0.1, their_variance=1.5)
    assert (bias.turn_of_a_batch, bias.bias_over_noise) == (None, None)
    assert bias.turn == 0.0


def test_a_gradient_that_points_back_is_below_zero():
    bias = measured((-1.0, 0.0), (2.0, 0.0), variance=1.0, their_variance=1.0)
    assert bias.along == -0.5
    assert bias.turn == 180.0
