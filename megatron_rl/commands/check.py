"""Check a recipe: do and show everything that `train` does before its engines start. Needs no GPU.

megatron-rl check RECIPE [--ranks N] [--offline] [--no-transformers]

The command compares the headers of the model's files with the learner's table of tensors, and each key of config.json
with its meaning to the learner and to vLLM. Last, transformers and the learner compute the log-probs of a prompt, in
fp32 on the CPU: with the whole model up to 2 billion parameters, else with its first and last layer.
"""

from __future__ import annotations

import argparse
import os

from megatron_rl.commands.arguments import GPU_NAMES, add_recipe
from megatron_rl.errors import EXIT_DONE, printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--ranks", type=int, help="Check for this number of ranks (default: WORLD_SIZE, if set).")
    parser.add_argument(
        "--offline",
        action="store_true",
        help="Work without the model's files: look it up by its name (model/known_models.py), and skip checks that need"
        " files.",
    )
    parser.add_argument(
        "--no-transformers",
        action="store_true",
        help="Do not compare the learner's model with transformers' (the comparison takes about 10 s for a small "
        "model).",
    )


def run(options: argparse.Namespace) -> int:
    from megatron_rl.config import load_recipe
    from megatron_rl.doctor.machine import available_gib
    from megatron_rl.run.prepare import report

    ranks = options.ranks or (int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None)
    free_gib = None if options.no_transformers else available_gib()
    for what, value in report(load_recipe(options.recipe, options.overrides), ranks, options.offline, free_gib):
        print(f"{what:>10}  {printable(value)}")
    print(f"{'memory':>10}  megatron-rl plan {options.recipe} --gpu {{{','.join(GPU_NAMES)},FILE}}")
    return EXIT_DONE
