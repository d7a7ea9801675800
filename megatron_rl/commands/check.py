"""Do all that `train` does before its engines start, and show it: layout, data, a prompt, its reward. Needs no GPU.

megatron-rl check RECIPE [--ranks N] [--offline]
"""

from __future__ import annotations

import argparse
import os

from megatron_rl.commands.arguments import GPU_NAMES, add_recipe
from megatron_rl.errors import EXIT_DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--ranks", type=int, help="number of ranks the job will have (default: WORLD_SIZE, if set)")
    parser.add_argument(
        "--offline",
        action="store_true",
        help="where the model is not at hand, go by its name (checkpoint/known_models.py); leave out what needs files "
        "that are absent",
    )


def run(options: argparse.Namespace) -> int:
    from megatron_rl.config import load_recipe
    from megatron_rl.run.prepare import report

    ranks = options.ranks or (int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None)
    for what, value in report(load_recipe(options.recipe, options.overrides), ranks, options.offline):
        print(f"{what:>10}  {value}")
    print(f"{'memory':>10}  megatron-rl plan {options.recipe} --gpu {{{','.join(GPU_NAMES)}}}")
    return EXIT_DONE
