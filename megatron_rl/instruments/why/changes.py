"""When a metric left its own baseline: Pettitt's test, applied again to what lies before each change it finds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SURE = 0.01  # most probable error of a change, by the test
SHORTEST = 4  # observations on each side of a change


@dataclass(frozen=True)
class Change:
    """A metric's level is another from ``step`` on. ``before``, ``after``: medians on both sides."""

    metric: str
    step: int
    before: float
    after: float
    probability: float  # of so clear a change in a series without any

    @property
    def goes_up(self) -> bool:
        """Whether the later level is the higher one."""
        return self.after > self.before


def pettitt(values: Sequence[float]) -> tuple[int, float]:
    """The first index after the likeliest change of level in ``values``, and the probability of it by chance.

    The statistic is the largest |U_t|, where U_t sums the signs of all differences between values up to t and values
    after it (A. N. Pettitt, Applied Statistics 28, 1979); the probability is his approximation 2·exp(-6K²/(n³ + n²)).
    It uses order alone, so that spikes and the scale of a metric do not matter.
    """
    x = np.asarray(values, dtype=np.float64)
    n = len(x)
    if n < 2:
        return 0, 1.0
    later_minus_earlier = np.sign(x[:, None] - x[None, :])
    u = np.cumsum(later_minus_earlier.sum(axis=1))[:-1]  # pairs on one side of t cancel
    at = int(np.argmax(np.abs(u)))
    k = float(abs(u[at]))
    return at + 1, min(1.0, 2.0 * math.exp(-6.0 * k**2 / (n**3 + n**2)))


def first_change(metric: str, steps: Sequence[int], values: Sequence[float]) -> Change | None:
    """The earliest change of level of a series that the test is sure of; None where it is sure of none.

    Values that are not finite count as larger than every other. After a change is found, what lies before it is
    searched again: the first departure is wanted, not the largest.
    """
    known = [value for value in values if math.isfinite(value)]
    top = max(known, default=0.0)
    x = [value if math.isfinite(value) else top + abs(top) + 1.0 for value in values]
    found, end = None, len(x)
    while end >= 2 * SHORTEST:
        at, probability = pettitt(x[:end])
        if probability > SURE or at < SHORTEST or end - at < SHORTEST:
            break
        before, after = float(np.median(x[:at])), float(np.median(x[at:end]))
        found = Change(metric, int(steps[at]), before, after, probability)
        end = at
    return found
