"""The commands `check` and `recipe schema`."""

from __future__ import annotations

import argparse
import json

from megatron_rl.arguments import COUNT, GPU_NAMES, add_recipe, of_job
from megatron_rl.errors import EXIT_DONE, printable


def add_check(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--ranks", type=COUNT, help="Check for this number of ranks (default: WORLD_SIZE, if set).")
    parser.add_argument(
        "--offline",
        action="store_true",
        help="Work without the model's files: look it up by its name (model/architecture.py), and skip checks that need"
        " files.",
    )
    parser.add_argument(
        "--no-transformers",
        action="store_true",
        help="Do not compare the learner's model with transformers' (the comparison takes about 10 s for a small "
        "model).",
    )


def run_check(options: argparse.Namespace) -> int:
    """Check a recipe: do and show everything that `train` does before its engines start. Needs no GPU.

    megatron-rl check RECIPE [--ranks N] [--offline] [--no-transformers]

    The command compares the headers of the model's files with the learner's table of tensors, and each key of
    config.json with its meaning to the learner and to vLLM. Last, transformers and the learner compute the log-probs of
    a prompt, in fp32 on the CPU: with the whole model up to 2.1 billion parameters, else with its first and last layer.
    """
    from megatron_rl.config import load_recipe
    from megatron_rl.process.host import available_gib
    from megatron_rl.run.prepare import report

    ranks = options.ranks or of_job("WORLD_SIZE")
    free_gib = None if options.no_transformers else available_gib()
    for what, value in report(load_recipe(options.recipe, options.overrides), ranks, options.offline, free_gib):
        print(f"{what:>10}  {printable(value)}")
    print(f"{'memory':>10}  megatron-rl plan {options.recipe} --gpu {{{','.join(GPU_NAMES)},FILE}}")
    return EXIT_DONE


def add_schema(parser: argparse.ArgumentParser) -> None:
    pass


def run_schema(options: argparse.Namespace) -> int:
    """Print the recipe's JSON Schema, for an editor's completion and hints: all keys with their meaning and defaults.

    megatron-rl recipe schema > recipe.schema.json

    Editors that use yaml-language-server, such as VS Code with the YAML extension, then complete and check a recipe
    that begins with `# yaml-language-server: $schema=recipe.schema.json`.
    """
    from megatron_rl.config.loader import recipe_schema

    print(json.dumps(recipe_schema(), indent=2))
    return EXIT_DONE
