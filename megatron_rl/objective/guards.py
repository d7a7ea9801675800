"""Numeric guards, each with its reason."""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ±20 before exp. e^20 = 4.9e8 fits every dtype that losses are computed in, and its square
fits float32. A larger ratio means unrelated policies and cannot guide an update. Outside the clamp the ratio is
constant, so its gradient is zero."""

MIN_LOGPROB = -1e4
"""Floor of log mu and log po. A sampled token with a reported log-prob of -inf then has a ratio at the clamp. Every
mask with an upper bound drops it, and sums over its sequence stay finite."""

STD_EPSILON = 1e-6
"""Added to the group's standard deviation in GRPO advantages, as the papers do."""

MIN_WHITENING_VARIANCE = 1e-8
"""Floor of the variance that reinforce_pp divides by, so that a batch of equal rewards stays at zero."""


def safe_exp(log_ratio: Tensor) -> Tensor:
    """Return exp of a log-ratio clamped to ±MAX_LOG_RATIO; the gradient is zero outside."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def k3(log_ratio: Tensor) -> Tensor:
    """Return the k3 estimate of a KL divergence, ratio - 1 - log ratio >= 0, of a log-ratio clamped to ±MAX_LOG_RATIO.

    It uses expm1, because in float32 the plain form has no correct digit if both policies agree to 1e-3.
    """
    clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return clamped.expm1() - clamped
