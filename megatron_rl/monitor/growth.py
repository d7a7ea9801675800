"""Slopes of metrics with confidence intervals."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_Z_975 = 1.959963984540054  # normal quantile of a two-sided 95% interval


def t_quantile_975(degrees: int) -> float:
    """Return the 97.5% quantile of Student's t: exact for 1 and 2 degrees of freedom, else a series (to 0.2%)."""
    if degrees < 1:
        return math.inf
    if degrees <= 2:
        return (12.706204736174698, 4.302652729749462)[degrees - 1]
    z, n = _Z_975, float(degrees)
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4)
    )


@dataclass(frozen=True)
class Slope:
    """Least-squares slope and its 95% confidence interval, per unit of x."""

    value: float
    lower: float
    upper: float


def fit_slope(xs: Sequence[float], ys: Sequence[float]) -> Slope | None:
    """Return the least-squares slope of ys on xs; None with fewer than 3 points or equal xs.

    The interval assumes independent residuals; it is too narrow when neighbouring steps are correlated.
    """
    n = len(xs)
    if n < 3:
        return None
    mean_x, mean_y = sum(xs) / n, sum(ys) / n
    spread = sum((x - mean_x) ** 2 for x in xs)
    if spread == 0:
        return None
    value = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    residual_sq = sum((y - mean_y - value * (x - mean_x)) ** 2 for x, y in zip(xs, ys, strict=True))
    margin = t_quantile_975(n - 2) * math.sqrt(residual_sq / (n - 2) / spread)
    return Slope(value, value - margin, value + margin)


class LogGrowth:
    """Slope of the logarithm of a positive metric over a sliding window: 0.01 means 1% a step.

    Values that are not finite or not above 0 (a step without any mismatch) are skipped.
    """

    def __init__(self, window: int) -> None:
        self._points: deque[tuple[float, float]] = deque(maxlen=window)

    def observe(self, step: int, value: float) -> Slope | None:
        """Add the value of ``step`` and return the slope over the window; None until the window is full."""
        if math.isfinite(value) and value > 0:
            self._points.append((float(step), math.log(value)))
        if len(self._points) < self._points.maxlen:
            return None
        return fit_slope(*zip(*self._points, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {"points": [list(point) for point in self._points]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._points = deque((tuple(point) for point in state["points"]), maxlen=self._points.maxlen)
