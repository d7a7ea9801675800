"""Results of a study: outcomes by arm and seed, and their effects."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.instruments.lab.jobs import FINISHED, Job, LoadedStudy, collapse_of, outcome_of
from megatron_rl.instruments.lab.runner import REUSED, Registration, StudyRunner, read_registration
from megatron_rl.instruments.lab.statistics import (
    Effect,
    Verdict,
    holm,
    paired_effect,
    restricted_mean_values,
    trend_effect,
)
from megatron_rl.instruments.lab.study import Direction, Outcome, Primary, Trend
from megatron_rl.monitor.run_directory import CONTINUED_BY, UNKNOWN_CODE, RunDirectory, code_of, read_metrics

Records = list[dict[str, float]]
Values = dict[int, float]  # seed → value
_Row = tuple[str, str, str, Direction, Effect | None]  # the first fields of a `Decision`


class NothingFinished(InputError):
    """The study has no finished run."""


@dataclass(frozen=True)
class Decision:
    """A primary or trend with its verdict, corrected for the whole family."""

    name: str
    outcome: str
    against: str  # the control, or the dose
    expected: Direction
    effect: Effect | None  # None: nothing to compare yet
    p: float  # 1 without an effect
    p_holm: float
    verdict: Verdict


@dataclass
class Results:
    """Finished runs of a study. ``outcomes``: arm → outcome → seed → value, without undefined ones."""

    study: LoadedStudy
    records: dict[str, dict[int, Records]]  # arm → seed → metrics.jsonl
    outcomes: dict[str, dict[str, Values]]
    num_steps: int
    environment: dict[str, Any]  # environment of the first run
    ended: list[str] = field(default_factory=list)  # runs that an alarm or limit ended
    unfinished: list[str] = field(default_factory=list)
    reused: list[str] = field(default_factory=list)  # runs copied from another study with the same recipe
    registration: Registration | None = None
    code: dict[str, int] = field(default_factory=dict)  # commit → number of runs

    @property
    def complete(self) -> bool:
        """Whether all runs are finished, except those that a failed gate rules out."""
        return not self.unfinished or self.gate_passed is False

    def effect(self, arm: str, outcome: str) -> Effect | None:
        """Return the effect of ``arm`` against its control; None for a control, or without seeds or values."""
        control = self.study.study.arms[arm].control
        if control is None:
            return None
        how = self.study.study.outcomes[outcome]
        return paired_effect(self.outcomes[arm][outcome], self.outcomes[control][outcome], how.ratio, how.margin)

    def trend_runs(self, trend: Trend) -> list[tuple[int, float, float]]:
        """Return (seed, dose, outcome) of all finished runs of the trend's arms; logarithms for ratios."""
        how = self.study.study.outcomes[trend.outcome]
        runs = [
            (seed, self.outcomes[arm][trend.dose][seed], _linear(value, how))
            for arm in trend.arms
            for seed, value in self.outcomes[arm][trend.outcome].items()
            if seed in self.outcomes[arm][trend.dose]
        ]
        return [run for run in runs if math.isfinite(run[2])]

    def trend(self, trend: Trend) -> Effect | None:
        """Return the slope of the outcome over the dose in all finished runs of the trend's arms."""
        runs = self.trend_runs(trend)
        return trend_effect(*zip(*runs, strict=True), margin=trend.margin) if runs else None

    def decisions(self) -> list[Decision]:
        """Return the decisions on the gate, then on every primary and trend.

        The study file fixes the family of tests, so those without runs stay in it with p = 1.
        """
        study = self.study.study
        gate = self._gate()
        rows = [self._compared(primary) for primary in study.decisive()]
        rows += [(name, t.outcome, t.dose, t.expect, self.trend(t)) for name, t in study.trends.items()]
        judged = self._judged(rows)
        if any(decision.verdict != "as predicted" for decision in gate):
            judged = [replace(decision, verdict="not testable") for decision in judged]
        return gate + judged

    def _gate(self) -> list[Decision]:
        gate = self.study.study.gate
        return [] if gate is None else self._judged([self._compared(gate)])

    @property
    def gate_passed(self) -> bool | None:
        """Return whether the gate came out as predicted; None without a gate or before all its runs are finished."""
        study = self.study.study
        if study.gate is None or any(set(study.seeds) - self.records[arm].keys() for arm in study.gate_arms):
            return None
        return self._gate()[0].verdict == "as predicted"

    def _compared(self, primary: Primary) -> _Row:
        arm = self.study.study.arms[primary.arm]
        effect = self.effect(primary.arm, primary.outcome)
        return primary.arm, primary.outcome, str(arm.control), arm.expect[primary.outcome], effect

    def _judged(self, rows: list[_Row]) -> list[Decision]:
        """Return the verdicts of a family of tests."""
        p_values = [1.0 if effect is None else effect.p_of(expected) for *_, expected, effect in rows]
        judged = []
        for (*names, expected, effect), p, adjusted in zip(rows, p_values, holm(p_values), strict=True):
            level = self.study.study.level
            verdict: Verdict = effect.verdict(expected, level, adjusted, len(rows)) if effect else "undecided"
            judged.append(Decision(*names, expected, effect, p, adjusted, verdict))
        return judged

    def as_json(self) -> str:
        """Return JSON: the hash of the fixed parts, the code, then the outcomes of every run, an arm per line."""
        rows = [f"  {json.dumps(arm)}: {json.dumps(_rounded(values))}" for arm, values in self.outcomes.items()]
        fixed = None if self.registration is None else self.registration.sha256
        head = f'  "study": {json.dumps({"sha256": fixed, "code": self.code})},\n  "arms": {{\n'
        return "{\n" + head + ",\n".join("  " + row for row in rows) + "\n  }\n}\n"


