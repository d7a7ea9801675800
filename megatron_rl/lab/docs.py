"""The pages of docs/lab, made from the runs that are kept with the repository: tables, figures, verdicts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_rl.errors import InputError
from megatron_rl.lab.archive import read_packed
from megatron_rl.lab.figure import draw_study, save_small
from megatron_rl.lab.jobs import LoadedStudy
from megatron_rl.lab.report import effect_cells, render
from megatron_rl.lab.results import Results

VERDICTS = "verdicts"  # name of the table in docs/lab.md


def write_docs(studies: Sequence[LoadedStudy], docs: Path) -> list[Path]:
    """docs/lab/STUDY.md, its figure and outcomes of each study whose runs are all kept, and the table of docs/lab.md.

    Runs are those of docs/lab/runs/STUDY.jsonl.xz. Raises `InputError` where a page or its marks are absent.
    """
    found: list[tuple[LoadedStudy, Results | None]] = []
    written = []
    for loaded in studies:
        file = docs / "lab" / "runs" / f"{loaded.study.name}.jsonl.xz"
        results = read_packed(loaded, file) if file.is_file() else None
        found.append((loaded, results))
        if results is not None and results.complete:
            written += write_page(results, docs)
    page = docs / "lab.md"
    fill(page, VERDICTS, "\n" + "\n".join(verdicts(found)) + "\n\n")
    return [*written, page]


def write_page(results: Results, docs: Path) -> list[Path]:
    """The tables into docs/lab/STUDY.md, the figure into docs/images, outcomes of every run beside the page."""
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
    """Put ``body`` between the two marks of ``name`` in ``page``. Raises `InputError` where they are absent."""
    start, end = f"<!-- lab: {name} -->\n", f"<!-- /lab: {name} -->"
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    if start not in text or end not in text:
        raise InputError(f"{page}: the lines {start.strip()} and {end}, between which the tables go, are not there")
    pattern = re.compile(re.escape(start) + ".*?" + re.escape(end), re.DOTALL)
    page.write_text(pattern.sub(lambda _: start + body + end, text), encoding="utf-8")


def verdicts(found: Sequence[tuple[LoadedStudy, Results | None]]) -> Iterator[str]:
    """A line for each gate, primary and trend; of a study whose runs are not all there, only how many are."""
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
                f"| [{study.name}](lab/{study.name}.md) | {against} | {decision.outcome} | {decision.expected} | "
                f"{number} ({bounds}) | {decision.verdict} |"
            )
