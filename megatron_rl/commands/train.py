"""Commands with the engines of a run: `train`, `eval` and `serve`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatron_rl.arguments import PORT, add_recipe, of_job, output_file
from megatron_rl.errors import EXIT_DONE


def add_train(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|DIR",
        help="Choose where to start. auto (default): the newest complete checkpoint of the run directory, if there is "
        "one. never: anew; refused where the run directory holds a run. DIR: that checkpoint.",
    )
    parser.add_argument(
        "--allow-changes",
        action="store_true",
        help="Continue although the recipe, the model or the data changed. The changes are logged.",
    )


def run_train(options: argparse.Namespace) -> int:
    """Train a model with a recipe: sample, score and learn until the last step. torchrun or srun starts several ranks.

        megatron-rl train RECIPE [--set KEY.PATH=VALUE …] [--resume auto|never|DIR] [--allow-changes]
        torchrun --nproc-per-node 8 -m megatron_rl train RECIPE

    The same command continues an interrupted run. After `touch RUN/STOP` the run saves after the current step and ends.
    """
    from megatron_rl.config import load_recipe
    from megatron_rl.process.host import outlasting_readers, raise_descriptor_limit
    from megatron_rl.run.prepare import check_recipe

    recipe = load_recipe(options.recipe, options.overrides)
    check_recipe(recipe, of_job("WORLD_SIZE") or 1)
    raise_descriptor_limit()
    from megatron_rl.train import train  # imports the engines, so only after the recipe is accepted

    with outlasting_readers(f"{recipe.run_dir}/log.txt has the rest of the output"):
        train(recipe, resume=options.resume, allow_changes=options.allow_changes)
    return EXIT_DONE


def add_eval(parser: argparse.ArgumentParser) -> None:
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
        type=output_file,
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


def run_eval(options: argparse.Namespace) -> int:
    """Score a checkpoint on held-out problems: a table with a row per file and confidence intervals.

        megatron-rl eval RECIPE --checkpoint DIR --data aime.jsonl --data math500.jsonl --output results.json

    Without `--data` the files are the recipe's data.validation. A row has the number of problems, n (responses per
    problem), the mean reward, pass@k, the mean length of a response in tokens and the share that was cut. `--output`
    also writes ….samples.jsonl (responses).
    """
    from megatron_rl.config import load_recipe

    files = [f"data.validation={json.dumps([{'path': path} for path in options.data])}"] if options.data else []
    recipe = load_recipe(options.recipe, [*files, *options.overrides])
    from megatron_rl.evaluate import evaluate  # imports the engines, so only after the recipe is accepted
    from megatron_rl.run.saving import newest_checkpoint

    evaluate(recipe, newest_checkpoint(options.checkpoint.resolve()), options.output)
    return EXIT_DONE


def add_serve(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--host", default="127.0.0.1", help="Listen on this address (default: %(default)s).")
    parser.add_argument("--port", type=PORT, default=0, help="Listen on this port (default: any free one).")
    parser.add_argument(
        "--name", help="Name the server's file in the run directory so (default: host name and process id)."
    )
    parser.add_argument(
        "--ends-with-parent", action="store_true", help="End when the process that started the server ends."
    )


def run_serve(options: argparse.Namespace) -> int:
    """Start a rollout server of a run (rollout.engine: vllm_server). It prints its address; `train` finds it.

    megatron-rl serve RECIPE [--host 10.0.0.5] [--port N]
    """
    from megatron_rl.config import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)
    from megatron_rl.rollout.servers.server import serve  # imports the engine, so only after the recipe is accepted

    serve(recipe, options.host, options.port, options.name, options.ends_with_parent)
    return EXIT_DONE
