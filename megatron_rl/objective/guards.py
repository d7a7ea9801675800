"""Numeric guards, each with its reason."""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ±20 before exp. e^20 = 4.9e8 still fits every dtype that losses are computed in and its
square fits float32; a ratio beyond it says "unrelated policies", not a size that an update could use. Outside the
clamp the ratio is constant: its gradient is zero."""

MIN_LOGPROB = -1e4
"""Floor of log mu and log po. A sampled token that an engine reports as impossible (-inf) then has a ratio at the
clamp, is dropped by every mask with an upper bound, and leaves sums over its sequence finite."""

STD_EPSILON = 1e-6
"""Added to the group's standard deviation in GRPO advantages, as the papers do."""

MIN_WHITENING_VARIANCE = 1e-8
"""Floor of the variance that reinforce_pp divides by: a batch of equal rewards stays at zero."""


def safe_exp(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio clamped to ±MAX_LOG_RATIO; the gradient is zero outside."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def k3(log_ratio: Tensor) -> Tensor:
    """k3 estimator ratio - 1 - log ratio of a KL divergence, >= 0, of a log-ratio clamped to ±MAX_LOG_RATIO.

    By expm1: in float32 the plain form loses every digit where both policies agree to 1e-3.
    """
    clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return clamped.expm1() - clamped
