"""What is known of a study before it is run: its cost, the effects that it can see.

The cost on a cluster is by the arithmetic of `megatron-rl plan`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import integrate, optimize, special, stats

from megatron_rl.config import load_recipe
from megatron_rl.errors import InputError
from megatron_rl.instruments.lab.archive import read_packed
from megatron_rl.instruments.lab.jobs import LoadedStudy
from megatron_rl.instruments.lab.results import NothingFinished, Results, mixed_regression, read_results
from megatron_rl.instruments.lab.study import Outcome, Study, Trend
from megatron_rl.instruments.plan import find_gpu, make_plan, make_workload
from megatron_rl.model.architecture import shape_of
from megatron_rl.process.host import format_table


@dataclass(frozen=True)
class ArmCost:
    """The cost of the runs of one arm."""

    arm: str
    gpus: int
    num_steps: int
    step_seconds: float
    num_seeds: int
    problems: list[str]

    @property
    def run_hours(self) -> float:
        """Hours of one run, without validation and start-up."""
        return self.num_steps * self.step_seconds / 3600

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of all seeds."""
        return self.run_hours * self.gpus * self.num_seeds


def cost(
    loaded: LoadedStudy, gpu: str, nodes: int | None, gpus_per_node: int | None, mean_response: float | None
) -> list[ArmCost]:
    """Return the cost of every arm on ``gpu``, a name or a file.

    The default size is that in the base recipe's name (…-4n8g-…).

    Raises `InputError` if there is no size, or the model is unknown.
    """
    base, study = load_recipe(loaded.base), loaded.study
    architecture, _ = shape_of(base.model.path)
    lines = []
    for job in loaded.jobs(base.run_root, study.seeds[:1]):
        if base.num_steps is None:
            raise InputError("num_epochs: the costs of a study are counted in steps; set num_steps")
        recipe = loaded.recipe(job).model_copy(update={"name": base.name})
        work = make_workload(recipe, architecture, find_gpu(gpu), nodes, gpus_per_node, mean_response)
        plan = make_plan(work)
        lines.append(
            ArmCost(job.arm, work.ranks, recipe.num_steps, plan.time.total, len(study.seeds), list(plan.problems))
        )
    return lines


def render_costs(loaded: LoadedStudy, gpu: str, costs: list[ArmCost]) -> Iterator[str]:
    """Yield the lines of a table, the sum, and the arms that do not fit."""
    yield f"{'arm':20}  GPUs  steps  s/step  hours a run  seeds  GPU-hours"
    for row in costs:
        yield (
            f"{row.arm:20}  {row.gpus:4d}  {row.num_steps:5d}  {row.step_seconds:6.0f}  {row.run_hours:11.1f}  "
            f"{row.num_seeds:5d}  {row.gpu_hours:9,.0f}"
        )
    total = sum(row.gpu_hours for row in costs)
    runs = sum(row.num_seeds for row in costs)
    yield f"{loaded.study.name}: {runs} runs, {total:,.0f} GPU-hours of {gpu}, validation apart"
    for row in costs:
        yield from (f"{row.arm}: {problem}" for problem in row.problems)


# Power of a study before it is run: paired tests and trends.
#
# `smallest_effect` and `seeds_needed` invert the power of a two-sided paired t-test, which is two tails of the
# noncentral t distribution [Cohen 1988, ch. 2].


POWER = 0.8
MOST_SEEDS = 10_000


def power_of_t(noncentrality: float, degrees: int, level: float) -> float:
    """Return the power of a two-sided t-test at ``level``; ``noncentrality``: effect in standard errors.

    scipy's noncentral t is NaN for large effects at few degrees of freedom.
    """
    if degrees < 1:
        return 0.0
    bound, sampled = float(stats.t.ppf(1 - level / 2, degrees)), stats.chi(degrees, scale=degrees**-0.5)

    def rejects(deviation: float) -> float:
        """For a sampled standard deviation in units of the true one, times the density of it."""
        ends = noncentrality - bound * deviation, -bound * deviation - noncentrality
        return sampled.pdf(deviation) * sum(map(special.ndtr, ends))

    around, most = noncentrality / bound, float(sampled.isf(1e-14))
    points = sorted({min(max(point, 0.0), most) for point in (around, 0.9 * around, 1.1 * around, 1.0)} - {0.0, most})
    return min(1.0, float(integrate.quad(rejects, 0.0, most, points=points, limit=400, epsabs=1e-12)[0]))


def power_of_pairs(d: float, num_seeds: int, level: float) -> float:
    """Return the power of a paired test for a true difference of ``d`` standard deviations of the differences."""
    return power_of_t(d * math.sqrt(num_seeds), num_seeds - 1, level)


def smallest_effect(num_seeds: int, level: float) -> float:
    """Return the smallest d that a paired test detects with `POWER`; infinite with one seed."""
    return _smallest_noncentrality(num_seeds - 1, level) / math.sqrt(num_seeds)


def _smallest_noncentrality(degrees: int, level: float) -> float:
    if degrees < 1:
        return math.inf
    bound = float(stats.t.ppf(1 - level / 2, degrees))
    # At twice the bound plus a few, the power is sufficient even at one degree of freedom.
    high = 2 * bound + 10
    return float(optimize.brentq(lambda at: power_of_t(at, degrees, level) - POWER, 0.0, high))


