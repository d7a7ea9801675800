"""The commands `run watch` and `run samples`."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_rl.arguments import COUNT, INDEX, output_file
from megatron_rl.errors import EXIT_DONE, InputError


def add_watch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="Watch this run directory, which may be written as label=RUN."
    )
    parser.add_argument(
        "--page", type=output_file, metavar="FILE", help="Write a page to this file instead of drawing in the terminal."
    )
    parser.add_argument("--once", action="store_true", help="Show what there is and end.")


def run_watch(options: argparse.Namespace) -> int:
    """Watch runs live, in the terminal (state, curves, alarms) or on a page (also mismatch, routes, sampled texts).

        megatron-rl run watch RUN [RUN ...]                    in the terminal, until Ctrl-C; no terminal: once, as text
        megatron-rl run watch RUN [RUN ...] --page watch.html  as one file, written again until the runs have ended

    RUN is a run directory, or label=RUN; several runs are drawn over each other. A run may be finished or not yet
    begun. The command writes nothing to the run directory. The page needs no scripts and nothing beside it: from
    another machine, copy it, or serve its folder (`python -m http.server --bind 127.0.0.1`) through `ssh -L`.
    """
    from megatron_rl.instruments.watch.run import open_runs

    runs = open_runs(options.runs)
    if options.page is not None:
        from megatron_rl.instruments.watch.page import keep_page

        keep_page(runs, options.page, options.once)
    else:
        from megatron_rl.instruments.watch.terminal import watch

        watch(runs, options.once)
    return EXIT_DONE


def add_samples(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="Read this run directory or file of samples.")
    parser.add_argument("--step", type=INDEX, help="Print only the samples of this step.")
    parser.add_argument(
        "--number", type=COUNT, default=4, help="Print at most this number of samples (default: %(default)s)."
    )


def run_samples(options: argparse.Namespace) -> int:
    """Print sampled responses of a run, the newest first: prompt, response, reward, length, ratio to the engine.

        megatron-rl run samples RUN [--step N] [--number N]

    RUN is a run directory, or a file of `eval --output` (….samples.jsonl). The recipe's `monitor.samples` sets how many
    samples are written and how long they may be. Control characters are shown as escapes.
    """
    from megatron_rl.monitor.run_directory import RunDirectory
    from megatron_rl.monitor.samples import read_samples, render

    if not options.run.exists():
        raise InputError(f"{options.run}: no such folder; expected a run directory (run_root/name of its recipe)")
    file = RunDirectory(options.run).samples if options.run.is_dir() else options.run
    samples = list(read_samples(file))
    if options.step is not None:
        steps = sorted({sample["step"] for sample in samples})
        samples = [sample for sample in samples if sample["step"] == options.step]
        if not samples:
            raise InputError(f"--step {options.step}: {file} has samples of {_some(steps)}")
    newest_first = sorted(
        samples, key=lambda sample: -sample["step"]
    )  # the sort is stable, so samples of a step stay in order
    for sample in newest_first[: options.number]:
        print(render(sample))
    return EXIT_DONE


def _some(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[-20:]))
    return f"step {shown}" if len(steps) <= 20 else f"{len(steps)} steps, the last {shown}"
