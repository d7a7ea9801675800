"""Types of arguments: numbers within bounds, and files that can be written. argparse names the option in an error."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass
from pathlib import Path

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
    if int(os.environ.get("RANK", 0)):  # the first rank writes
        return []
    missing = [folder for folder in reversed(file.absolute().parents) if not folder.exists()]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{file}: {file.parent} cannot be made: {error.strerror}; name another place") from error
    return missing
