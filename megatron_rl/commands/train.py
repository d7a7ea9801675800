"""Train a model with a recipe: sample, score and learn until the last step. Several ranks start by torchrun or srun.

    megatron-rl train RECIPE [--set KEY.PATH=VALUE …] [--resume auto|never|DIR] [--allow-changes]
    torchrun --nproc-per-node 8 -m megatron_rl train RECIPE

The same command continues an interrupted run. After `touch RUN/STOP` the run saves after the current step and ends.
"""

from __future__ import annotations

import argparse
import os

from megatron_rl.commands.arguments import add_recipe
from megatron_rl.errors import EXIT_DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
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


def run(options: argparse.Namespace) -> int:
    from megatron_rl.check import check_recipe
    from megatron_rl.config import load_recipe
    from megatron_rl.process.output import outlasting_readers, raise_descriptor_limit

    recipe = load_recipe(options.recipe, options.overrides)
    check_recipe(recipe, int(os.environ.get("WORLD_SIZE", 1)))
    raise_descriptor_limit()
    from megatron_rl.train import train  # imports the engines, so only after the recipe is accepted

    with outlasting_readers(f"{recipe.run_dir}/log.txt has the rest of the output"):
        train(recipe, resume=options.resume, allow_changes=options.allow_changes)
    return EXIT_DONE
