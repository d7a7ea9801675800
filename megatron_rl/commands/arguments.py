"""Arguments that several commands share."""

from __future__ import annotations

import argparse

GPU_NAMES = ("a100-40", "a100-80", "h100-80", "h800-80", "h200-141")
GPU_SHORT = {  # the larger, where there are two
    "a100": "a100-80",
    "h100": "h100-80",
    "h800": "h800-80",
    "h200": "h200-141",
}


def gpu_name(text: str) -> str:
    """The full name of a GPU, which may be written without its memory."""
    return GPU_SHORT.get(text.lower(), text.lower())


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """The recipe, and overrides of its keys: ``options.recipe`` and ``options.overrides``."""
    parser.add_argument("recipe", help="YAML file; one that ships with the package is found as recipes/… from anywhere")
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY.PATH=VALUE", dest="overrides", help="override one key"
    )
