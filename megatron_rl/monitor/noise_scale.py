"""How noisy the gradient is, from what the learner measures (`megatron_rl.learner.gradient_noise`).

B_simple = tr(Σ) / |G|² [McCandlish et al., arXiv 1812.06162, Eq 2.9]: the batch size at which noise and signal of the
gradient are equally strong, estimated from squared gradient norms at two batch sizes (their Appendix A.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def noise_scale_parts(sq_small: float, sq_big: float, batch_small: float, batch_big: float) -> tuple[float, float]:
    """Unbiased estimates of (|G|², tr Σ) from |G_small|² and |G_big|² [arXiv 1812.06162, App. A.1].

    Both gradients must be means over their batches (``batch_small`` < ``batch_big`` sequences); ``sq_small`` may be an
    average over several small batches. A single estimate is noisy and |G|² may come out negative: average before
    dividing. Raises ValueError for sizes that are not ordered.
    """
    if not 0 < batch_small < batch_big:
        raise ValueError(f"batch sizes {batch_small} and {batch_big}: two different sizes are needed, small one first")
    grad_sq = (batch_big * sq_big - batch_small * sq_small) / (batch_big - batch_small)
    trace_cov = (sq_small - sq_big) / (1.0 / batch_small - 1.0 / batch_big)
    return grad_sq, trace_cov


class GradientNoiseScale:
    """Running B_simple: |G|² and tr Σ are averaged apart, each with decay per step, and then divided."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.grad_sq = self.trace_cov = 0.0
        self.weight = 0.0  # of the observations so far: 1 − decay^n; the same for both, so it cancels in the ratio

    def observe(self, sq_small: float, sq_big: float, batch_small: float, batch_big: float) -> float:
        """Take one step's squared norms (see `noise_scale_parts`); returns the running estimate."""
        grad_sq, trace_cov = noise_scale_parts(sq_small, sq_big, batch_small, batch_big)
        if math.isfinite(grad_sq) and math.isfinite(trace_cov):
            keep = 1.0 - self.decay
            self.grad_sq = self.decay * self.grad_sq + keep * grad_sq
            self.trace_cov = self.decay * self.trace_cov + keep * trace_cov
            self.weight = self.decay * self.weight + keep
        return self.value

    @property
    def value(self) -> float:
        """B_simple in sequences; NaN while the averaged |G|² is not above 0 (noise drowns the signal)."""
        return self.trace_cov / self.grad_sq if self.grad_sq > 0 else math.nan

    def state_dict(self) -> dict[str, float]:
        """Plain JSON values."""
        return {"grad_sq": self.grad_sq, "trace_cov": self.trace_cov, "weight": self.weight}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from `state_dict`."""
        self.grad_sq, self.trace_cov, self.weight = state["grad_sq"], state["trace_cov"], state["weight"]


class RunningMean:
    """Exponential mean with the bias of its start removed; values that are not finite are passed over."""

    def __init__(self, decay: float) -> None:
        self.decay, self._sum, self._weight = decay, 0.0, 0.0

    def observe(self, value: float) -> float:
        """Take one value; returns the mean (NaN before the first finite value)."""
        if math.isfinite(value):
            self._sum = self.decay * self._sum + (1.0 - self.decay) * value
            self._weight = self.decay * self._weight + (1.0 - self.decay)
        return self._sum / self._weight if self._weight else math.nan

    def state_dict(self) -> dict[str, float]:
        """Plain JSON values."""
        return {"sum": self._sum, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from `state_dict`."""
        self._sum, self._weight = state["sum"], state["weight"]


class NoiseMonitor:
    """`noise/grad_norm_ema`, and `noise/gns` where the learner reports the squared norms it needs.

    Reads `actor/grad_norm`, and `noise/{sq_small,sq_big,batch_small,batch_big}` (see `noise_scale_parts`).
    """

    INPUTS = ("noise/sq_small", "noise/sq_big", "noise/batch_small", "noise/batch_big")

    def __init__(self, decay: float) -> None:
        self.grad_norm, self.scale = RunningMean(decay), GradientNoiseScale(decay)

    def observe(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics of this step; nothing for what the step did not report."""
        found = {}
        if "actor/grad_norm" in metrics:
            found["noise/grad_norm_ema"] = self.grad_norm.observe(metrics["actor/grad_norm"])
        if all(name in metrics for name in self.INPUTS):
            found["noise/gns"] = self.scale.observe(*(metrics[name] for name in self.INPUTS))
        return found

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"grad_norm": self.grad_norm.state_dict(), "scale": self.scale.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.grad_norm.load_state_dict(state["grad_norm"])
        self.scale.load_state_dict(state["scale"])
