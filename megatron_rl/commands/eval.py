"""Score a checkpoint on held-out problems: a table with a row for each file, with confidence intervals.

    megatron-rl eval RECIPE --checkpoint DIR --data aime.jsonl --data math500.jsonl --output results.json

Without `--data` the files are the recipe's data.validation. A row has the problems, n (responses to each), the mean
reward, pass@k, mean tokens of a response and the share that was cut. `--output` also writes ….samples.jsonl (responses)
and ….prompts.jsonl (each prompt's success rate, which data.curriculum.success_rates reads).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatron_rl.checkpoint.manifest import list_checkpoints
from megatron_rl.commands.arguments import add_recipe
from megatron_rl.errors import EXIT_DONE, InputError
from megatron_rl.monitor.run_directory import RunDirectory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument(
        "--checkpoint",
        required=True,
        type=Path,
        metavar="DIR",
        help="Hugging Face folder, a run's step_… folder, or a run directory, for its newest",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="also write the figures there, as JSON, and responses and success rates beside it",
    )
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="FILE",
        help="problems in place of data.validation; may be given several times",
    )


def newest(path: Path) -> Path:
    """The newest complete checkpoint of a run directory; any other folder is its own."""
    folder = RunDirectory(path).checkpoints
    if not folder.is_dir():
        return path
    if not (found := list_checkpoints(folder)):
        raise InputError(f"--checkpoint {path}: a run directory without a complete checkpoint in {folder.name}/")
    return found[-1]


def run(options: argparse.Namespace) -> int:
    from megatron_rl.config import load_recipe

    files = [f"data.validation={json.dumps([{'path': path} for path in options.data])}"] if options.data else []
    recipe = load_recipe(options.recipe, [*files, *options.overrides])
    from megatron_rl.evaluate import evaluate  # the engines: not for a recipe that is refused

    evaluate(recipe, newest(options.checkpoint.resolve()), options.output)
    return EXIT_DONE
