"""Arguments that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_rl.errors import EXIT_DONE, InputError

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


def add_foreign(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the arguments of a translation of another project's ``what``."""
    parser.add_argument("file", type=Path, help=f"Read this file: {what}.")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="RECIPE",
        help="Write the recipe here (default: print it).",
    )
    parser.add_argument(
        "--variable",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="Take this as set where the script is started. The option may be given several times.",
    )
    parser.add_argument(
        "--train-rows", type=int, metavar="N", help="Count epochs of this number of rows of training data."
    )


def write_translation(options: argparse.Namespace, translate: Callable[..., Any]) -> int:
    """Translate ``options.file``, write or print the recipe, and print what became of each key."""
    variables = {"HOME": str(Path.home()), "PWD": "."}
    for given in options.variable:
        name, separator, value = given.partition("=")
        if not separator or not name.isidentifier():
            raise InputError(f"--variable {given}: write NAME=VALUE")
        variables[name] = value
    if not options.file.is_file():
        raise InputError(f"{options.file}: no such file")
    translation = translate(options.file, variables, options.train_rows)
    translation.check()
    if options.output is None:
        print(translation.text(), end="")
        return EXIT_DONE
    options.output.write_text(translation.text(), encoding="utf-8")
    print(translation.report())
    print(f"\n{options.output}: written; next: megatron-rl check --offline {options.output}")
    return EXIT_DONE
