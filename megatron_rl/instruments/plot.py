"""The command `run plot`: curves of several runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.arguments import output
from megatron_rl.errors import EXIT_DONE, InputError

if TYPE_CHECKING:
    from megatron_rl.monitor.plots import Curves


def add_plot(parser: argparse.ArgumentParser) -> None:
    from megatron_rl.instruments.paper.figures import PAPERS

    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="Read this run directory, metrics.jsonl or other project's log, which may be written as label=RUN.",
    )
    parser.add_argument("--out", type=output, default=Path("plots"), help="Write curves.png to this folder.")
    parser.add_argument(
        "--title", default=None, help="Write this heading (default: the label, or the number of experiments)."
    )
    parser.add_argument("--paper", choices=PAPERS, help="Draw the figures of this paper.")
    parser.add_argument(
        "--figure",
        action="append",
        default=[],
        help="Draw only this figure of --paper. The option may be given several times.",
    )


def run_plot(options: argparse.Namespace) -> int:
    """Draw the curves of several runs over each other: one PNG.

        megatron-rl run plot RUN [RUN ...] [--out DIR] [--title TEXT]
        megatron-rl run plot --paper length-decay RUN [RUN ...] [--figure fig05]

    RUN is a run directory (or its metrics.jsonl), a log of verl, slime, miles, NeMo-RL, prime-rl or TRL
    (docs/coming-from.md), or label=RUN. Runs with the same label are seeds of one experiment: a line shows their mean
    and a band their range. The default label is the folder's name without a trailing `-seed<n>` or `-s<n>`. Curves of
    more than 40 steps are smoothed. Panels that are always 0 are left out.

    --paper draws the figures of a paper instead, one PNG each, and names the metrics that a run lacks. Give the runs of
    the figure's arms; --figure limits the command to figures that fit these runs.
    """
    from megatron_rl.instruments.foreign.read import read_run
    from megatron_rl.monitor.plots import draw_figure, drawable_panels, group_runs

    source_lines: list[str] = []

    def read(path: Path) -> list[dict[str, float]]:
        run = read_run(path)
        source_lines.extend(run.source_lines())
        return run.records

    groups = group_runs(options.runs, read)
    print("\n".join(source_lines), end="\n" if source_lines else "")
    if options.paper:
        return draw_figures(options, groups)
    if not drawable_panels(groups):
        raise InputError(f"{', '.join(options.runs)}: no step with a metric that has a panel was recorded")
    title = options.title or (groups[0].label if len(groups) == 1 else f"{len(groups)} experiments")
    options.out.mkdir(parents=True, exist_ok=True)
    draw_figure(groups, title).savefig(options.out / "curves.png", dpi=110)
    for group in groups:
        print(f"{group.label}: {len(group.runs)} run(s), {group.num_steps} steps")
    print(f"wrote {options.out / 'curves.png'}")
    return EXIT_DONE


SCATTER = {"hacking": "fig03", "fp16": "fig02-tokens"}
"""The figure of each paper that needs runs with stored batches (recorder.record_batches)."""


def draw_figures(options: argparse.Namespace, groups: list[Curves]) -> int:
    """Draw the figures of `--paper` and return the exit status. Raises `InputError` if none can be drawn."""
    from megatron_rl.instruments.paper.figures import PAPERS, draw_paper

    scatter = SCATTER.get(options.paper)
    available = [figure.name for figure in PAPERS[options.paper]] + ([scatter] if scatter else [])
    if unknown := [name for name in options.figure if name not in available]:
        raise InputError(f"--figure {unknown[0]}: {options.paper} has {', '.join(available)}")
    options.out.mkdir(parents=True, exist_ok=True)
    written, missing = draw_paper(options.paper, groups, options.out, options.figure)
    if scatter and (not options.figure or scatter in options.figure):
        from megatron_rl.instruments.paper.figures import draw_scatter

        figure = draw_scatter([named_folder(text) for text in options.runs], f"{options.paper}, {scatter}")
        if figure is None:
            missing.append(f"{scatter}: no run has stored batches (recorder.record_batches)")
        else:
            written.append(options.out / f"{options.paper}-{scatter}.png")
            figure.savefig(written[-1], dpi=110)
    for sentence in missing:
        print(sentence)
    if not written:
        raise InputError(f"--paper {options.paper}: no run has the metrics of any of these figures")
    print("wrote " + ", ".join(map(str, written)))
    return EXIT_DONE


def named_folder(argument: str) -> tuple[str, Path]:
    """Return label and folder of a RUN argument."""
    label, _, path = argument.rpartition("=") if not Path(argument).exists() else ("", "", argument)
    folder = Path(path).resolve()
    folder = folder.parent if folder.is_file() else folder
    return label or folder.name, folder