def seeds_needed(d: float, level: float) -> int | None:
    """Return the fewest seeds with which a paired test detects ``d`` with `POWER`; None above `MOST_SEEDS`."""
    low, high = 1, 2
    while power_of_pairs(d, high, level) < POWER:
        low, high = high, 2 * high
        if low > MOST_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power_of_pairs(d, middle, level) >= POWER else (middle, high)
    return high


def smallest_slope(doses: Sequence[float], num_seeds: int, level: float) -> float:
    """Return the smallest slope detected with `POWER`, in residual standard deviations; one run per dose and seed.

    The slope's standard error is 1/√(seeds · Σ(dose − mean)²), with runs − seeds − 1 degrees of freedom.
    """
    spread = float(((np.asarray(doses, dtype=float) - np.mean(doses)) ** 2).sum()) * num_seeds
    degrees = num_seeds * len(doses) - num_seeds - 1
    if spread == 0 or degrees < 1:
        return math.inf
    return _smallest_noncentrality(degrees, level) / math.sqrt(spread)


@dataclass(frozen=True)
class Foresight:
    """The effect that a primary or trend can detect with the study's seeds, at the level of Holm's first step."""

    name: str
    outcome: str
    spread: float | None  # standard deviation of paired differences or residuals; None: unknown
    known_from: str
    smallest: float | None  # effect detected with 80%, in units of the outcome (a factor for a ratio)
    margin: float | None
    seeds_for_margin: int | None  # seeds to detect an effect as large as the margin with 80%


def foresee(loaded: LoadedStudy, root: Path) -> list[Foresight]:
    """Return the foresight from the runs of ``root`` (a folder, or a file of `lab pack`), if any, else from the spreads
    in the study file."""
    study = loaded.study
    results = None
    with contextlib.suppress(NothingFinished):
        results = read_packed(loaded, root) if root.is_file() else read_results(loaded, root)
    primaries = study.decisive()
    level = study.level / (len(primaries) + len(study.trends))  # the level for the smallest p-value
    forecasts = (
        [] if study.gate is None else [_of_pairs(study, study.gate.arm, study.gate.outcome, study.level, results)]
    )
    forecasts += [_of_pairs(study, p.arm, p.outcome, level, results) for p in primaries]
    return forecasts + [_of_trend(study, name, trend, level, results) for name, trend in study.trends.items()]


def _of_pairs(study: Study, arm: str, name: str, level: float, results: Results | None) -> Foresight:
    how, n = study.outcomes[name], len(study.seeds)
    spread, source = how.spread, "the study file"
    measured = _measured_spread(results, arm, name, how) if results else None
    if measured is not None:
        spread, source = measured
    if spread is None:
        return Foresight(arm, name, None, "nothing", None, how.margin, None)
    least = smallest_effect(n, level) * spread
    seeds = None
    if how.margin is not None:
        seeds = seeds_needed((math.log(how.margin) if how.ratio else how.margin) / spread, level)
    return Foresight(arm, name, spread, source, math.exp(least) if how.ratio else least, how.margin, seeds)


def _measured_spread(results: Results, arm: str, name: str, how: Outcome) -> tuple[float, str] | None:
    """Return the standard deviation of paired differences of finished runs; None for fewer than three or no spread."""
    control = results.study.study.arms[arm].control
    one, other = results.outcomes[arm][name], results.outcomes[str(control)][name]
    pairs = [(one[seed], other[seed]) for seed in sorted(one.keys() & other.keys())]
    if len(pairs) < 3 or (how.ratio and min(map(min, pairs)) <= 0):
        return None
    deviation = float(np.std([math.log(a / b) if how.ratio else a - b for a, b in pairs], ddof=1))
    return (deviation, f"{len(pairs)} seeds") if deviation > 0 else None


def _of_trend(study: Study, name: str, trend: Trend, level: float, results: Results | None) -> Foresight:
    doses, spread, source = trend.doses, trend.spread, "the study file"
    if results is not None:
        by_arm = [results.outcomes[arm][trend.dose] for arm in trend.arms]
        runs = results.trend_runs(trend)
        fit = mixed_regression(*zip(*runs, strict=True)) if runs else None
        if fit is not None and fit.residual_variance > 0 and all(by_arm):
            doses = [float(np.mean(list(values.values()))) for values in by_arm]
            spread, source = math.sqrt(fit.residual_variance), f"{len(runs)} runs"
    if spread is None or not doses:
        return Foresight(name, trend.outcome, None, "nothing", None, trend.margin, None)
    smallest = smallest_slope(doses, len(study.seeds), level) * spread
    return Foresight(name, trend.outcome, spread, source, smallest, trend.margin, None)


def render_foresight(study: Study, rows: list[Foresight]) -> Iterator[str]:
    """Yield the lines of a table and an explanation of its columns."""
    number = len(study.decisive()) + len(study.trends)
    yield (
        f"{study.name}: {len(study.seeds)} seeds, {number} primaries and trends, level {study.level:g} "
        f"({study.level / number:.2g} for the smallest p-value, Holm)"
    )
    cells = []
    for row in rows:
        numbers = [_short(row.spread), row.known_from, _short(row.smallest), _short(row.margin)]
        seeds = "–" if row.seeds_for_margin is None else str(row.seeds_for_margin)
        cells.append([row.name, row.outcome, *numbers, seeds])
    yield format_table(
        ["decides", "outcome", "spread", "known from", f"seen with {POWER:.0%}", "margin", "seeds"], cells
    )
    yield "spread: standard deviation of the paired differences over seeds; of a ratio, of its logarithm."
    yield "seeds: how many see an effect as large as the margin with the same power."


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
