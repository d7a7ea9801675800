"""Arms against their controls: paired differences, equivalence, trends over a dose, censored times, Holm's correction.

All tests are two-sided at a level that the study names; distributions are scipy's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import optimize, stats

from megatron_rl.lab.study import Direction

Verdict = Literal["as predicted", "contrary", "no effect", "undecided", "not contradicted", "not testable"]
"""no effect: a difference was predicted, and one as large as the margin is excluded. not testable: the study's gate did
not come out as predicted."""


@dataclass(frozen=True)
class Effect:
    """Arm minus control over the seeds that both have; of a ratio outcome, arm over control. Or a slope over a dose.

    ``lower`` and ``upper`` bound the mean difference with 95% (Student's t of the paired differences); ``d`` is Cohen's
    d of them, their mean over their standard deviation (before exponentiation for a ratio). ``p`` is of no difference,
    ``p_same`` of a difference as large as the margin (two one-sided tests); NaN without a margin.
    """

    num_seeds: int
    mean: float
    lower: float
    upper: float
    d: float
    neutral: float  # what no effect looks like: 0, or 1 for a ratio
    p: float = 1.0
    p_same: float = math.nan
    beyond_margin: bool = True  # the mean difference is larger than the margin, or no margin is set

    @property
    def excludes_none(self) -> bool:
        """Whether the interval excludes no effect."""
        return self.lower > self.neutral or self.upper < self.neutral

    def p_of(self, expected: Direction) -> float:
        """The p-value that supports or contradicts a prediction; of "same" without a margin, that of a difference."""
        return self.p_same if expected == "same" and not math.isnan(self.p_same) else self.p

    def verdict(
        self, expected: Direction, level: float = 0.05, adjusted: float | None = None, family: int = 1
    ) -> Verdict:
        """What the data say of a prediction.

        ``adjusted``: `p_of` the prediction, corrected for its family of ``family`` tests (default: as it is); the other
        hypothesis, which the family does not count, is corrected by the full number. A difference counts where it is
        significant and larger than the margin. "same" needs two one-sided tests against the margin; without a margin it
        can only be contradicted.
        """
        tested = self.p_of(expected) if adjusted is None else adjusted
        tests_same = expected == "same" and not math.isnan(self.p_same)
        differs = (self.p * family if tests_same else tested) < level and self.beyond_margin
        equal = (tested if tests_same else self.p_same * family) < level  # False for NaN
        if expected == "same":
            return "as predicted" if equal else "contrary" if differs else self._open_same
        if differs:
            return "as predicted" if (self.mean > self.neutral) == (expected == "higher") else "contrary"
        return "no effect" if equal else "undecided"

    @property
    def _open_same(self) -> Verdict:
        return "not contradicted" if math.isnan(self.p_same) else "undecided"


def paired_effect(
    arm: Mapping[int, float], control: Mapping[int, float], ratio: bool = False, margin: float | None = None
) -> Effect | None:
    """Compare outcomes by seed; None without a common seed, and where a ratio has a value that is not positive.

    ``margin``: the largest difference that counts as the same; of a ratio, a factor above 1. One common seed has an
    infinite interval and no d.
    """
    seeds = sorted(arm.keys() & control.keys())
    if not seeds or (ratio and min(min(arm[s], control[s]) for s in seeds) <= 0):
        return None
    differences = np.array([math.log(arm[s] / control[s]) if ratio else arm[s] - control[s] for s in seeds])
    mean, deviation, half, d = float(differences.mean()), math.nan, math.inf, math.nan
    if len(seeds) > 1:
        deviation = float(differences.std(ddof=1))
        half = interval_half_width(len(seeds)) * deviation
        d = mean / deviation if deviation > 0 else math.nan
    error = deviation / math.sqrt(len(seeds))
    return _effect(len(seeds), mean, error, half, d, len(seeds) - 1, ratio, margin)


def _effect(
    num_seeds: int, mean: float, error: float, half: float, d: float, degrees: int, ratio: bool, margin: float | None
) -> Effect:
    """An `Effect` from an estimate of standard error ``error``; estimate and half width are logarithms of a ratio."""
    within = math.log(margin) if ratio and margin is not None else margin
    p_same = (
        math.nan
        if within is None
        else max(_p_above(mean + within, error, degrees), _p_above(within - mean, error, degrees))
    )
    p = min(1.0, 2 * _p_above(abs(mean), error, degrees))
    ends = (mean, mean - half, mean + half)
    if ratio:
        ends = tuple(math.exp(end) if end < math.inf else end for end in ends)
    beyond = within is None or abs(mean) > within
    return Effect(num_seeds, *ends, d, 1.0 if ratio else 0.0, p, p_same, beyond)


def _p_above(estimate: float, error: float, degrees: int) -> float:
    """One-sided p-value of "the true value is 0 or below". Without spread, an estimate above 0 has 0 and others 1."""
    if degrees < 1:
        return 1.0
    if error == 0:
        return float(estimate <= 0)
    return float(stats.t.sf(estimate / error, degrees))


def interval_half_width(num_seeds: int) -> float:
    """Half width of the 95% interval in standard deviations of the paired differences: t / √n, 2.48 for 3 seeds."""
    return float(stats.t.ppf(0.975, num_seeds - 1)) / math.sqrt(num_seeds) if num_seeds > 1 else math.inf


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given: the k-th smallest of m times m − k + 1, made monotone."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def restricted_mean(times: Sequence[float], collapsed: Sequence[bool], horizon: float) -> float:
    """Mean time until collapse, no later than ``horizon``: the area under the Kaplan-Meier curve up to there.

    Without censoring before the horizon it is the mean of min(time, horizon). A run that is last seen before the
    horizon, and has not collapsed, is censored then. After the last run that is seen, the curve stays level.
    """
    times, collapsed = np.asarray(times, dtype=float), np.asarray(collapsed, dtype=bool)
    if not collapsed.any():
        return float(horizon)
    sample = stats.CensoredData(uncensored=times[collapsed], right=times[~collapsed])
    curve = stats.ecdf(sample).sf
    steps = np.concatenate([[0.0], np.minimum(curve.quantiles, horizon), [horizon]])
    heights = np.concatenate([[1.0], curve.probabilities])
    return float((np.diff(steps) * heights).sum())


def restricted_mean_values(times: Sequence[float], collapsed: Sequence[bool], horizon: float) -> list[float]:
    """A run's share of `restricted_mean`: pseudo-values n θ − (n − 1) θ without it (Andersen, Hansen and Klein 2004).

    Without censoring before the horizon they are min(time, horizon), so that runs can be compared in pairs either way.
    """
    n = len(times)
    if n == 1:
        return [restricted_mean(times, collapsed, horizon)]
    whole = n * restricted_mean(times, collapsed, horizon)
    without = [[*range(i), *range(i + 1, n)] for i in range(n)]
    return [
        whole - (n - 1) * restricted_mean([times[j] for j in rest], [collapsed[j] for j in rest], horizon)
        for rest in without
    ]


@dataclass(frozen=True)
class Regression:
    """Slope of a regression with a random intercept for every seed, by restricted maximum likelihood."""

    slope: float
    error: float
    degrees: int  # runs − seeds − 1, those of the regression within seeds
    seed_variance: float
    residual_variance: float


def mixed_regression(seeds: Sequence[int], doses: Sequence[float], values: Sequence[float]) -> Regression | None:
    """Regress ``values`` on ``doses``, runs of one seed sharing an intercept; None where the doses do not vary or fewer
    than one degree of freedom is left."""
    groups = np.unique(np.asarray(seeds), return_inverse=True)[1]
    x, y = np.asarray(doses, dtype=float), np.asarray(values, dtype=float)
    degrees = len(y) - (groups.max(initial=-1) + 1) - 1
    if degrees < 1 or np.ptp(x) == 0:
        return None
    # Centred and in units of its spread: a dose of 1e-4 must not make the equations ill-conditioned.
    unit = x.std()
    fit = _RandomIntercept(groups, np.stack([np.ones_like(x), (x - x.mean()) / unit], axis=1), y)
    found = optimize.minimize_scalar(lambda log: fit.deviance(math.exp(log)), bounds=(-12, 12), method="bounded")
    ratio = math.exp(found.x) if found.fun < fit.deviance(0.0) else 0.0
    coefficients, covariance, residual = fit.solve(ratio)
    error = math.sqrt(covariance[1, 1]) / unit
    return Regression(float(coefficients[1] / unit), error, int(degrees), ratio * residual, residual)


class _RandomIntercept:
    """Generalized least squares for a ratio of seed variance to residual variance."""

    def __init__(self, groups: np.ndarray, design: np.ndarray, y: np.ndarray) -> None:
        self.counts = np.bincount(groups)
        sums = np.zeros((len(self.counts), design.shape[1] + 1))
        both = np.column_stack([design, y])
        np.add.at(sums, groups, both)
        self.products, self.sums, self.columns = both.T @ both, sums, design.shape[1]
        self.left = len(y) - self.columns

    def solve(self, ratio: float) -> tuple[np.ndarray, np.ndarray, float]:
        """Coefficients, their covariance and the residual variance."""
        shrink = ratio / (1 + self.counts * ratio)
        weighted = self.products - (self.sums * shrink[:, None]).T @ self.sums
        a, b, yy = weighted[:-1, :-1], weighted[:-1, -1], weighted[-1, -1]
        coefficients = np.linalg.solve(a, b)
        residual = max(0.0, float(yy - b @ coefficients)) / self.left
        return coefficients, residual * np.linalg.inv(a), residual

    def deviance(self, ratio: float) -> float:
        """−2 log restricted likelihood, up to a constant."""
        _, covariance, residual = self.solve(ratio)
        if residual == 0:
            return -math.inf
        log_det = -np.linalg.slogdet(covariance / residual)[1]
        return self.left * math.log(residual) + float(np.log1p(self.counts * ratio).sum()) + log_det


def trend_effect(
    seeds: Sequence[int], doses: Sequence[float], values: Sequence[float], margin: float | None = None
) -> Effect | None:
    """The slope of `mixed_regression` as an `Effect`; ``margin`` is the largest slope that counts as none."""
    fit = mixed_regression(seeds, doses, values)
    if fit is None:
        return None
    half = float(stats.t.ppf(0.975, fit.degrees)) * fit.error
    return _effect(len(set(seeds)), fit.slope, fit.error, half, math.nan, fit.degrees, False, margin)
