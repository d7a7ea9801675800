"""Arguments that several commands share."""

from __future__ import annotations

import argparse

GPU_NAMES = ("a100-40", "a100-80", "h100-80", "h800-80", "h200-141")
GPU_SHORT = {  # the version with more memory, if there are two
    "a100": "a100-80",
    "h100": "h100-80",
    "h800": "h800-80",
    "h200": "h200-141",
}


def gpu_name(text: str) -> str:
    """Return the full name of a GPU; ``text`` may leave out its memory."""
    return GPU_SHORT.get(text.lower(), text.lower())


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for a recipe and overrides of its keys: ``options.recipe`` and ``options.overrides``."""
    parser.add_argument(
        "recipe", help="Read this YAML file. A recipe of the package is found as recipes/… from anywhere."
    )
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY.PATH=VALUE",
        dest="overrides",
        help="Set one key of the recipe. The option may be given several times.",
    )
