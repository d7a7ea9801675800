"""Arguments that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

GPU_NAMES = ("a100-40", "a100-80", "h100-80", "h800-80", "h200-141", "h20-96", "b200-180", "gb200-186")
GPU_SHORT = {  # the version with more memory, if there are two
    "a100": "a100-80",
    "h100": "h100-80",
    "h800": "h800-80",
    "h200": "h200-141",
    "h20": "h20-96",
    "b200": "b200-180",
    "gb200": "gb200-186",
}


class _Completed(tuple):
    """Names that a shell completes, where `type` already decides which values are allowed."""

    def __contains__(self, value: object) -> bool:
        return True


def gpu_or_file(text: str) -> str:
    """Return the full name of a GPU, whose memory ``text`` may leave out, or the file of a GPU's figures as it is."""
    name = GPU_SHORT.get(text.lower(), text.lower())
    if name in GPU_NAMES:
        return name
    if Path(text).is_file():
        return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is neither a GPU (choose from {', '.join(GPU_NAMES)}) nor a file of a GPU's figures "
        "(docs/planning.md; megatron-rl doctor --measure FILE writes one)"
    )


def add_gpu(parser: argparse.ArgumentParser, what: str, **settings: Any) -> None:
    """Add `--gpu`: ``options.gpu`` is a name of `GPU_NAMES` or a file."""
    text = f"{what} One of {', '.join(GPU_NAMES)} (memory may be left out), or a file of your GPU's figures."
    choices = _Completed(GPU_NAMES)
    parser.add_argument("--gpu", type=gpu_or_file, choices=choices, metavar="GPU|FILE", help=text, **settings)


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
