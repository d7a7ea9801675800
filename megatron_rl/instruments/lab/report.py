"""A study's report, figure and tables, and those of docs/lab from the runs in the repository."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from megatron_rl.errors import InputError
from megatron_rl.instruments.lab.archive import read_packed
from megatron_rl.instruments.lab.jobs import LoadedStudy
from megatron_rl.instruments.lab.results import Effect, Results, read_results
from megatron_rl.instruments.lab.study import DEFAULT_METRICS
from megatron_rl.monitor.plots import PANELS, Curves, Panel, draw_panel, group_handles, legend_below

# A study's figure: a block per `figure` entry, a panel per metric, means over seeds with bands from lowest to highest.


SMOOTHING = 5  # steps of the running mean; a batch of 64 responses is noisy
DPI, COLOURS = 75, 96
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
            Curves(study.arms[arm].label or arm, [smoothed(run, metrics) for run in results.records[arm].values()])
            for arm in entry.arms
            if results.records[arm]
        ]
        for number, metric in enumerate(metrics):
            axes = figure.add_subplot(rows * len(study.figure), columns, block * rows * columns + number + 1)
            draw_panel(axes, _panel(metric), groups)
            if number == 0:
                axes.annotate(
                    entry.title, (0, 1), (0, 20), "axes fraction", textcoords="offset points", fontweight="bold"
                )
            if number == (rows - 1) * columns:  # below the block
                legend_below(axes, group_handles(groups), columns=2)
    return figure


def save_small(figure: Figure, path: Path) -> None:
    """Save the figure as a PNG with few colours, at a third of the size, for the repository."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=DPI)
    with Image.open(drawn) as image:
        image.convert("RGB").quantize(COLOURS).save(path, format="PNG", optimize=True)


def smoothed(records: list[dict[str, float]], metrics: Sequence[str]) -> list[dict[str, float]]:
    """Return ``records`` with each of ``metrics`` averaged over the last `SMOOTHING` steps, fewer at the start.

    Metrics that are recorded rarely, such as validations, are unchanged.
    """
    smooth: list[dict[str, float]] = [{"step": record["step"]} for record in records]
    for metric in metrics:
        recent: list[tuple[float, float]] = []  # step, value
        for record, target in zip(records, smooth, strict=True):
            if metric in record and np.isfinite(record[metric]):
                recent = [seen for seen in recent if seen[0] > record["step"] - SMOOTHING]
                recent.append((record["step"], float(record[metric])))
                target[metric] = float(np.mean([value for _, value in recent]))
    return smooth


def _panel(metric: str) -> Panel:
    for panel in PANELS:
        if panel.metrics[0] == metric:
            return Panel(panel.title, (metric,), panel.is_log)
    return Panel(metric, (metric,))


def write_report(loaded: LoadedStudy, root: Path) -> list[Path]:
    """Write ``root/report/{figure.png,report.md,outcomes.json}``. Raises `InputError` if no run is finished."""
    results = read_results(loaded, root)
    folder = root / "report"
    folder.mkdir(parents=True, exist_ok=True)
    figure, text, values = folder / "figure.png", folder / "report.md", folder / "outcomes.json"
    save_small(draw_study(results), figure)
    heading = f"# {loaded.study.title}\n\nSource: {loaded.study.source}.\n\n![curves](figure.png)\n\n"
    text.write_text(heading + render(results), encoding="utf-8")
    values.write_text(results.as_json())
    return [figure, text, values]


def render(results: Results) -> str:
    """Return the report's text: runs, verdicts, all values, further differences, and their caveat."""
    parts = (_what_was_run, _decisions_table, _values_table, _effects_table, _caveat)
    return "\n".join(line for part in parts for line in [*part(results), ""])


def _what_was_run(results: Results) -> Iterator[str]:
    study = results.study.study
    seeds = sorted({seed for by_seed in results.records.values() for seed in by_seed})
    hardware = results.environment.get("hardware", {})
    cores = f", {hardware['cores']} CPU cores" if "cores" in hardware else ""
    yield f"Claim: {study.claim}\n"
    yield f"Setting: {study.setting}\n"
    yield f"{len(study.arms)} arms, seeds {', '.join(map(str, seeds))}, {results.num_steps} steps each{cores}."
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
        yield f"Taken over from another study's runs of the same recipe: {', '.join(results.reused)}."
    if results.unfinished:
        if results.gate_passed is False:
            yield f"The gate failed, so that {len(results.unfinished)} runs of the other arms were not made."
        else:
            yield f"Not finished and not counted: {', '.join(results.unfinished)}."


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
    margins = [f"{name} {how.margin:g}" for name, how in study.outcomes.items() if how.margin is not None]
    margins += [f"{name} {trend.margin:g}" for name, trend in study.trends.items() if trend.margin is not None]
    if margins:
        yield f"\nLargest difference that counts as none: {', '.join(margins)}."


