"""A study's report: its figure and tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from megatron_rl.instruments.lab.jobs import LoadedStudy
from megatron_rl.instruments.lab.results import Effect, Results, read_results, unseen_told
from megatron_rl.instruments.lab.study import DEFAULT_METRICS, Study
from megatron_rl.monitor.plots import PANELS, Curves, Panel, draw_panel, group_handles, legend_below

# A study's figure: a block per `figure` entry, a panel per metric, means over seeds with bands from lowest to highest.


DPI = 75
WIDTH, HEIGHT = 3.5, 2.7  # inches of a panel
MOST_COLUMNS = 3


def draw_study(results: Results) -> Figure:
    """Return the study's figure: per `figure` entry a block of panels, under its title. Arms without a finished run are
    left out."""
    study = results.study.study
    metrics = study.panels or DEFAULT_METRICS
    columns = min(MOST_COLUMNS, len(metrics))
    rows = math.ceil(len(metrics) / columns)  # of a block
    size = (WIDTH * columns, HEIGHT * rows * len(study.figure) + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    counts = {len(by_seed) for by_seed in results.records.values() if by_seed}
    seeds = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    figure.suptitle(f"{study.title}: mean of {seeds} seeds, band from lowest to highest", fontsize=11)
    for block, entry in enumerate(study.figure):
        groups = [
            Curves(study.arms[arm].label or arm, list(results.records[arm].values()))
            for arm in entry.arms
            if results.records[arm]
        ]
        for number, metric in enumerate(metrics):
            axes = figure.add_subplot(rows * len(study.figure), columns, block * rows * columns + number + 1)
            draw_panel(axes, _panel(metric), groups, is_smoothed=True)
            if number == 0:
                axes.annotate(
                    entry.title, (0, 1), (0, 20), "axes fraction", textcoords="offset points", fontweight="bold"
                )
            if number == (rows - 1) * columns:  # below the block
                legend_below(axes, group_handles(groups), columns=2)
    return figure


def _panel(metric: str) -> Panel:
    known = next((panel for panel in PANELS if panel.metrics[0] == metric), Panel(metric, (metric,)))
    return Panel(known.title, (metric,), known.is_log)


def write_report(loaded: LoadedStudy, root: Path) -> list[Path]:
    """Write ``root/report/{figure.png,report.md,outcomes.json}``. Raises `InputError` if no run is finished."""
    results = read_results(loaded, root)
    folder = root / "report"
    folder.mkdir(parents=True, exist_ok=True)
    figure, text, values = folder / "figure.png", folder / "report.md", folder / "outcomes.json"
    draw_study(results).savefig(figure, dpi=DPI)
    heading = f"# {loaded.study.title}\n\nSource: {loaded.study.source}.\n\n![curves](figure.png)\n\n"
    text.write_text(heading + render(results), encoding="utf-8")
    values.write_text(results.as_json())
    return [figure, text, values]


def render(results: Results) -> str:
    """Return the report's text: runs, verdicts, all values, and their caveat."""
    study = results.study.study
    parts = (runs_told, _decisions_table, _values_table, _caveat)
    head = f"Claim: {study.claim}\n\nSetting: {study.setting}\n\n"
    return head + "\n".join(line for part in parts for line in [*part(results), ""])


