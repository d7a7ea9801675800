"""The gradient noise scale, from the norms that the learner measures (`megatron_rl.learner.gradient_noise`).

B_simple = tr(Σ) / |G|² [McCandlish et al., arXiv 1812.06162, Eq 2.9]: the batch size at which noise and signal of the
gradient are equally strong, estimated from squared gradient norms at two batch sizes (their Appendix A.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def noise_scale_parts(sq_small: float, sq_big: float, batch_small: float, batch_big: float) -> tuple[float, float]:
    """Return unbiased estimates of (|G|², tr Σ) from |G_small|² and |G_big|² [arXiv 1812.06162, App. A.1].

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
    """Running estimate of B_simple: the exponential mean of tr Σ divided by that of |G|²."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.grad_sq = self.trace_cov = 0.0
        self.weight = 0.0  # 1 − decay^n after n observations; the same for both means, so it cancels in the ratio

    def observe(self, sq_small: float, sq_big: float, batch_small: float, batch_big: float) -> float:
        """Add one step's squared norms (see `noise_scale_parts`) and return the running estimate."""
        grad_sq, trace_cov = noise_scale_parts(sq_small, sq_big, batch_small, batch_big)
        if math.isfinite(grad_sq) and math.isfinite(trace_cov):
            keep = 1.0 - self.decay
            self.grad_sq = self.decay * self.grad_sq + keep * grad_sq
            self.trace_cov = self.decay * self.trace_cov + keep * trace_cov
            self.weight = self.decay * self.weight + keep
        return self.value

    @property
    def value(self) -> float:
        """B_simple in sequences; NaN while the averaged |G|² is not above 0 (the noise is too large)."""
        return self.trace_cov / self.grad_sq if self.grad_sq > 0 else math.nan

    def state_dict(self) -> dict[str, float]:
        """Return the state as JSON values."""
        return {"grad_sq": self.grad_sq, "trace_cov": self.trace_cov, "weight": self.weight}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from `state_dict`."""
        self.grad_sq, self.trace_cov, self.weight = state["grad_sq"], state["trace_cov"], state["weight"]


class RunningMean:
    """Bias-corrected exponential mean; values that are not finite are skipped."""

    def __init__(self, decay: float) -> None:
        self.decay, self._sum, self._weight = decay, 0.0, 0.0

    def observe(self, value: float) -> float:
        """Add one value and return the mean (NaN before the first finite value)."""
        if math.isfinite(value):
            self._sum = self.decay * self._sum + (1.0 - self.decay) * value
            self._weight = self.decay * self._weight + (1.0 - self.decay)
        return self._sum / self._weight if self._weight else math.nan

    def state_dict(self) -> dict[str, float]:
        """Return the state as JSON values."""
        return {"sum": self._sum, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from `state_dict`."""
        self._sum, self._weight = state["sum"], state["weight"]


class NoiseMonitor:
    """Computes `noise/grad_norm_ema`, and `noise/gns` if the learner reports the squared norms that it needs.

    Reads `actor/grad_norm`, and `noise/{sq_small,sq_big,batch_small,batch_big}` (see `noise_scale_parts`).
    """

    INPUTS = ("noise/sq_small", "noise/sq_big", "noise/batch_small", "noise/batch_big")

    def __init__(self, decay: float) -> None:
        self.grad_norm, self.scale = RunningMean(decay), GradientNoiseScale(decay)

    def observe(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return this step's noise metrics; those whose inputs are missing are left out."""
        figures = {}
        if "actor/grad_norm" in metrics:
            figures["noise/grad_norm_ema"] = self.grad_norm.observe(metrics["actor/grad_norm"])
        if all(name in metrics for name in self.INPUTS):
            figures["noise/gns"] = self.scale.observe(*(metrics[name] for name in self.INPUTS))
        return figures

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {"grad_norm": self.grad_norm.state_dict(), "scale": self.scale.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.grad_norm.load_state_dict(state["grad_norm"])
        self.scale.load_state_dict(state["scale"])


# Pearson correlation of the spurious signal J with the gradient step, over the run [OH §5, Eq 23].


class StepCorrelation:
    """Running Pearson correlation of a metric with its step, in constant memory.

    For J = Σ A (φ - 1) it is `hacking/J_pcc`: a value well above 0 means that training increases the spurious part of
    the objective. Means and co-moments are updated one observation at a time (Welford), so that a resumed run
    continues bit for bit.
    """

    def __init__(self):
        self._count = 0
        self._mean_step = self._mean_value = 0.0
        self._step_2 = self._value_2 = self._cross = 0.0

    def observe(self, step: int, value: float) -> float | None:
        """Add a value and return the correlation so far; None with fewer than 3 observations or a constant metric.

        Values that are not finite are skipped.
        """
        if math.isfinite(value):
            self._count += 1
            from_step, from_value = step - self._mean_step, value - self._mean_value
            self._mean_step += from_step / self._count
            self._mean_value += from_value / self._count
            self._step_2 += from_step * (step - self._mean_step)
            self._value_2 += from_value * (value - self._mean_value)
            self._cross += from_step * (value - self._mean_value)
        scale = math.sqrt(self._step_2 * self._value_2)
        if self._count < 3 or scale == 0:
            return None
        return max(-1.0, min(1.0, self._cross / scale))

    def state_dict(self) -> dict[str, float]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, float]) -> None:
        assert state.keys() == vars(self).keys()
        vars(self).update(state)
