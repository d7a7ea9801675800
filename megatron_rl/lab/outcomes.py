"""One number per run: what arms are compared in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from megatron_rl.lab.study import Outcome
from megatron_rl.monitor.growth import fit_slope
from megatron_rl.monitor.scoring import CollapseRule

COLLAPSED_BELOW = 1.0 - CollapseRule.drop  # of the best running mean so far


def outcome_of(records: Sequence[Mapping[str, float]], outcome: Outcome) -> float | None:
    """The outcome of one run from its records (metrics.jsonl); None where it is not defined.

    Values that are not finite are no observations; for ``log_slope`` neither are values of 0. A collapse step is the
    time of `collapse_of`, whether the run collapsed then or was only seen until then.
    """
    if outcome.statistic == "collapse_step":
        found = collapse_of(records, outcome)
        return found and found[0]
    steps, values = _seen(records, outcome)
    if not len(values):
        return None
    match outcome.statistic:
        case "last":
            return float(values[-1])
        case "mean":
            return float(values.mean().clip(values.min(), values.max()))  # which rounding alone leaves
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


def _seen(records: Sequence[Mapping[str, float]], outcome: Outcome) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values [N] of the outcome's metric within its steps, finite ones alone."""
    last = math.inf if outcome.last_step is None else outcome.last_step
    seen = [
        (record["step"], float(record[outcome.metric]))
        for record in records
        if outcome.metric in record and outcome.first_step <= record["step"] <= last
    ]
    seen = [(step, value) for step, value in seen if math.isfinite(value)]
    steps, values = np.array(seen, dtype=float).reshape(-1, 2).T
    return steps, values


def collapse_of(records: Sequence[Mapping[str, float]], outcome: Outcome) -> tuple[float, bool] | None:
    """First step whose mean over the last ``window`` values is below half of the best so far, and True; the step after
    the last one and False for a run that never fell. None with fewer values than ``window``.

    Not `monitor.scoring.collapse_step`, which judges alarms and waits until a fall of the running median lasts: here a
    fall that recovers counts as well.
    """
    steps, values = _seen(records, outcome)
    if len(values) < outcome.window:
        return None
    means = np.convolve(values, np.full(outcome.window, 1 / outcome.window), mode="valid")
    best = np.maximum.accumulate(means)
    below = np.flatnonzero(means < COLLAPSED_BELOW * best)
    if len(below):
        return float(steps[outcome.window - 1 + below[0]]), True
    return float(steps[-1] + 1), False
