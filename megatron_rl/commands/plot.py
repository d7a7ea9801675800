"""Overlay the curves of several runs: one PNG and one self-contained HTML page.

    megatron-rl plot RUN [RUN ...] [--out DIR] [--title TEXT]

RUN is a run directory (or its metrics.jsonl), or label=RUN. Runs with the same label are seeds of one experiment: their
mean is drawn as a line and their range as a band. Without a label it is the folder's name less a trailing `-seed<n>`
or `-s<n>`. Nothing but metrics.jsonl is read.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_rl.errors import EXIT_DONE, InputError
from megatron_rl.monitor.page import build_page
from megatron_rl.monitor.plots import draw_figure, drawable_panels, group_runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory, its metrics.jsonl, or label=RUN")
    parser.add_argument("--out", type=Path, default=Path("plots"), help="folder for curves.png and curves.html")
    parser.add_argument("--title", default=None, help="heading; default: the labels")


def run(options: argparse.Namespace) -> int:
    groups = group_runs(options.runs)
    if not drawable_panels(groups):
        raise InputError(f"{', '.join(options.runs)}: no step with a metric that has a panel was recorded")
    title = options.title or " · ".join(group.label for group in groups)
    options.out.mkdir(parents=True, exist_ok=True)
    draw_figure(groups, title).savefig(options.out / "curves.png", dpi=110)
    (options.out / "curves.html").write_text(build_page(groups, title), encoding="utf-8")
    for group in groups:
        print(f"{group.label}: {len(group.runs)} run(s), {max(len(run) for run in group.runs)} steps")
    print(f"wrote {options.out / 'curves.png'} and {options.out / 'curves.html'}")
    return EXIT_DONE
