"""Compares arms with controls: paired differences, equivalence, trends over a dose, censored times, Holm's correction.

All tests are two-sided at the study's level; distributions are scipy's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import optimize, stats

from megatron_rl.instruments.lab.study import Direction

Verdict = Literal["as predicted", "contrary", "no effect", "undecided", "not contradicted", "not testable"]
"""no effect: a difference was predicted, but one as large as the margin is excluded. not testable: the study's gate did
not come out as predicted."""


@dataclass(frozen=True)
class Effect:
    """Arm minus control over common seeds (arm over control for a ratio outcome), or a slope over a dose.

    ``lower`` and ``upper`` bound the mean difference with 95% (Student's t of the paired differences). ``d`` is Cohen's
    d: their mean over their standard deviation (before exponentiation for a ratio). ``p`` tests for no difference,
    ``p_same`` for a difference as large as the margin (two one-sided tests); NaN without a margin.
    """

    num_seeds: int
    mean: float
    lower: float
    upper: float
    d: float
    neutral: float  # the value of no effect: 0, or 1 for a ratio
    p: float = 1.0
    p_same: float = math.nan
    beyond_margin: bool = True  # the mean difference is larger than the margin, or no margin is set

    @property
    def excludes_none(self) -> bool:
        """Whether the interval excludes the value of no effect."""
        return self.lower > self.neutral or self.upper < self.neutral

    def p_of(self, expected: Direction) -> float:
        """Return the p-value for a prediction; for "same" without a margin, that of a difference."""
        return self.p_same if expected == "same" and not math.isnan(self.p_same) else self.p

    def verdict(
        self, expected: Direction, level: float = 0.05, adjusted: float | None = None, family: int = 1
    ) -> Verdict:
        """Return the verdict on a prediction.

        ``adjusted``: `p_of` the prediction, corrected for its family of ``family`` tests (default: uncorrected). The
        other hypothesis is not part of the family and is corrected by the full number. A difference counts if it is
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
    """Compare outcomes by seed and return the effect; None without a common seed, or a nonpositive value of a ratio.

    ``margin``: the largest difference that counts as the same (a factor above 1 for a ratio). With one common seed, the
    interval is infinite and there is no d.
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
    """Return an `Effect` for an estimate with standard error ``error``; for a ratio, values are logarithms."""
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
    """Return the one-sided p-value of "the true value is at most 0". Without spread it is 0 above 0, else 1."""
    if degrees < 1:
        return 1.0
    if error == 0:
        return float(estimate <= 0)
    return float(stats.t.sf(estimate / error, degrees))


def interval_half_width(num_seeds: int) -> float:
    """Return the half width of the 95% interval in standard deviations of the differences: t / √n, 2.48 for 3 seeds."""
    return float(stats.t.ppf(0.975, num_seeds - 1)) / math.sqrt(num_seeds) if num_seeds > 1 else math.inf


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values in the given order: the k-th smallest of m times m − k + 1, made monotone."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def restricted_mean(times: Sequence[float], collapsed: Sequence[bool], horizon: float) -> float:
    """Return the mean time until collapse up to ``horizon``: the area under the Kaplan-Meier curve.

    Without censoring before the horizon it is the mean of min(time, horizon). A run that ends before the horizon
    without a collapse is censored at its end. After the last observed run, the curve stays constant.
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
    """Return the pseudo-values of `restricted_mean`: n θ − (n − 1) θ without the run (Andersen, Hansen, Klein 2004).

    Without censoring before the horizon they are min(time, horizon). In both cases, runs can be compared in pairs.
    """
    n = len(times)
    if n == 1:
        return [restricted_mean(times, collapsed, horizon)]
    scaled_mean = n * restricted_mean(times, collapsed, horizon)
    without = [[*range(i), *range(i + 1, n)] for i in range(n)]
    return [
        scaled_mean - (n - 1) * restricted_mean([times[j] for j in indices], [collapsed[j] for j in indices], horizon)
        for indices in without
    ]


@dataclass(frozen=True)
class Regression:
    """The slope of a regression with a random intercept per seed, by restricted maximum likelihood."""

    slope: float
    error: float
    degrees: int  # runs − seeds − 1, those of the regression within seeds
    seed_variance: float
    residual_variance: float


def mixed_regression(seeds: Sequence[int], doses: Sequence[float], values: Sequence[float]) -> Regression | None:
    """Regress ``values`` on ``doses`` with an intercept per seed and return the slope.

    Returns None if doses are constant or no degree of freedom is left.
    """
    groups = np.unique(np.asarray(seeds), return_inverse=True)[1]
    x, y = np.asarray(doses, dtype=float), np.asarray(values, dtype=float)
    degrees = len(y) - (groups.max(initial=-1) + 1) - 1
    if degrees < 1 or np.ptp(x) == 0:
        return None
    # Centre and scale the dose, so that a dose of 1e-4 does not make the equations ill-conditioned.
    unit = x.std()
    fit = _RandomIntercept(groups, np.stack([np.ones_like(x), (x - x.mean()) / unit], axis=1), y)
    minimum = optimize.minimize_scalar(lambda log: fit.deviance(math.exp(log)), bounds=(-12, 12), method="bounded")
    ratio = math.exp(minimum.x) if minimum.fun < fit.deviance(0.0) else 0.0
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
        """Return coefficients, their covariance and the residual variance."""
        shrink = ratio / (1 + self.counts * ratio)
        weighted = self.products - (self.sums * shrink[:, None]).T @ self.sums
        a, b, yy = weighted[:-1, :-1], weighted[:-1, -1], weighted[-1, -1]
        coefficients = np.linalg.solve(a, b)
        residual = max(0.0, float(yy - b @ coefficients)) / self.left
        return coefficients, residual * np.linalg.inv(a), residual

    def deviance(self, ratio: float) -> float:
        """Return −2 log restricted likelihood, up to a constant."""
        _, covariance, residual = self.solve(ratio)
        if residual == 0:
            return -math.inf
        log_det = -np.linalg.slogdet(covariance / residual)[1]
        return self.left * math.log(residual) + float(np.log1p(self.counts * ratio).sum()) + log_det


def trend_effect(
    seeds: Sequence[int], doses: Sequence[float], values: Sequence[float], margin: float | None = None
) -> Effect | None:
    """Return the slope of `mixed_regression` as an `Effect`; ``margin``: the largest slope that counts as none."""
    fit = mixed_regression(seeds, doses, values)
    if fit is None:
        return None
    half = float(stats.t.ppf(0.975, fit.degrees)) * fit.error
    return _effect(len(set(seeds)), fit.slope, fit.error, half, math.nan, fit.degrees, False, margin)
