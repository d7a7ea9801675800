"""Scores of alarm rules on finished runs: steps of warning before a collapse, and number of false alarms.

Runs may be packed into one file: `lab pack` and `tools.dev.unstable_runs` write them, lines of JSON under xz.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from megatron_rl.config.monitor import AlarmRule
from megatron_rl.errors import InputError
from megatron_rl.monitor.alarms import Alarms
from megatron_rl.monitor.run_directory import decode_line

MAX_UNPACKED = 256 << 20  # bytes: a small file can unpack to anything


@dataclass(frozen=True)
class RecordedRun:
    """A finished run. ``cause``: what was planted in it, "" for nothing, None where nobody knows."""

    name: str
    records: list[dict[str, float]]
    cause: str | None = None
    recipe: dict[str, Any] = field(default_factory=dict)

    @property
    def half(self) -> Literal["set", "judge"]:
        """Which half it belongs to: rules are set on one and judged on the other. By a hash of its name."""
        return "judge" if hashlib.sha256(self.name.encode()).digest()[0] & 1 else "set"


def read_packed(file: Path) -> list[RecordedRun]:
    """The runs of ``file``, each named study/run. Raises `InputError` where it is no file of packed runs."""
    try:
        decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_UNPACKED)
        lines = decompressor.decompress(file.read_bytes(), max_length=MAX_UNPACKED).splitlines()
        if not decompressor.eof:
            raise ValueError("the file is cut, or unpacks to more than 256 MiB")
        head, *runs = map(json.loads, lines)
        return [_read(head["study"], run) for run in runs]
    except (OSError, lzma.LZMAError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{file}: cannot be read as packed runs ({type(error).__name__}: {error})") from error


def _read(study: str, run: dict[str, Any]) -> RecordedRun:
    records = [decode_line(json.dumps(record).encode()) for record in run["records"]]
    return RecordedRun(f"{study}/{run['run']}", records, run.get("cause"), run.get("recipe", {}))


def distinct(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """``runs`` without those whose reward was recorded before: studies share arms."""
    by_curve: dict[str, RecordedRun] = {}
    for run in runs:
        curve = [(record["step"], record.get("critic/rewards/mean")) for record in run.records]
        by_curve.setdefault(repr(curve), run)
    return list(by_curve.values())


@dataclass(frozen=True)
class CollapseRule:
    """When a run counts as collapsed.

    It collapses at the first step from which the smoothed metric stays, for ``hold`` observations, at or below
    (1 − drop) times the highest smoothed value before. Smoothing is the median of ``smoothing`` observations.
    """

    metric: str = "critic/rewards/mean"
    drop: float = 0.5
    hold: int = 5
    smoothing: int = 5


def collapse_step(records: Sequence[Mapping[str, float]], rule: CollapseRule) -> int | None:
    """Return the step of the collapse; None if there is none. Values that are not finite count as the worst seen.

    The lab's outcome of the same name (`lab.statistics`) differs: it uses a running mean, has no ``hold``, skips values
    that are not finite, and gives a run without collapse the step after its last.
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
    """The score of one rule on one run."""

    rule: str
    fired: tuple[int, ...]  # steps at which it went off
    collapse: int | None
    lead: int | None  # steps from the first timely warning to the collapse; None: no collapse, or no warning
    false_alarms: int  # times it went off more than ``horizon`` steps before a collapse, or without one


def score_run(
    records: Sequence[Mapping[str, float]], rules: Sequence[AlarmRule], rule: CollapseRule, horizon: int
) -> list[RuleScore]:
    """Replay ``rules`` over a run and return a score per rule.

    A warning within ``horizon`` steps before the collapse is right, one after it does not count, any other is false.
    """
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


HELD_OUT = "val/reward/mean"
HEALTHY_DROP = 1 / 3  # a run whose reward fell by this much for as long is neither healthy nor collapsed


@dataclass(frozen=True)
class SetScore:
    """How a whole set of rules did on a set of runs."""

    runs: int
    collapses: int
    noticed: int  # collapsed runs in which a rule went off
    in_time: int  # before the collapse
    leads: tuple[int, ...]  # of those noticed: steps from the first alarm to the collapse, negative after it
    healthy_runs: int
    healthy_steps: int
    false_alarms: tuple[str, ...]  # the rule of each alarm in a healthy run
    missed: tuple[str, ...]

    @property
    def share_noticed(self) -> float:
        return self.noticed / self.collapses if self.collapses else math.nan

    @property
    def median_lead(self) -> float:
        return median(self.leads) if self.leads else math.nan

    @property
    def false_per_thousand(self) -> float:
        return 1000 * len(self.false_alarms) / self.healthy_steps if self.healthy_steps else math.nan


def first_collapse(records: Sequence[Mapping[str, float]], rule: CollapseRule) -> int | None:
    """The earlier of the collapse by ``rule`` and that of the held-out reward: two validations in a row."""
    held_out = CollapseRule(HELD_OUT, rule.drop, hold=2, smoothing=1)
    collapses = [step for r in (rule, held_out) if (step := collapse_step(records, r)) is not None]
    return min(collapses, default=None)


def score_set(runs: Sequence[tuple[RecordedRun, Sequence[AlarmRule]]], rule: CollapseRule) -> SetScore:
    """Replay each run's rules over it, all together.

    Healthy: nothing was planted, and no held fall of the reward by `HEALTHY_DROP` or more. Alarms in the runs between
    healthy and collapsed count neither way.
    """
    leads, missed, false, healthy_runs, healthy_steps = [], [], [], 0, 0
    milder = CollapseRule(rule.metric, min(rule.drop, HEALTHY_DROP), rule.hold, rule.smoothing)
    for run, rules in runs:
        alarms = Alarms(rules)
        events = [event for record in run.records for event in alarms.observe(int(record["step"]), record)]
        collapse = first_collapse(run.records, rule)
        if collapse is not None and events:
            leads.append(collapse - events[0].step)
        elif collapse is not None:
            missed.append(run.name)
        elif not run.cause and first_collapse(run.records, milder) is None:
            healthy_runs, healthy_steps = healthy_runs + 1, healthy_steps + len(run.records)
            false += [event.name for event in events]
    return SetScore(
        runs=len(runs),
        collapses=len(leads) + len(missed),
        noticed=len(leads),
        in_time=sum(lead > 0 for lead in leads),
        leads=tuple(leads),
        healthy_runs=healthy_runs,
        healthy_steps=healthy_steps,
        false_alarms=tuple(false),
        missed=tuple(missed),
    )
