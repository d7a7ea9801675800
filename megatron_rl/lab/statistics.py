"""One number per run, and arms against their controls, seed by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_rl.lab.study import Direction, Outcome
from megatron_rl.monitor.growth import fit_slope, t_quantile_975
from megatron_rl.monitor.scoring import CollapseRule

COLLAPSED_BELOW = 1.0 - CollapseRule.drop  # of the best running mean so far
Verdict = Literal["as predicted", "contrary", "undecided", "not contradicted"]


def outcome_of(records: Sequence[Mapping[str, float]], outcome: Outcome) -> float | None:
    """The outcome of one run from its records (metrics.jsonl); None where it is not defined.

    Values that are not finite are no observations; for ``log_slope`` neither are values of 0.
    """
    seen = [(r["step"], float(r[outcome.metric])) for r in records if outcome.metric in r]
    seen = [(step, value) for step, value in seen if math.isfinite(value)]
    if not seen:
        return None
    steps, values = np.array(seen).T
    match outcome.statistic:
        case "last":
            return float(values[-1])
        case "mean":
            return float(values.mean())
        case "max":
            return float(values.max())
        case "slope":
            fit = fit_slope(steps, values)
            return fit and fit.value
        case "log_slope":
            positive = values > 0
            fit = fit_slope(steps[positive], np.log(values[positive]))
            return fit and fit.value
        case "step_pcc":
            if len(values) < 3 or values.std() == 0:
                return None
            return float(np.corrcoef(steps, values)[0, 1])
        case "collapse_step":
            return _collapse_step(steps, values, outcome.window)


def _collapse_step(steps: np.ndarray, values: np.ndarray, window: int) -> float | None:
    """First step whose mean over the last ``window`` values is below half of the best so far; else one past the end.

    Not `monitor.scoring.collapse_step`, which judges alarms and waits until a fall of the running median lasts: here a
    fall that recovers counts as well, and a run that never fell has a number to compare.
    """
    if len(values) < window:
        return None
    means = np.convolve(values, np.full(window, 1 / window), mode="valid")
    best = np.maximum.accumulate(means)
    below = np.flatnonzero(means < COLLAPSED_BELOW * best)
    return float(steps[window - 1 + below[0]]) if len(below) else float(steps[-1] + 1)


@dataclass(frozen=True)
class Effect:
    """Arm minus control over the seeds that both have; of a ratio outcome, arm over control.

    ``lower`` and ``upper`` bound the mean difference with 95% (Student's t of the paired differences); ``d`` is Cohen's
    d of them, their mean over their standard deviation (before exponentiation for a ratio).
    """

    num_seeds: int
    mean: float
    lower: float
    upper: float
    d: float
    neutral: float  # what no effect looks like: 0, or 1 for a ratio

    def verdict(self, expected: Direction) -> Verdict:
        """What the interval says of a prediction. "same" can only be contradicted: no interval shows equality."""
        above, below = self.lower > self.neutral, self.upper < self.neutral
        if expected == "same":
            return "contrary" if above or below else "not contradicted"
        if above or below:
            return "as predicted" if above == (expected == "higher") else "contrary"
        return "undecided"

    @property
    def excludes_none(self) -> bool:
        """Whether the interval excludes no effect."""
        return self.lower > self.neutral or self.upper < self.neutral


def paired_effect(arm: Mapping[int, float], control: Mapping[int, float], ratio: bool = False) -> Effect | None:
    """Compare outcomes by seed; None without a common seed, and where a ratio has a value that is not positive.

    One common seed has an infinite interval and no d.
    """
    seeds = sorted(arm.keys() & control.keys())
    if not seeds or (ratio and min(min(arm[s], control[s]) for s in seeds) <= 0):
        return None
    differences = np.array([math.log(arm[s] / control[s]) if ratio else arm[s] - control[s] for s in seeds])
    mean, margin, d = float(differences.mean()), math.inf, math.nan
    if len(seeds) > 1:
        deviation = float(differences.std(ddof=1))
        margin = interval_half_width(len(seeds)) * deviation
        d = mean / deviation if deviation > 0 else math.nan
    ends = (mean, mean - margin, mean + margin)
    if ratio:
        ends = tuple(math.exp(end) if end < math.inf else end for end in ends)
    return Effect(len(seeds), *ends, d=d, neutral=1.0 if ratio else 0.0)


def interval_half_width(num_seeds: int) -> float:
    """Half width of the 95% interval in standard deviations of the paired differences: t / √n, 2.48 for 3 seeds."""
    return t_quantile_975(num_seeds - 1) / math.sqrt(num_seeds)
