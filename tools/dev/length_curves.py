"""Made-up response-length curves with known answers: the detector's defaults were chosen and are tested on them.

Each curve is a function of a numpy generator and a relative noise (standard deviation over mean) and gives the mean
length of every step, ``[num_steps]`` float64.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Curve = Callable[[np.random.Generator, float], np.ndarray]


def _noisy(clean: np.ndarray, rng: np.random.Generator, noise: float) -> np.ndarray:
    # A mean of many lengths is close to normal; the floor keeps a five-sigma dip from becoming a negative length.
    return clean * np.maximum(1.0 + noise * rng.standard_normal(len(clean)), 0.05)


def _ramp(start: int, width: int, low: float, high: float, num_steps: int) -> np.ndarray:
    return low + (high - low) * np.clip((np.arange(num_steps) - start + 1) / max(width, 1), 0.0, 1.0)


def step_surge(at: int, factor: float = 3.0, num_steps: int = 300) -> Curve:
    """Length 1000 up to step ``at - 1``, ``factor`` times that from step ``at`` on."""
    return lambda rng, noise: _noisy(_ramp(at, 1, 1000.0, 1000.0 * factor, num_steps), rng, noise)


def ramp_surge(start: int, width: int, high: float, num_steps: int = 300) -> Curve:
    """Length 1000, rising in a line to ``high`` over ``width`` steps from ``start`` on."""
    return lambda rng, noise: _noisy(_ramp(start, width, 1000.0, high, num_steps), rng, noise)


def paper_curve(centre: int, high: float, scale: float = 5.0, num_steps: int = 300) -> Curve:
    """1000 → ``high``, logistic, around step ``centre`` [arXiv 2602.01826: 1000 → 3000–4000 near 110 and near 90]."""
    steps = np.arange(num_steps)
    return lambda rng, noise: _noisy(1000.0 + (high - 1000.0) / (1.0 + np.exp(-(steps - centre) / scale)), rng, noise)


def flat(num_steps: int = 1000) -> Curve:
    """Length 1000 throughout."""
    return lambda rng, noise: _noisy(np.full(num_steps, 1000.0), rng, noise)


def growth(per_100_steps: float = 0.10, num_steps: int = 1000) -> Curve:
    """Length growing by this fraction (of itself) every 100 steps."""
    return lambda rng, noise: _noisy(1000.0 * (1.0 + per_100_steps) ** (np.arange(num_steps) / 100.0), rng, noise)


def spikes(factor: float = 8.0, every: int = 37, num_steps: int = 1000) -> Curve:
    """Length 1000 with a single step ``factor`` times as long now and then."""

    def curve(rng: np.random.Generator, noise: float) -> np.ndarray:
        lengths = _noisy(np.full(num_steps, 1000.0), rng, noise)
        lengths[rng.integers(every) :: every] *= factor
        return lengths

    return curve


def decline(per_100_steps: float = 0.30, num_steps: int = 1000) -> Curve:
    """Length falling by this fraction (of itself) every 100 steps."""
    return lambda rng, noise: _noisy(1000.0 * (1.0 - per_100_steps) ** (np.arange(num_steps) / 100.0), rng, noise)
