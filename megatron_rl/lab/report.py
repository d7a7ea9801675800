"""A study's report: figure, tables and what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron_rl.lab.figure import draw_study, save_small
from megatron_rl.lab.jobs import LoadedStudy
from megatron_rl.lab.results import Results, read_results
from megatron_rl.lab.statistics import Effect


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


def render(results: Results) -> str:
    """The report's text: what was run, what was decided, all values, what else differs, and how little that says."""
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
        yield from results.registration.said(study)
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
    """The verdicts: primaries and trends, corrected by Holm for all of them."""
    study = results.study.study
    yield (
        "| decides | against | outcome | difference, ratio (×) or slope | 95% interval | d | predicted | p (Holm) | "
        "verdict |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for found in results.decisions():
        cells = " | ".join(("–", "–", "–") if found.effect is None else effect_cells(found.effect))
        yield (
            f"| {found.name} | {found.against} | {found.outcome} | {cells} | {found.expected} | {found.p_holm:.2g} | "
            f"{found.verdict} |"
        )
    margins = [f"{name} {how.margin:g}" for name, how in study.outcomes.items() if how.margin is not None]
    margins += [f"{name} {trend.margin:g}" for name, trend in study.trends.items() if trend.margin is not None]
    if margins:
        yield f"\nLargest difference that counts as none: {', '.join(margins)}."


def _effects_table(results: Results) -> Iterator[str]:
    """What describes: other predictions, and whatever else has an interval that excludes no effect."""
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
        yield "What follows describes and decides nothing; no interval is corrected for the number of comparisons.\n"
        yield "| arm | control | outcome | difference or ratio (×) | 95% interval | d | predicted |"
        yield "|---|---|---|---|---|---|---|"
        yield from rows


def effect_cells(effect: Effect) -> tuple[str, str, str]:
    """Difference, ratio or slope; its 95% interval; Cohen's d."""
    sign = "×" if effect.neutral else ""
    number = "{:.3g}".format if effect.neutral else "{:+.3g}".format
    bounds = f"{number(effect.lower)} to {number(effect.upper)}" if math.isfinite(effect.upper) else "–"
    return f"{sign}{number(effect.mean)}", bounds, "–" if math.isnan(effect.d) else f"{effect.d:+.1f}"


def _caveat(results: Results) -> Iterator[str]:
    decisions, study = results.decisions(), results.study.study
    if all(found.effect is None for found in decisions):
        return
    number, where = len(study.decisive()) + len(study.trends), "" if study.gate is None else " behind the gate"
    yield (
        f"Among {number} primaries and trends{where}, one or more false findings have a probability of at most "
        f"{study.level:g} (Holm). `megatron-rl lab power` says what effect such a study can see."
    )
