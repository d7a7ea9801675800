"""Alarm rules on metrics, and slopes of metrics with confidence intervals, which rules look at.

This module decides when a rule goes off; the training loop carries out its actions.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from megatron_rl.config.monitor import Action, AlarmRule

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


@dataclass(frozen=True)
class AlarmEvent:
    """An alarm rule that went off at a step, with its actions."""

    name: str
    step: int
    actions: tuple[Action, ...]
    message: str
    onset: int  # the first step that the rule's condition, when it began to hold, was about


def wanted(events: Sequence[AlarmEvent], action: Action) -> bool:
    """Return whether any of ``events`` requests ``action``."""
    return any(action in event.actions for event in events)


class _RuleState:
    """An alarm rule with its window of values and its count of steps."""

    def __init__(self, rule: AlarmRule, once: bool = False) -> None:
        self.rule = rule
        self.is_due = True  # a rule with once=True is checked on its first observation only
        self._once = once
        self.points: deque[tuple[float, float]] = deque(maxlen=rule.window)
        self.held = 0  # consecutive observations with the condition true
        self.onset = 0  # see AlarmEvent; meaningful while held > 0
        self.statistic = math.nan
        self.mark: float | None = None  # of_best: the highest mean so far; of_start: the median of the first window

    def observe(self, step: int, value: float) -> bool:
        """Add one value and return whether the rule goes off now."""
        if not self.is_due:
            return False
        self.is_due = not self._once
        self.statistic = self._statistic(step, value)
        self.held = self.held + 1 if self._condition() else 0
        if self.held == 1:
            self.onset = int(self.points[0][0]) if self._looks_back() else step
        rule = self.rule
        over = self.held - rule.for_steps
        return over == 0 or (over > 0 and rule.again_after is not None and over % rule.again_after == 0)

    def resume(self) -> None:
        """Prepare for a run that continues from a later step: a rule with once=True is not checked again."""
        self.is_due = not self._once

    def _condition(self) -> bool:
        if self.rule.statistic == "not_finite":
            return self.statistic > 0
        # Comparisons with NaN are false, so a missing statistic or a NaN metric never triggers the rule.
        above, below = self.rule.above, self.rule.below
        return self.statistic > above if above is not None else self.statistic < below

    def _statistic(self, step: int, value: float) -> float:
        kind = self.rule.statistic
        if kind == "value":
            return value
        if kind == "not_finite":
            return float(not math.isfinite(value))
        is_log = kind.startswith("log_")
        if not math.isfinite(value) or (is_log and value <= 0):
            return math.nan
        if kind in ("mean", "of_best", "of_start"):
            return self._level(step, value)
        is_full = len(self.points) == self.points.maxlen
        if kind == "ratio":
            base = median(past for _, past in self.points) if is_full else 0.0
            self.points.append((float(step), value))
            return value / base if base else math.nan
        self.points.append((float(step), math.log(value) if is_log else value))
        slope = fit_slope(*zip(*self.points, strict=True)) if len(self.points) == self.points.maxlen else None
        if slope is None:
            return math.nan
        return slope.lower if kind == "log_slope_lower" else slope.value

    def _level(self, step: int, value: float) -> float:
        """The window's mean or median, held against what `mark` remembers of the run."""
        self.points.append((float(step), value))
        if len(self.points) < self.rule.window:
            return math.nan
        values = [value for _, value in self.points]
        if self.rule.statistic == "of_start":
            level = median(values)
            self.mark = level if self.mark is None else self.mark
        else:
            level = sum(values) / len(values)
            if self.rule.statistic == "mean":
                return level
            self.mark = level if self.mark is None else max(self.mark, level)
        return level / self.mark if self.mark > 0 else math.nan

    def _looks_back(self) -> bool:
        """Whether the statistic is one of the whole window, so that what it shows may have begun with the window."""
        return self.rule.statistic not in ("value", "not_finite", "ratio")

    def describe(self) -> str:
        """Return the rule's condition as text, with the value that met it."""
        rule = self.rule
        what = rule.metric if rule.statistic == "value" else f"{rule.statistic} of {rule.metric}"
        if rule.statistic == "not_finite":
            return f"{rule.metric} is not finite"
        sign, bound = (">", rule.above) if rule.above is not None else ("<", rule.below)
        return f"{what} = {self.statistic:.4g} {sign} {bound:g} for {self.held} steps"


# Rules that every run has. A rule of the same name in the recipe replaces the built-in one.
BUILT_IN = (AlarmRule(name="reward-errors", metric="reward/errors", above=0.0, then=["warn"]),)


class Alarms:
    """Checks the recipe's alarm rules and the built-in ones; a recipe rule replaces a built-in rule of the same name.

    ``built_in``: rules whose metric exists only in steps in which they go off. ``first``: built-in rules that are
    checked only on the first step of a run that has their metric.
    """

    def __init__(
        self, rules: Sequence[AlarmRule], built_in: Sequence[AlarmRule] = (), first: Sequence[AlarmRule] = ()
    ) -> None:
        recipe_names = {rule.name for rule in rules}
        added = [_RuleState(rule, once=rule in first) for rule in (*built_in, *first) if rule.name not in recipe_names]
        self._rules = [*(_RuleState(rule) for rule in rules), *added]
        self._silent = {state.rule.name for state in added}

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[AlarmEvent]:
        """Return the rules that go off at ``step``. A rule whose metric is absent keeps its state."""
        events = []
        for state in self._rules:
            rule = state.rule
            if rule.metric in metrics and state.observe(step, float(metrics[rule.metric])):
                message = f"alarm {rule.name} at step {step}: {state.describe()}; then: {', '.join(rule.then)}"
                events.append(AlarmEvent(rule.name, step, tuple(rule.then), message, state.onset))
        return events

    def metrics(self, events: Sequence[AlarmEvent]) -> dict[str, float]:
        """Return `alarm/<name>` per rule: 1 if it is in ``events``, else 0 (built-in rules: no metric)."""
        gone_off = {event.name for event in events}
        names = [state.rule.name for state in self._rules]
        return {
            f"alarm/{name}": float(name in gone_off) for name in names if name in gone_off or name not in self._silent
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values, by rule name."""
        return {
            s.rule.name: {
                "held": s.held,
                "onset": s.onset,
                "points": [list(point) for point in s.points],
                "mark": s.mark,
            }
            for s in self._rules
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. Rules missing there start afresh; first-step rules are not checked again."""
        for rule in self._rules:
            rule.resume()
            if rule.rule.name in state:
                saved = state[rule.rule.name]
                rule.held, rule.mark = saved["held"], saved.get("mark")
                rule.onset = saved.get("onset", 0)
                rule.points = deque((tuple(point) for point in saved["points"]), maxlen=rule.rule.window)
