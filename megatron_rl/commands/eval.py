"""Score a checkpoint on held-out problems: a table with a row per file and confidence intervals.

    megatron-rl eval RECIPE --checkpoint DIR --data aime.jsonl --data math500.jsonl --output results.json

Without `--data` the files are the recipe's data.validation. A row has the number of problems, n (responses per
problem), the mean reward, pass@k, the mean length of a response in tokens and the share that was cut. `--output` also
writes ….samples.jsonl (responses) and ….prompts.jsonl (each prompt's success rate, which data.curriculum.success_rates
reads).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatron_rl.commands.arguments import add_recipe
from megatron_rl.errors import EXIT_DONE, InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument(
        "--checkpoint",
        required=True,
        type=Path,
        metavar="DIR",
        help="Score this checkpoint: a Hugging Face folder, a run's step_… folder, or a run directory, of which the "
        "newest is taken.",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="Write the figures to this JSON file, and responses and success rates beside it.",
    )
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="FILE",
        help="Score on this file in place of data.validation. The option may be given several times.",
    )


def newest(path: Path) -> Path:
    """Return the newest complete checkpoint of a run directory; any other folder is returned as it is."""
    from megatron_rl.checkpoint.manifest import list_checkpoints  # imports torch
    from megatron_rl.monitor.run_directory import RunDirectory

    folder = RunDirectory(path).checkpoints
    if not folder.is_dir():
        return path
    if not (checkpoints := list_checkpoints(folder)):
        raise InputError(f"--checkpoint {path}: a run directory without a complete checkpoint in {folder.name}/")
    return checkpoints[-1]


def run(options: argparse.Namespace) -> int:
    from megatron_rl.config import load_recipe

    files = [f"data.validation={json.dumps([{'path': path} for path in options.data])}"] if options.data else []
    recipe = load_recipe(options.recipe, [*files, *options.overrides])
    from megatron_rl.evaluate import evaluate  # imports the engines, so only after the recipe is accepted

    evaluate(recipe, newest(options.checkpoint.resolve()), options.output)
    return EXIT_DONE
