"""Alarm rules on metrics, the slopes that rules look at, and scores of rules on finished runs.

This module decides when a rule goes off; the training loop carries out its actions.

Runs may be packed into one file: lines of JSON under xz, as `lab pack` writes them.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from megatron_rl.config.monitor import Action, AlarmRule, level_rules
from megatron_rl.config.recipe import without_removed
from megatron_rl.errors import InputError
from megatron_rl.monitor.run_directory import decode_line

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
        self.lowest = math.inf  # of_best: the lowest value so far
        self.moves: deque[float] = deque(maxlen=MOVES)  # of_best: what it moved from one value to the next

    def observe(self, step: int, value: float) -> bool:
        """Add one value and return whether the rule goes off now."""
        if not self.is_due:
            return False
        self.is_due = not self._once
        self.statistic = self._statistic(step, value)
        self.held = self.held + 1 if self._condition() else 0
        if self.held == 1:
            self.onset = int(self.points[0][0]) if self._looks_back() else step
        return self.held == self.rule.for_steps

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
        self.moves.extend([abs(value - self.points[-1][1])] if self.points else ())
        self.points.append((float(step), value))
        self.lowest = min(self.lowest, value)
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
            bottom = bottom_of(self.lowest, self.moves)
            return (level - bottom) / (self.mark - bottom) if self.mark > bottom else math.nan
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


MOVES = 20  # newest moves of a metric that say how noisy it is


def bottom_of(lowest: float, moves: Sequence[float]) -> float:
    """The value that counts as nothing of a metric: 0, or a little below its ``lowest`` value where that is less.

    A little: three times the median of ``moves`` from one value to the next, so that noise is no fall.
    """
    return min(0.0, lowest - 3.0 * median(moves) if lowest < 0 and moves else lowest)


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

    @classmethod
    def of(cls, recipe: Mapping[str, Any]) -> Alarms:
        """The rules that are in force in a run of ``recipe`` (plain values): its own, `BUILT_IN`, those on levels."""
        return cls(own_rules(recipe), (*BUILT_IN, *level_rules(recipe)))

    @property
    def rules(self) -> list[AlarmRule]:
        """All rules, the recipe's own first."""
        return [state.rule for state in self._rules]

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
                "moves": list(s.moves),
                "lowest": None if math.isinf(s.lowest) else s.lowest,
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
                rule.moves = deque(saved.get("moves", ()), maxlen=MOVES)
                rule.lowest = math.inf if saved.get("lowest") is None else saved["lowest"]
                rule.points = deque((tuple(point) for point in saved["points"]), maxlen=rule.rule.window)


def own_rules(recipe: Mapping[str, Any]) -> list[AlarmRule]:
    """`monitor.alarms` of a recipe as plain values, perhaps of an earlier version's run."""
    rules = (without_removed(dict(recipe)).get("monitor") or {}).get("alarms") or ()
    return [AlarmRule.model_validate(rule) for rule in rules]


REWARD, HELD_OUT = "critic/rewards/mean", "val/reward/mean"
_SMALL = 0.5  # k3 above this is no longer half the variance of rho


def completed(records: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Return ``records`` with what follows from their metrics where none has it.

    The reward is the score, where a log has that alone. The spread of rho is sqrt(2 k3): k3 = E(rho - 1 - log rho) is
    half its variance where both are small.
    """
    rows = [dict(record) for record in records]
    names = {name for row in rows for name in row}
    for row in rows:
        if REWARD not in names and "critic/score/mean" in row:
            row[REWARD] = row["critic/score/mean"]
        k3 = row.get("rollout_corr/k3_kl", math.nan)
        if "mismatch/rho_std" not in names and 0 <= k3 < _SMALL:
            row["mismatch/rho_std"] = math.sqrt(2 * k3)
    return rows


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
    """Return ``runs`` without those whose reward was recorded before: studies share arms."""
    by_curve: dict[str, RecordedRun] = {}
    for run in runs:
        curve = [(record["step"], record.get("critic/rewards/mean")) for record in run.records]
        by_curve.setdefault(repr(curve), run)
    return list(by_curve.values())


@dataclass(frozen=True)
class CollapseRule:
    """When a run counts as collapsed.

    It collapses at the first step from which the smoothed metric has lost, for ``hold`` observations, ``drop`` of its
    range: of the highest smoothed value before over `bottom_of`. Smoothing is the median of ``smoothing`` observations.
    """

    metric: str = REWARD
    drop: float = 0.5
    hold: int = 5
    smoothing: int = 5


def collapse_step(records: Sequence[Mapping[str, float]], rule: CollapseRule) -> int | None:
    """Return the step of the collapse; None if there is none. Values that are not finite count as the worst seen.

    The lab's outcome of the same name (`lab.results`) differs: it uses a running mean, has no ``hold``, skips values
    that are not finite, and gives a run without collapse the step after its last.
    """
    values = [(int(r["step"]), float(r[rule.metric])) for r in records if rule.metric in r]
    finite = [value for _, value in values if math.isfinite(value)]
    if not finite:
        return None
    peak, lowest, low_since, low_count, recent = -math.inf, math.inf, None, 0, []
    moves: deque[float] = deque(maxlen=MOVES)
    for step, value in values:
        value = value if math.isfinite(value) else min(finite)
        lowest = min(lowest, value)
        moves.extend([abs(value - recent[-1])] if recent else ())
        recent = [*recent, value][-rule.smoothing :]
        if len(recent) < rule.smoothing:
            continue
        smoothed = median(recent)
        peak = max(peak, smoothed)
        bottom = bottom_of(lowest, moves)
        if peak > bottom and smoothed - bottom <= (1.0 - rule.drop) * (peak - bottom):
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
    """Replay ``rules`` over a run and return a score per rule. A collapse is that of `first_collapse`.

    A warning within ``horizon`` steps before the collapse is right, one after it does not count, any other is false.
    """
    collapse, alarms = first_collapse(records, rule), Alarms(rules)
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


def learned_by_heart(records: Sequence[Mapping[str, float]]) -> int | None:
    """The step from which two validations are below 0.8 of the best two so far, while the training reward of ten steps
    is at least 0.95 of its best, and that 1.2 of its lowest; None where there is none.
    """
    held_out, trained, best, best_trained, first = [], [], -math.inf, -math.inf, math.inf
    for record in records:
        if math.isfinite(record.get(REWARD, math.nan)):
            trained = [*trained, record[REWARD]][-10:]
        if len(trained) == 10:
            best_trained, first = max(best_trained, sum(trained) / 10), min(first, sum(trained) / 10)
        if math.isfinite(record.get(HELD_OUT, math.nan)):
            held_out = [*held_out, record[HELD_OUT]][-2:]
            level = sum(held_out) / len(held_out)
            best = max(best, level) if len(held_out) == 2 else best
            is_best = len(trained) == 10 and sum(trained) / 10 >= 0.95 * best_trained > 1.2 * max(first, 0.0)
            if level < 0.8 * best and is_best:
                return int(record["step"])
    return None


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
