"""Writes docs/lab from the runs in docs/lab/runs: each complete study's page, figure and outcomes by run.

python -m tools.dev.lab_docs
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from megatron_rl.errors import InputError
from megatron_rl.instruments.lab import load_study
from megatron_rl.instruments.lab.archive import read_packed
from megatron_rl.instruments.lab.jobs import LoadedStudy
from megatron_rl.instruments.lab.report import DPI, draw_study, effect_cells, margins_told, runs_told
from megatron_rl.instruments.lab.results import Results

ROOT = Path(__file__).resolve().parents[2]
COLOURS = 96


def save_small(figure: Figure, path: Path) -> None:
    """Save the figure as a PNG with few colours, at a third of the size, for the repository."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=DPI)
    with Image.open(drawn) as image:
        image.convert("RGB").quantize(COLOURS).save(path, format="PNG", optimize=True)


def render_page(results: Results) -> str:
    """Return what a study's page in docs/lab has of its runs: figure, and the comparisons that decide."""
    study = results.study.study
    recipes = f"recipes/lab/{study.name}"
    lines = [
        f"![curves of the study](../images/{_image(study.name)})\n",
        *runs_told(results),
        f"[Claim and setting](../../{recipes}/study.yaml).\n",
        *_page_table(results),
    ]
    return "\n".join(lines) + "\n"


def _page_table(results: Results) -> Iterator[str]:
    """Yield a line per gate, primary and trend, with the means of the arm and of its control."""
    study, decisions = results.study.study, results.decisions()
    yield "| compared | outcome | predicted | found (95%) | p (Holm) | verdict |"
    yield "|---|---|---|---|---|---|"
    for decision in decisions:
        arms = [_with_mean(results, arm, decision.outcome) for arm in (decision.name, decision.against)]
        compared = decision.name if decision.name in study.trends else " against ".join(arms)
        number, bounds, _ = ("–", "–", "–") if decision.effect is None else effect_cells(decision.effect)
        yield (
            f"| {compared} | {decision.outcome} | {decision.expected} | {number} ({bounds}) | {decision.p_holm:.2g} | "
            f"{decision.verdict} |"
        )
    yield from margins_told(study, dict.fromkeys(decision.outcome for decision in decisions))


def _with_mean(results: Results, arm: str, outcome: str) -> str:
    values = list(results.outcomes.get(arm, {}).get(outcome, {}).values())
    return f"{arm} {np.mean(values):.3g}" if values else arm


def _image(name: str) -> str:
    return f"lab-{name}.png"


def write_docs(studies: Sequence[LoadedStudy], docs: Path) -> list[Path]:
    """Write page, figure and outcomes of each complete study: docs/lab/STUDY.md, docs/images, docs/lab/STUDY.json.

    Runs come from docs/lab/runs/STUDY.jsonl.xz. Returns the files. Raises `InputError` if a page or its marks are
    absent.
    """
    written = []
    for loaded in studies:
        file = docs / "lab" / "runs" / f"{loaded.study.name}.jsonl.xz"
        if file.is_file() and (results := read_packed(loaded, file)).complete:
            written += write_page(results, docs)
    return written


def write_page(results: Results, docs: Path) -> list[Path]:
    """Write the table to docs/lab/STUDY.md, the figure to docs/images, and outcomes of every run beside the page."""
    name = results.study.study.name
    page, image, values = docs / "lab" / f"{name}.md", docs / "images" / _image(name), docs / "lab" / f"{name}.json"
    fill(page, name, render_page(results))
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


if __name__ == "__main__":
    every = [load_study(file) for file in sorted((ROOT / "recipes" / "lab").glob("*/study.yaml"))]
    print("".join(f"wrote {path}\n" for path in write_docs(every, ROOT / "docs")), end="")
