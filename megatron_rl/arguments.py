"""Arguments of commands: numbers within bounds, files that can be written, a GPU, a recipe."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError


@dataclass(frozen=True)
class Number:
    """A number from ``least`` to ``most``; ``above``: ``least`` itself is not allowed."""

    kind: type[int] | type[float]
    least: float
    most: float
    above: bool = False

    def __str__(self) -> str:
        name = "a whole number" if self.kind is int else "a number"
        return f"{name} {'above' if self.above else 'from'} {self.least:g}{' and up' * self.above} to {self.most:,}"

    def allows(self, value: float) -> bool:
        return math.isfinite(value) and self.least <= value <= self.most and not (self.above and value == self.least)

    def __call__(self, text: str) -> int | float:
        try:
            value = self.kind(text)
        except ValueError:
            value = math.nan
        if not self.allows(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {self}")
        return value


MOST = 10**9  # of steps, tokens, ranks, GiB: more is a slip of the hand
COUNT = Number(int, 1, MOST)
INDEX = Number(int, 0, MOST)  # of a step, a rank or a seed
PORT = Number(int, 0, 65535)
POSITIVE = Number(float, 0, MOST, above=True)
SHARE = Number(float, 0, 1)


def of_job(name: str) -> int | None:
    """Return the number that torchrun or srun gives the process as the variable ``name``; None without one. Raises
    `InputError` for one that is no such number."""
    if (text := os.environ.get(name)) is None:
        return None
    try:
        return int((COUNT if name.endswith("WORLD_SIZE") else INDEX)(text))
    except argparse.ArgumentTypeError as error:
        raise InputError(f"the environment's {name}: {error}; torchrun or srun sets it, else unset it") from error


def output(text: str) -> Path:
    """Return the path of a file or folder to write. Its folder need not be there, but it can be made."""
    path = Path(text)
    there = next(above for above in (path.absolute(), *path.absolute().parents) if os.path.lexists(above))
    if there != path.absolute() and not there.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: {there} is not a folder, so nothing can be written below it")
    if not os.access(there, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: you may not write to {there}; name another place")
    return path


def output_file(text: str) -> Path:
    """Return the path of a file to write, as `output` does."""
    if Path(text).is_dir() or text.endswith("/") or not text:
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; name a file")
    return output(text)


def output_or_dash(text: str) -> str:
    """Return ``text``: the path of a file to write, or ``-`` for standard output."""
    return text if text == "-" else str(output_file(text))


FILES = (output_file, output_or_dash)  # whose folders are made before the command works


def make_folder(file: Path) -> list[Path]:
    """Make the folder that ``file`` will be written to. Returns folders that were not there, the outermost first."""
    if of_job("RANK"):  # the first rank writes
        return []
    missing = [folder for folder in reversed(file.absolute().parents) if not folder.exists()]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{file}: {file.parent} cannot be made: {error.strerror}; name another place") from error
    return missing


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


def add_nodes(parser: argparse.ArgumentParser, whose: str) -> None:
    """Add `--nodes` and `--gpus-per-node`. ``whose``: the recipe whose name says their default."""
    parser.add_argument(
        "--nodes",
        type=COUNT,
        help=f"Reckon with this number of nodes (default: as {whose}'s name says, …-4n8g-…).",
    )
    parser.add_argument(
        "--gpus-per-node",
        type=COUNT,
        help=f"Reckon with this number of GPUs in a node (default: as {whose}'s name says, else 8).",
    )


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