def runs_told(results: Results) -> Iterator[str]:
    """Yield arms, seeds, steps and cores, then whatever sets some runs apart: their code, their end, their origin."""
    study = results.study.study
    hardware = results.environment.get("hardware", {})
    cores = f", {hardware['cores']} CPU cores" if "cores" in hardware else ""
    seeds = _ranges(sorted({seed for by_seed in results.records.values() for seed in by_seed}))
    yield f"{len(study.arms)} arms, seeds {seeds}, {results.num_steps} steps each{cores}."
    for name, arm in study.arms.items():
        for key, yoke in arm.yoked.items():
            yield f"{name}: {key} is, in each seed, the {yoke.outcome} of {yoke.arm}."
    if results.registration is not None:
        yield from results.registration.history(study)
    if len(results.code) > 1:
        runs = ", ".join(f"{count} of {version}" for version, count in results.code.items())
        yield f"**Runs of more than one code: {runs}.**"
    if results.ended:
        yield f"Ended by an alarm or limit: {', '.join(results.ended)}."
    if results.reused:
        arms = Counter(name.rpartition("-seed")[0] for name in results.reused)
        runs = ", ".join(f"{number} of {arm}" for arm, number in arms.items())
        yield f"Runs of another study with the same recipe: {runs}."
    if results.unfinished:
        if results.gate_passed is False:
            yield f"The gate failed, so that {len(results.unfinished)} runs of the other arms were not made."
        else:
            yield f"Not finished and not counted: {', '.join(results.unfinished)}."


def _ranges(numbers: Sequence[int]) -> str:
    """Return "0 to 9" for consecutive numbers, else all of them."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))


def _values_table(results: Results) -> Iterator[str]:
    names = list(results.study.study.outcomes)
    yield "| arm (mean ± standard deviation over seeds) | " + " | ".join(names) + " | n |"
    yield "|---|" + "---|" * (len(names) + 1)
    for arm, outcomes in results.outcomes.items():
        cells = [_mean_and_deviation(list(outcomes[name].values())) for name in names]
        yield f"| {arm} | " + " | ".join(cells) + f" | {len(results.records[arm])} |"


def _mean_and_deviation(values: list[float]) -> str:
    if not values:
        return "–"
    spread = f" ± {np.std(values, ddof=1):.2g}" if len(values) > 1 else ""
    return f"{np.mean(values):.3g}{spread}"


def _decisions_table(results: Results) -> Iterator[str]:
    """Yield the table of verdicts on primaries and trends, with Holm's correction over all of them."""
    study = results.study.study
    yield (
        "| decides | against | outcome | difference, ratio (×) or slope | 95% interval | d | predicted | p (Holm) | "
        "verdict |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for decision in results.decisions():
        cells = " | ".join(("–", "–", "–") if decision.effect is None else effect_cells(decision.effect))
        yield (
            f"| {decision.name} | {decision.against} | {decision.outcome} | {cells} | {decision.expected} | "
            f"{decision.p_holm:.2g} | {decision.verdict} |"
        )
    yield from margins_told(study, study.outcomes)


def margins_told(study: Study, outcomes: Iterable[str]) -> Iterator[str]:
    margins = [f"{name} {margin:g}" for name in outcomes if (margin := study.outcomes[name].margin) is not None]
    margins += [f"{name} {trend.margin:g}" for name, trend in study.trends.items() if trend.margin is not None]
    if margins:
        yield f"\nMargin: {', '.join(margins)}."


def effect_cells(effect: Effect) -> tuple[str, str, str]:
    """Return the cells for difference, ratio or slope, its 95% interval, and Cohen's d."""
    sign = "×" if effect.neutral else ""
    number = "{:.3g}".format if effect.neutral else "{:+.3g}".format
    low, high = effect.alike_lower, effect.alike_upper
    bounds = f"{number(low)} to {number(high)}" if math.isfinite(high) else "–"
    return f"{sign}{number(effect.mean)}", bounds, "–" if math.isnan(effect.d) else f"{effect.d:+.1f}"


def _caveat(results: Results) -> Iterator[str]:
    decisions, study = results.decisions(), results.study.study
    if all(decision.effect is None for decision in decisions):
        return
    number, where = len(study.decisive()) + len(study.trends), "" if study.gate is None else " behind the gate"
    yield (
        f"Among {number} primaries and trends{where}, one or more false findings have a probability of at most "
        f"{study.level:g} (Holm). `megatron-rl lab power` says what effect such a study can see."
    )
    yield from unseen_told(min(decision.effect.num_seeds for decision in decisions if decision.effect))
