"""What a study can see before it is run: power of paired tests, of equivalence and of a trend.

`smallest_effect` and `seeds_needed` invert the power of a two-sided paired t-test, which is two tails of the noncentral
t distribution [Cohen 1988, ch. 2].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy import integrate, optimize, special, stats

POWER = 0.8
MOST_SEEDS = 10_000


def power_of_t(noncentrality: float, degrees: int, level: float) -> float:
    """Probability that a two-sided t-test at ``level`` rejects, for an estimate of so many of its standard errors."""
    if degrees < 1:
        return 0.0
    bound = float(stats.t.ppf(1 - level / 2, degrees))

    def rejects(deviation: float) -> float:
        return special.ndtr(noncentrality - bound * deviation) + special.ndtr(-bound * deviation - noncentrality)

    return _mean_over_deviations(rejects, degrees, around=noncentrality / bound)


def _mean_over_deviations(function: Callable[[float], float], degrees: int, around: float) -> float:
    """Expectation of ``function`` of a sampled standard deviation, in units of the true one: √(χ²/degrees).

    Not scipy's noncentral t, which is NaN where few degrees of freedom need a large effect. ``around``: where the
    function changes, for the integral to look there.
    """
    half = degrees / 2
    scale = math.log(2) + half * math.log(half) - math.lgamma(half)

    def density(deviation: float) -> float:
        return math.exp(scale + special.xlogy(degrees - 1, deviation) - half * deviation**2)

    most = math.sqrt(stats.chi2.isf(1e-14, degrees) / degrees)
    points = sorted({min(max(point, 0.0), most) for point in (around, 0.9 * around, 1.1 * around, 1.0)} - {0.0, most})
    found, _ = integrate.quad(lambda s: function(s) * density(s), 0.0, most, points=points, limit=400, epsabs=1e-12)
    return min(1.0, float(found))


def power_of_pairs(d: float, num_seeds: int, level: float) -> float:
    """Power of a paired test for a true difference of ``d`` standard deviations of the differences."""
    return power_of_t(d * math.sqrt(num_seeds), num_seeds - 1, level)


def smallest_effect(num_seeds: int, level: float, power: float = POWER) -> float:
    """Smallest d that a paired test sees with ``power``; infinite with one seed."""
    return _smallest_noncentrality(num_seeds - 1, level, power) / math.sqrt(num_seeds)


def _smallest_noncentrality(degrees: int, level: float, power: float) -> float:
    if degrees < 1:
        return math.inf
    bound = float(stats.t.ppf(1 - level / 2, degrees))
    # At twice the bound plus a few, power is above any that is asked for, also at one degree of freedom.
    high = 2 * bound + 10
    return float(optimize.brentq(lambda at: power_of_t(at, degrees, level) - power, 0.0, high))


def seeds_needed(d: float, level: float, power: float = POWER) -> int | None:
    """Fewest seeds with which a paired test sees ``d`` with ``power``; None above `MOST_SEEDS`."""
    low, high = 1, 2
    while power_of_pairs(d, high, level) < power:
        low, high = high, 2 * high
        if low > MOST_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power_of_pairs(d, middle, level) >= power else (middle, high)
    return high


def power_of_equivalence(margin: float, num_seeds: int, level: float, d: float = 0.0) -> float:
    """Probability that both one-sided tests at ``level`` reject for a true difference ``d``; ``margin`` and ``d`` in
    standard deviations of the differences.

    Given the sampled deviation s, the mean must lie within margin − t s/√n of 0: an integral over the chi-square
    distribution of s² [Phillips 1990].
    """
    if num_seeds < 2:
        return 0.0
    degrees, root = num_seeds - 1, math.sqrt(num_seeds)
    bound = float(stats.t.ppf(1 - level, degrees))

    def shows(deviation: float) -> float:
        room = margin * root - bound * deviation
        return max(0.0, special.ndtr(room - d * root) - special.ndtr(-room - d * root))

    return _mean_over_deviations(shows, degrees, around=margin * root / bound)


def smallest_slope(doses: Sequence[float], num_seeds: int, level: float, power: float = POWER) -> float:
    """Smallest slope over these doses, one run each a seed, seen with ``power``, in standard deviations of a residual.

    The slope's standard error is 1/√(seeds · Σ(dose − mean)²), with runs − seeds − 1 degrees of freedom.
    """
    spread = float(((np.asarray(doses, dtype=float) - np.mean(doses)) ** 2).sum()) * num_seeds
    degrees = num_seeds * len(doses) - num_seeds - 1
    if spread == 0 or degrees < 1:
        return math.inf
    return _smallest_noncentrality(degrees, level, power) / math.sqrt(spread)
