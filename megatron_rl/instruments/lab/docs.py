"""Writes the tables, figures and verdicts of docs/lab from the runs in the repository."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_rl.errors import InputError
from megatron_rl.instruments.lab.archive import read_packed
from megatron_rl.instruments.lab.jobs import LoadedStudy
from megatron_rl.instruments.lab.report import draw_study, effect_cells, render, save_small
from megatron_rl.instruments.lab.results import Results

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


def verdicts(found: Sequence[tuple[LoadedStudy, Results | None]]) -> Iterator[str]:
    """Yield a line per gate, primary and trend; for an incomplete study, only the number of its runs."""
    yield "| study | compared | outcome | predicted | found (95% interval) | verdict |"
    yield "|---|---|---|---|---|---|"
    for loaded, results in found:
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
