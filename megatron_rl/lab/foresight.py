"""What is known of studies before they are run: what each primary and trend can see, how many runs they share."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_rl.config import Recipe
from megatron_rl.lab.jobs import LoadedStudy, differing_keys
from megatron_rl.lab.power import POWER, power_of_equivalence, seeds_needed, smallest_effect, smallest_slope
from megatron_rl.lab.results import NothingFinished, Results, read_results
from megatron_rl.lab.statistics import mixed_regression
from megatron_rl.lab.study import Outcome, Study, Trend


@dataclass(frozen=True)
class Foresight:
    """What one primary or trend can see with the study's seeds, at the level of Holm's first step."""

    name: str
    outcome: str
    spread: float | None  # of the paired differences, or of a regression's residuals; None: not known
    known_from: str
    smallest: float | None  # effect seen with 80%, in units of the outcome (of a ratio, a factor)
    margin: float | None
    power_of_same: float | None  # probability that equivalence is shown where there is no difference
    seeds_for_margin: int | None  # seeds that see an effect as large as the margin with 80%


def num_distinct_runs(studies: Sequence[LoadedStudy]) -> int:
    """Runs that several studies take where those of the same recipe and seed are made once (`lab run --reuse`)."""
    found: list[tuple[Recipe, set[int]]] = []  # recipe of the arms that share it → seeds
    for loaded in studies:
        for job in loaded.jobs(Path("runs"), seeds=loaded.study.seeds[:1]):
            recipe = loaded.recipe(job)
            same = next((seeds for other, seeds in found if not differing_keys(other, recipe)), None)
            if same is None or job.waits_for:  # a yoked run has a recipe of its own in every seed
                found.append((recipe, set(loaded.study.seeds)))
            else:
                same.update(loaded.study.seeds)
    return sum(len(seeds) for _, seeds in found)


def foresee(loaded: LoadedStudy, root: Path) -> list[Foresight]:
    """By the runs below ``root`` where there are some, else by the spreads that the study file has."""
    study = loaded.study
    results = None
    with contextlib.suppress(NothingFinished):
        results = read_results(loaded, root)
    primaries = study.decisive()
    level = study.level / (len(primaries) + len(study.trends))  # what the smallest p-value has to pass
    found = [] if study.gate is None else [_of_pairs(study, study.gate.arm, study.gate.outcome, study.level, results)]
    found += [_of_pairs(study, p.arm, p.outcome, level, results) for p in primaries]
    return found + [_of_trend(study, name, trend, level, results) for name, trend in study.trends.items()]


def _of_pairs(study: Study, arm: str, name: str, level: float, results: Results | None) -> Foresight:
    how, n = study.outcomes[name], len(study.seeds)
    spread, source = how.spread, "the study file"
    measured = _measured_spread(results, arm, name, how) if results else None
    if measured is not None:
        spread, source = measured
    if spread is None:
        return Foresight(arm, name, None, "nothing", None, how.margin, None, None)
    least = smallest_effect(n, level) * spread
    same = seeds = None
    if how.margin is not None:
        margin = (math.log(how.margin) if how.ratio else how.margin) / spread
        same, seeds = power_of_equivalence(margin, n, level), seeds_needed(margin, level)
    return Foresight(arm, name, spread, source, math.exp(least) if how.ratio else least, how.margin, same, seeds)


def _measured_spread(results: Results, arm: str, name: str, how: Outcome) -> tuple[float, str] | None:
    """Standard deviation of the paired differences of finished runs; None with fewer than three, or without spread."""
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
        return Foresight(name, trend.outcome, None, "nothing", None, trend.margin, None, None)
    smallest = smallest_slope(doses, len(study.seeds), level) * spread
    return Foresight(name, trend.outcome, spread, source, smallest, trend.margin, None, None)


def render(study: Study, rows: list[Foresight]) -> Iterator[str]:
    """A table for a terminal, and what its columns mean."""
    number = len(study.decisive()) + len(study.trends)
    yield (
        f"{study.name}: {len(study.seeds)} seeds, {number} primaries and trends, level {study.level:g} "
        f"({study.level / number:.2g} for the smallest p-value, Holm)"
    )
    cells = [["decides", "outcome", "spread", "known from", f"seen with {POWER:.0%}", "margin", "same shown", "seeds"]]
    for row in rows:
        numbers = [_short(row.spread), row.known_from, _short(row.smallest), _short(row.margin)]
        same = "–" if row.power_of_same is None else f"{row.power_of_same:.0%}"
        cells.append(
            [row.name, row.outcome, *numbers, same, "–" if row.seeds_for_margin is None else str(row.seeds_for_margin)]
        )
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    for line in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
    yield "spread: standard deviation of the paired differences over seeds; of a ratio, of its logarithm."
    yield "same shown: probability that two one-sided tests show equivalence where there is no difference."
    yield "seeds: how many see an effect as large as the margin with the same power."


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
