"""Rules on metrics that ask the loop to act. This module decides when; the loop does what a rule asks for."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from megatron_rl.config.monitor import Action, AlarmRule
from megatron_rl.monitor.growth import fit_slope


@dataclass(frozen=True)
class AlarmEvent:
    """One rule going off."""

    name: str
    step: int
    actions: tuple[Action, ...]
    message: str


def wanted(events: Sequence[AlarmEvent], action: Action) -> bool:
    """Whether any of ``events`` asks for ``action``."""
    return any(action in event.actions for event in events)


class _RuleState:
    """One rule with its window and its count of steps."""

    def __init__(self, rule: AlarmRule) -> None:
        self.rule = rule
        self.points: deque[tuple[float, float]] = deque(maxlen=rule.window)
        self.held = 0  # consecutive observations with the condition true
        self.statistic = math.nan

    def observe(self, step: int, value: float) -> bool:
        """Take one value; whether the rule goes off now."""
        self.statistic = self._statistic(step, value)
        self.held = self.held + 1 if self._condition() else 0
        rule = self.rule
        over = self.held - rule.for_steps
        return over == 0 or (over > 0 and rule.again_after is not None and over % rule.again_after == 0)

    def _condition(self) -> bool:
        if self.rule.statistic == "not_finite":
            return self.statistic > 0
        # NaN compares false either way: a statistic that is not there yet (or a NaN metric) sets nothing off.
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

    def describe(self) -> str:
        """The rule's condition with the number that met it."""
        rule = self.rule
        what = rule.metric if rule.statistic == "value" else f"{rule.statistic} of {rule.metric}"
        if rule.statistic == "not_finite":
            return f"{rule.metric} is not finite"
        sign, bound = (">", rule.above) if rule.above is not None else ("<", rule.below)
        return f"{what} = {self.statistic:.4g} {sign} {bound:g} for {self.held} steps"


# Of every run, whatever its recipe says; a rule of the same name there takes its place.
BUILT_IN = (AlarmRule(name="reward-errors", metric="reward/errors", above=0.0, then=["warn"]),)


class Alarms:
    """All rules of a recipe. ``built_in``: further ones, whose metric is there only in steps in which they go off."""

    def __init__(self, rules: Sequence[AlarmRule], built_in: Sequence[AlarmRule] = ()) -> None:
        own = {rule.name for rule in rules}
        added = [rule for rule in built_in if rule.name not in own]
        self._rules = [_RuleState(rule) for rule in (*rules, *added)]
        self._silent = {rule.name for rule in added}

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[AlarmEvent]:
        """Show every rule its metric of ``step``; the rules that go off. A metric that is absent changes nothing."""
        events = []
        for state in self._rules:
            rule = state.rule
            if rule.metric in metrics and state.observe(step, float(metrics[rule.metric])):
                message = f"alarm {rule.name} at step {step}: {state.describe()}; then: {', '.join(rule.then)}"
                events.append(AlarmEvent(rule.name, step, tuple(rule.then), message))
        return events

    def metrics(self, events: Sequence[AlarmEvent]) -> dict[str, float]:
        """`alarm/<name>` of every rule: 1 where it is among ``events``, else 0 (built-in ones: absent)."""
        gone_off = {event.name for event in events}
        names = [state.rule.name for state in self._rules]
        return {
            f"alarm/{name}": float(name in gone_off) for name in names if name in gone_off or name not in self._silent
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values, by rule name."""
        return {s.rule.name: {"held": s.held, "points": [list(point) for point in s.points]} for s in self._rules}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; rules that it does not know start afresh."""
        for rule in self._rules:
            if rule.rule.name in state:
                saved = state[rule.rule.name]
                rule.held = saved["held"]
                rule.points = deque((tuple(point) for point in saved["points"]), maxlen=rule.rule.window)
