"""A study's report: figure, tables and what was measured, into a folder or into the documentation."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron_rl.errors import InputError
from megatron_rl.lab.figure import draw_study, save_small
from megatron_rl.lab.results import Results, read_results
from megatron_rl.lab.statistics import Effect, interval_half_width
from megatron_rl.lab.study import LoadedStudy


def write_report(loaded: LoadedStudy, root: Path) -> list[Path]:
    """``root/report/{figure.png,report.md,outcomes.json}``. Raises `InputError` where nothing is finished."""
    results = read_results(loaded, root)
    folder = root / "report"
    folder.mkdir(parents=True, exist_ok=True)
    figure, text, values = folder / "figure.png", folder / "report.md", folder / "outcomes.json"
    save_small(draw_study(results), figure)
    heading = f"# {loaded.study.title}\n\nSource: {loaded.study.source}.\n\n![curves](figure.png)\n\n"
    text.write_text(heading + render(results), encoding="utf-8")
    values.write_text(results.as_json())
    return [figure, text, values]


def write_docs(loaded: LoadedStudy, root: Path, docs: Path) -> list[Path]:
    """The figure to docs/images, the tables between the two marks of docs/lab/STUDY.md, outcomes beside that page.

    Raises `InputError` where the page or its marks are absent.
    """
    results = read_results(loaded, root)
    name = loaded.study.name
    page, image, values = (
        docs / "lab" / f"{name}.md",
        docs / "images" / f"lab-{name}.png",
        docs / "lab" / f"{name}.json",
    )
    start, end = f"<!-- lab: {name} -->\n", f"<!-- /lab: {name} -->"
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    if start not in text or end not in text:
        raise InputError(f"{page}: the lines {start.strip()} and {end}, between which the tables go, are not there")
    pattern = re.compile(re.escape(start) + ".*?" + re.escape(end), re.DOTALL)
    body = f"![curves of the study](../images/{image.name})\n\n" + render(results)
    page.write_text(pattern.sub(lambda _: start + body + end, text), encoding="utf-8")
    for folder in (image.parent, values.parent):
        folder.mkdir(exist_ok=True)
    save_small(draw_study(results), image)
    values.write_text(results.as_json())
    return [page, image, values]


def render(results: Results) -> str:
    """The report's text: what was run, the tables, and how little the number of seeds allows to say."""
    return "\n".join(
        [*_what_was_run(results), "", *_values_table(results), "", *_effects_table(results), "", *_caveat(results), ""]
    )


def _what_was_run(results: Results) -> Iterator[str]:
    study = results.study.study
    seeds = sorted({seed for by_seed in results.records.values() for seed in by_seed})
    hardware = results.environment.get("hardware", {})
    cores = f", {hardware['cores']} CPU cores" if "cores" in hardware else ""
    yield f"Claim: {study.claim}\n"
    yield f"Setting: {study.setting}\n"
    yield f"{len(study.arms)} arms, seeds {', '.join(map(str, seeds))}, {results.num_steps} steps each{cores}."
    if results.ended:
        yield f"Ended by an alarm or limit: {', '.join(results.ended)}."
    if results.reused:
        yield f"Taken over from another study's runs of the same recipe: {', '.join(results.reused)}."
    if results.unfinished:
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


def _effects_table(results: Results) -> Iterator[str]:
    """Every prediction, and whatever else has an interval that excludes no effect."""
    yield "| arm | control | outcome | difference or ratio (×) | 95% interval | d | predicted | verdict |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, arm in results.study.study.arms.items():
        for outcome in results.study.study.outcomes:
            effect, expected = results.effect(name, outcome), arm.expect.get(outcome)
            if effect is None or (expected is None and not effect.excludes_none):
                continue
            verdict = effect.verdict(expected) if expected else "not predicted"
            yield f"| {name} | {arm.control} | {outcome} | {_effect_cells(effect)} | {expected or '–'} | {verdict} |"


def _effect_cells(effect: Effect) -> str:
    sign = "×" if effect.neutral else ""
    number = "{:.3g}".format if effect.neutral else "{:+.3g}".format
    bounds = f"{number(effect.lower)} to {number(effect.upper)}" if math.isfinite(effect.upper) else "–"
    return f"{sign}{number(effect.mean)} | {bounds} | {'–' if math.isnan(effect.d) else f'{effect.d:+.1f}'}"


def _caveat(results: Results) -> Iterator[str]:
    study = results.study.study
    effects = [results.effect(arm, outcome) for arm in study.arms for outcome in study.outcomes]
    effects = [effect for effect in effects if effect is not None]
    if not effects:
        return
    num_seeds = min(effect.num_seeds for effect in effects)
    found = sum(effect.excludes_none for effect in effects)
    if num_seeds > 1:
        yield (
            f"With {num_seeds} seeds an interval excludes no effect only where the mean difference is above "
            f"{interval_half_width(num_seeds):.2f} standard deviations of the differences: "
            f"undecided is what most true effects look like."
        )
    yield (
        f"{found} of {len(effects)} comparisons exclude no effect; about {0.05 * len(effects):.0f} would by chance, "
        "and nothing is corrected for that."
    )