def _linear(value: float, outcome: Outcome) -> float:
    if not outcome.ratio:
        return value
    return math.log(value) if value > 0 else math.nan


def _rounded(outcomes: dict[str, Values]) -> dict[str, Values]:
    return {
        name: {seed: float(f"{value:.6g}") for seed, value in by_seed.items()} for name, by_seed in outcomes.items()
    }


def read_results(loaded: LoadedStudy, root: Path) -> Results:
    """Read and return the finished runs below ``root``; runs with other recipes than the study's are refused.

    Raises `NothingFinished`, an `InputError`.
    """
    runner, jobs = StudyRunner(loaded, root, num_parallel=1), loaded.jobs(root)
    runner.refuse_other_recipes(jobs)
    records: dict[str, dict[int, Records]] = {arm: {} for arm in loaded.study.arms}
    ended, unfinished, reused, code, first = [], [], [], {}, None
    for job in jobs:
        state = runner.state(job)
        if state not in FINISHED:
            unfinished.append(job.name)
            continue
        if state == "ended":
            ended.append(job.name)
        directory = RunDirectory(root / job.name)
        if (directory.root / REUSED).is_file():
            reused.append(job.name)
        environment = json.loads(directory.environment.read_text()) if directory.environment.is_file() else {}
        first = environment if first is None else first
        version = _version(environment)
        code[version] = code.get(version, 0) + 1
        records[job.arm][job.seed] = read_metrics(directory.metrics)
    if first is None:
        raise NothingFinished(
            f"{root}: no finished run of study {loaded.study.name}; start it with `megatron-rl lab run`"
        )
    num_steps = loaded.recipe(jobs[0]).num_steps
    outcomes = {
        arm: {name: values_of(by_seed, how, num_steps) for name, how in loaded.study.outcomes.items()}
        for arm, by_seed in records.items()
    }
    registration = read_registration(root)
    return Results(loaded, records, outcomes, num_steps, first, ended, unfinished, reused, registration, code)


def _version(environment: dict[str, Any]) -> str:
    """Return short names of the commits of a run."""
    names = (code_of(environment) or UNKNOWN_CODE).split(CONTINUED_BY)
    parts = (name.partition("+") for name in names)
    return CONTINUED_BY.join(commit[:12] + plus + changes for commit, plus, changes in parts)


def values_of(by_seed: dict[int, Records], outcome: Outcome, num_steps: int) -> Values:
    """Return an arm's outcomes by seed. Collapse steps become shares of the restricted mean up to ``num_steps``."""
    if outcome.statistic != "collapse_step":
        by_seed_value = {seed: outcome_of(records, outcome) for seed, records in by_seed.items()}
        return {seed: value for seed, value in by_seed_value.items() if value is not None}
    seen = {seed: collapse_of(records, outcome) for seed, records in by_seed.items()}
    complete = {seed: pair for seed, pair in seen.items() if pair is not None}
    if not complete:
        return {}
    times, collapsed = zip(*complete.values(), strict=True)
    return dict(zip(complete, restricted_mean_values(times, collapsed, float(num_steps)), strict=True))


# The runs of a study that can start now.
#
# A gate's two arms run before the others, which are skipped if it fails. A yoked run starts after the run whose
# outcomes are its values.


@dataclass(frozen=True)
class Stage:
    """A set of runs, split by what can be done now."""

    jobs: list[Job]
    waiting: list[Job] = field(default_factory=list)  # they wait for runs that they depend on
    ruled_out: list[Job] = field(default_factory=list)  # skipped, because a failed gate makes them untestable


def stage(
    loaded: LoadedStudy,
    root: Path,
    seeds: Sequence[int] | None = None,
    arms: Sequence[str] | None = None,
) -> Stage:
    """Split the runs of ``seeds`` and ``arms`` (None: all) by the finished runs below ``root``.

    The gate is judged once, when all of its seeds are finished. Explicit ``arms`` run without regard to the gate.
    """
    jobs = loaded.jobs(root, seeds, arms)
    staged = Stage(jobs) if arms else _by_the_gate(loaded, root, jobs)
    ready, unready = ([job for job in staged.jobs if bool(job.waits_for) == waits] for waits in (False, True))
    return Stage(ready, staged.waiting + unready, staged.ruled_out)


def _by_the_gate(loaded: LoadedStudy, root: Path, jobs: list[Job]) -> Stage:
    arms = loaded.study.gate_arms
    if not arms:
        return Stage(jobs)
    gate_jobs = [job for job in jobs if job.arm in arms]
    other_jobs = [job for job in jobs if job.arm not in arms]
    passed = None
    with contextlib.suppress(NothingFinished):
        passed = read_results(loaded, root).gate_passed
    if passed is None:
        return Stage(gate_jobs, waiting=other_jobs)
    return Stage(jobs) if passed else Stage(gate_jobs, ruled_out=other_jobs)
