"""Judging alarm rules on runs that are over: how long before a collapse they went off, and how often for nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from megatron_rl.config.monitor import AlarmRule
from megatron_rl.monitor.alarms import Alarms


@dataclass(frozen=True)
class CollapseRule:
    """A run has collapsed at the first step from which the smoothed metric stays, for ``hold`` observations, at or
    below (1 − drop) of the highest smoothed value before. Smoothing: median of ``smoothing`` observations."""

    metric: str = "critic/rewards/mean"
    drop: float = 0.5
    hold: int = 5
    smoothing: int = 5


def collapse_step(records: Sequence[Mapping[str, float]], rule: CollapseRule) -> int | None:
    """The step of the collapse, None for a run without one. Values that are not finite count as the worst seen.

    The lab's outcome of this name (`lab.statistics`) takes a running mean instead, asks for no ``hold``, leaves values
    that are not finite out, and gives a run without a collapse the step after its last.
    """
    values = [(int(r["step"]), float(r[rule.metric])) for r in records if rule.metric in r]
    finite = [value for _, value in values if math.isfinite(value)]
    if not finite:
        return None
    peak, low_since, low_count, recent = -math.inf, None, 0, []
    for step, value in values:
        recent = [*recent, value if math.isfinite(value) else min(finite)][-rule.smoothing :]
        if len(recent) < rule.smoothing:
            continue
        smoothed = median(recent)
        peak = max(peak, smoothed)
        if peak > 0 and smoothed <= (1.0 - rule.drop) * peak:
            low_since, low_count = (step, 1) if low_since is None else (low_since, low_count + 1)
            if low_count >= rule.hold:
                return low_since
        else:
            low_since, low_count = None, 0
    return None


@dataclass(frozen=True)
class RuleScore:
    """How one rule did on one run."""

    rule: str
    fired: tuple[int, ...]  # steps at which it went off
    collapse: int | None
    lead: int | None  # steps from the first warning in time to the collapse; None: no collapse, or not warned
    false_alarms: int  # times it went off more than ``horizon`` steps before a collapse, or without one


def score_run(
    records: Sequence[Mapping[str, float]], rules: Sequence[AlarmRule], rule: CollapseRule, horizon: int
) -> list[RuleScore]:
    """Replay ``rules`` over a run. A warning within ``horizon`` steps before the collapse is right; one after it is
    too late to count either way; every other one is false."""
    collapse, alarms = collapse_step(records, rule), Alarms(rules)
    fired: dict[str, list[int]] = {r.name: [] for r in rules}
    for record in records:
        for event in alarms.observe(int(record["step"]), record):
            fired[event.name].append(event.step)
    scores = []
    for name, steps in fired.items():
        in_time = [s for s in steps if collapse is not None and collapse - horizon <= s < collapse]
        false = [s for s in steps if collapse is None or s < collapse - horizon]
        lead = collapse - in_time[0] if in_time else None
        scores.append(RuleScore(name, tuple(steps), collapse, lead, len(false)))
    return scores
