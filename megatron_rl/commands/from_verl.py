"""Translate a launch script or a resolved configuration of verl into a recipe.

megatron-rl recipe from-verl run_qwen3_8b.sh --output recipe.yaml

The report says what was translated (their key, ours, its value), what has no counterpart and what that changes, what is
guessed, and what the file does not say. It is also the header of the recipe. Nothing of the script is run.
"""

from __future__ import annotations

import argparse

from megatron_rl.commands.arguments import add_foreign, write_translation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_foreign(parser, "verl's launch script, or its resolved configuration (.yaml)")


def run(options: argparse.Namespace) -> int:
    from megatron_rl.instruments.translate import verl

    return write_translation(options, verl.translate)
