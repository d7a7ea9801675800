"""Results of a study: outcomes by arm and seed, their effects, and the statistics that compare arms with controls.

Paired differences, equivalence, trends over a dose, censored times, Holm's correction.

All tests are two-sided at the study's level; distributions are scipy's.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy import optimize, stats

from megatron_rl.errors import InputError
from megatron_rl.instruments.lab.jobs import FINISHED, Job, LoadedStudy, collapse_of, outcome_of
from megatron_rl.instruments.lab.runner import REUSED, Registration, StudyRunner, read_registration
from megatron_rl.instruments.lab.study import Direction, Outcome, Primary, Trend
from megatron_rl.monitor.run_directory import CONTINUED_BY, UNKNOWN_CODE, RunDirectory, code_of, read_metrics

LEAST_SEEDS = 3  # two differences that happen to be alike would decide anything
ALIKE = 1e-9  # of the largest difference: rounding of numbers that are the same
RARE = 0.1  # an interval is told where seeds of a rarer kind alone may be missing: from 29 seeds on

Verdict = Literal["as predicted", "contrary", "no effect", "undecided", "not contradicted", "not testable"]
"""no effect: a difference was predicted, but one as large as the margin is excluded. not testable: the study's gate did
not come out as predicted."""


@dataclass(frozen=True)
class Effect:
    """Arm minus control over common seeds (arm over control for a ratio outcome), or a slope over a dose.

    ``alike_lower`` and ``alike_upper`` bound the mean difference with 95% where seeds are alike (Student's t of the
    paired differences). ``d`` is Cohen's d: their mean over their standard deviation (before exponentiation for a
    ratio). ``p`` tests for no difference, ``p_same`` for a difference as large as the margin (two one-sided tests); NaN
    without a margin. Equal differences other than 0 have no spread to judge by: both are then 1.
    """

    num_seeds: int
    mean: float
    alike_lower: float
    alike_upper: float
    d: float
    neutral: float  # the value of no effect: 0, or 1 for a ratio
    p: float = 1.0
    p_same: float = math.nan
    beyond_margin: bool = True  # the mean difference is larger than the margin, or no margin is set

    @property
    def lower(self) -> float:
        """The lower end also where an arm collapses in some seeds: without one where so few may not have shown it."""
        return self.alike_lower if unseen_share(self.num_seeds) < RARE else 0.0 if self.neutral else -math.inf

    @property
    def upper(self) -> float:
        """The upper end; see ``lower``."""
        return self.alike_upper if unseen_share(self.num_seeds) < RARE else math.inf

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
        can only be contradicted. Fewer than `LEAST_SEEDS` decide nothing.
        """
        if self.num_seeds < LEAST_SEEDS:
            return self._open_same if expected == "same" else "undecided"
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
        if deviation <= ALIKE * float(np.abs(differences).max()):
            deviation = 0.0
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
    if error == 0 and mean:
        p, p_same = 1.0, math.nan if within is None else 1.0
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


def unseen_share(num_seeds: int) -> float:
    """Return the largest share of seeds whose kind may be missing among ``num_seeds`` with a chance of 5%."""
    return 1.0 - 0.05 ** (1 / num_seeds)


def unseen_told(num_seeds: int) -> list[str]:
    """Return the line that stands below every table of intervals: what they do not hold for; none from 29 seeds on."""
    share = unseen_share(num_seeds)
    text = (
        f"Intervals take an arm's seeds for alike: a collapse of up to {share:.0%} of them may be unseen, and how much "
    )
    return [f"{text}such an arm differs cannot be told."] if share >= RARE else []


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

    def decisions(self, price: int = 1) -> list[Decision]:
        """Return the decisions on the gate, then on every primary and trend.

        The study file fixes the family of tests, so those without runs stay in it with p = 1. ``price``: what p-values
        are multiplied by beyond the family, before they decide.
        """
        study = self.study.study
        gate = self._gate()
        rows = [self._compared(primary) for primary in study.decisive()]
        rows += [(name, t.outcome, t.dose, t.expect, self.trend(t)) for name, t in study.trends.items()]
        judged = self._judged(rows, price)
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

    def _judged(self, rows: list[_Row], price: int = 1) -> list[Decision]:
        """Return the verdicts of a family of tests; their `p_holm` is not yet multiplied by ``price``."""
        p_values = [1.0 if effect is None else effect.p_of(expected) for *_, expected, effect in rows]
        judged = []
        for (*names, expected, effect), p, adjusted in zip(rows, p_values, holm(p_values), strict=True):
            level = self.study.study.level
            family = price * len(rows)
            verdict: Verdict = effect.verdict(expected, level, price * adjusted, family) if effect else "undecided"
            judged.append(Decision(*names, expected, effect, p, adjusted, verdict))
        return judged

    def as_json(self) -> str:
        """Return JSON: the hash of the fixed parts, the code, then the outcomes of every run, an arm per line."""
        rows = []
        for arm, outcomes in self.outcomes.items():
            rounded = {name: {s: float(f"{v:.6g}") for s, v in values.items()} for name, values in outcomes.items()}
            rows.append(f"  {json.dumps(arm)}: {json.dumps(rounded)}")
        fixed = None if self.registration is None else self.registration.sha256
        head = f'  "study": {json.dumps({"sha256": fixed, "code": self.code})},\n  "arms": {{\n'
        return "{\n" + head + ",\n".join("  " + row for row in rows) + "\n  }\n}\n"


def _linear(value: float, outcome: Outcome) -> float:
    if not outcome.ratio:
        return value
    return math.log(value) if value > 0 else math.nan


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
    gate_arms = () if arms else loaded.study.gate_arms
    others, waiting, ruled_out = [job for job in jobs if job.arm not in gate_arms], [], []
    passed: bool | None = True
    if gate_arms:
        passed = None
        with contextlib.suppress(NothingFinished):
            passed = read_results(loaded, root).gate_passed
    if not passed:
        jobs = [job for job in jobs if job.arm in gate_arms]
        waiting, ruled_out = (others, []) if passed is None else ([], others)
    ready, unready = ([job for job in jobs if bool(job.waits_for) == waits] for waits in (False, True))
    return Stage(ready, waiting + unready, ruled_out)
