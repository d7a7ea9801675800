"""Run a recipe: sample, score, learn, until its last step. Under torchrun or srun for several ranks.

    megatron-rl train RECIPE [--set KEY.PATH=VALUE …] [--resume auto|never|DIR] [--allow-changes]
    torchrun --nproc-per-node 8 -m megatron_rl train RECIPE

The same command continues an interrupted run. `touch RUN/STOP` saves after the step at hand and ends the run.
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
        help="auto (default): continue from the newest complete checkpoint of the run directory, if any; "
        "never: start anew, refused where the run directory holds a run; DIR: continue from that checkpoint",
    )
    parser.add_argument(
        "--allow-changes",
        action="store_true",
        help="let the run go on although its recipe, model or data changed; what changed is logged",
    )


def run(options: argparse.Namespace) -> int:
    from megatron_rl.check import check_recipe
    from megatron_rl.config import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)
    check_recipe(recipe, int(os.environ.get("WORLD_SIZE", 1)))
    from megatron_rl.train import train  # the engines: not for a recipe that is refused

    train(recipe, resume=options.resume, allow_changes=options.allow_changes)
    return EXIT_DONE