def _effects_table(results: Results) -> Iterator[str]:
    """Yield the descriptive table: other predictions, and other effects whose interval excludes no effect."""
    study = results.study.study
    gate = [] if study.gate is None else [study.gate]
    decisive = {(primary.arm, primary.outcome) for primary in [*gate, *study.decisive()]}
    rows = []
    for name, arm in study.arms.items():
        for outcome in study.outcomes:
            effect, expected = results.effect(name, outcome), arm.expect.get(outcome)
            if effect is None or (name, outcome) in decisive or (expected is None and not effect.excludes_none):
                continue
            cells = " | ".join(effect_cells(effect))
            rows.append(f"| {name} | {arm.control} | {outcome} | {cells} | {expected or '–'} |")
    if rows:
        yield "The rest is descriptive: no interval is corrected for the number of comparisons.\n"
        yield "| arm | control | outcome | difference or ratio (×) | 95% interval | d | predicted |"
        yield "|---|---|---|---|---|---|---|"
        yield from rows


def effect_cells(effect: Effect) -> tuple[str, str, str]:
    """Return the cells for difference, ratio or slope, its 95% interval, and Cohen's d."""
    sign = "×" if effect.neutral else ""
    number = "{:.3g}".format if effect.neutral else "{:+.3g}".format
    bounds = f"{number(effect.lower)} to {number(effect.upper)}" if math.isfinite(effect.upper) else "–"
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


VERDICTS = "verdicts"  # name of the table and of its page


def write_docs(studies: Sequence[LoadedStudy], docs: Path) -> list[Path]:
    """Write docs/lab/STUDY.md, figure and outcomes of each complete study, and the table of docs/lab/verdicts.md.

    Runs come from docs/lab/runs/STUDY.jsonl.xz. Returns the files. Raises `InputError` if a page or its marks are
    absent.
    """
    studies_results: list[tuple[LoadedStudy, Results | None]] = []
    written = []
    for loaded in studies:
        file = docs / "lab" / "runs" / f"{loaded.study.name}.jsonl.xz"
        results = read_packed(loaded, file) if file.is_file() else None
        studies_results.append((loaded, results))
        if results is not None and results.complete:
            written += write_page(results, docs)
    page = docs / "lab" / f"{VERDICTS}.md"
    fill(page, VERDICTS, "\n" + "\n".join(verdicts(studies_results)) + "\n\n")
    return [*written, page]


def write_page(results: Results, docs: Path) -> list[Path]:
    """Write tables to docs/lab/STUDY.md, the figure to docs/images, and outcomes of every run beside the page."""
    name = results.study.study.name
    page, image, values = (
        docs / "lab" / f"{name}.md",
        docs / "images" / f"lab-{name}.png",
        docs / "lab" / f"{name}.json",
    )
    fill(page, name, f"![curves of the study](../images/{image.name})\n\n" + render(results))
    for folder in (image.parent, values.parent):
        folder.mkdir(exist_ok=True)
    save_small(draw_study(results), image)
    values.write_text(results.as_json())
    return [page, image, values]


def fill(page: Path, name: str, body: str) -> None:
    """Put ``body`` between the two marks of ``name`` in ``page``. Raises `InputError` if they are absent."""
    start, end = f"<!-- lab: {name} -->\n", f"<!-- /lab: {name} -->"
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    if start not in text or end not in text:
        raise InputError(f"{page}: lacks the lines {start.strip()} and {end}; the tables are written between them")
    pattern = re.compile(re.escape(start) + ".*?" + re.escape(end), re.DOTALL)
    page.write_text(pattern.sub(lambda _: start + body + end, text), encoding="utf-8")


def verdicts(studies: Sequence[tuple[LoadedStudy, Results | None]]) -> Iterator[str]:
    """Yield a line per gate, primary and trend; for an incomplete study, only the number of its runs."""
    yield "| study | compared | outcome | predicted | found (95% interval) | verdict |"
    yield "|---|---|---|---|---|---|"
    for loaded, results in studies:
        study = loaded.study
        if results is None or not results.complete:
            finished = 0 if results is None else sum(map(len, results.records.values()))
            runs = f"{finished} of {len(study.arms) * len(study.seeds)} runs"
            yield f"| {study.name} | {runs} | – | – | – | not finished |"
            continue
        for decision in results.decisions():
            against = decision.name if decision.name in study.trends else f"{decision.name} − {decision.against}"
            number, bounds, _ = ("–", "–", "–") if decision.effect is None else effect_cells(decision.effect)
            yield (
                f"| [{study.name}]({study.name}.md) | {against} | {decision.outcome} | {decision.expected} | "
                f"{number} ({bounds}) | {decision.verdict} |"
            )
