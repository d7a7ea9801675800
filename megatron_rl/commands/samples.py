"""Print sampled responses of a run, the newest first: prompt, response, reward, length, ratio to the engine.

    megatron-rl run samples RUN [--step N] [--number N]

RUN is a run directory, or a file of `eval --output` (….samples.jsonl). The recipe's `monitor.samples` sets how many
samples are written and how long they may be. Control characters are shown as escapes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_rl.errors import EXIT_DONE, InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="Read this run directory or file of samples.")
    parser.add_argument("--step", type=int, help="Print only the samples of this step.")
    parser.add_argument(
        "--number", type=int, default=4, help="Print at most this number of samples (default: %(default)s)."
    )


def run(options: argparse.Namespace) -> int:
    from megatron_rl.monitor.run_directory import RunDirectory
    from megatron_rl.monitor.samples import read_samples, render

    if options.number < 1:
        raise InputError(f"--number {options.number}: must be at least 1")
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
