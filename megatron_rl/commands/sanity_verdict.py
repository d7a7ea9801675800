"""Say whether a run passed the sanity test of [FP16 §4]: training accuracy on a perfectible set above 95%.

    megatron-rl paper sanity-verdict RUN [RUN …] [--threshold 0.95]

Training accuracy is critic/score/mean (rewards before shaping), averaged over a pass over the problems; the best pass
counts. Prints one line per run. Exit status: 0 all passed, 1 one failed, 2 not readable.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_rl.config import Recipe
from megatron_rl.config.yaml12 import parse
from megatron_rl.data.source import read_problems
from megatron_rl.errors import EXIT_DONE, InputError
from megatron_rl.monitor.jsonl import read_metrics

EXIT_FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="Judge this run directory.")
    parser.add_argument(
        "--threshold", type=float, default=0.95, help="Pass a run whose accuracy exceeds this (default: 0.95)."
    )


def run(options: argparse.Namespace) -> int:
    results = [verdict(path, options.threshold) for path in options.runs]
    for _, line in results:
        print(line)
    return EXIT_DONE if all(passed for passed, _ in results) else EXIT_FAILED


def best_epoch(scores: list[float], steps_per_epoch: int) -> tuple[float, int]:
    """Return (highest mean of ``steps_per_epoch`` consecutive scores, its last step). `InputError` for fewer."""
    if len(scores) < steps_per_epoch:
        raise InputError(f"{len(scores)} steps recorded, one pass over the problems takes {steps_per_epoch}")
    means = [
        sum(scores[end - steps_per_epoch : end]) / steps_per_epoch for end in range(steps_per_epoch, len(scores) + 1)
    ]
    best = max(range(len(means)), key=means.__getitem__)
    return means[best], best + steps_per_epoch - 1


def verdict(run: Path, threshold: float) -> tuple[bool, str]:
    """Return (passed, the line to print) for one run directory."""
    for name in ("recipe.resolved.yaml", "metrics.jsonl"):
        if not (run / name).is_file():
            raise InputError(f"{run}: no {name}; expected a run directory")
    recipe = Recipe.model_validate(parse((run / "recipe.resolved.yaml").read_text())[0])
    if recipe.batch.filter_groups:
        raise InputError(f"{run}: batch.filter_groups leaves solved problems out of the score; run with false")
    num_problems = sum(1 for source in recipe.data.train for _ in read_problems(source))
    rows = read_metrics(run / "metrics.jsonl")
    scores = [row["critic/score/mean"] for row in rows if "critic/score/mean" in row]
    try:
        accuracy, step = best_epoch(scores, -(-num_problems // recipe.batch.prompts))
    except InputError as error:
        raise InputError(f"{run}: {error}") from error
    passed = accuracy > threshold
    return passed, (
        f"{'PASS' if passed else 'FAIL'}  {run.name}: training accuracy {accuracy:.3f} at step {step} of {len(scores)} "
        f"({'above' if passed else 'not above'} {threshold:g}; {num_problems} problems)"
    )
