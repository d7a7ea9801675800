"""Files that come with the package: `patches/`, `recipes/` and the requirements that `doctor` holds versions against.

A wheel has copies of them in this folder (setup.py).
"""

from __future__ import annotations

import os
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def shipped(name: str) -> Path:
    """What is called ``name`` (``patches``, ``recipes``, a file): of the installed package, or else of the checkout."""
    copy = _HERE / name
    return copy if copy.exists() else _HERE.parents[1] / name


def checkout() -> Path | None:
    """The root of the repository that this code is a checkout of; None for an installed package."""
    root = _HERE.parents[1]
    return root if (root / "pyproject.toml").is_file() else None


def existing_or_shipped(path: str | Path, folder: Path = Path()) -> Path:
    """Return ``path``, looked up from ``folder`` (default: the working directory).

    Where nothing is there and ``path`` begins with ``recipes/``, it names what ships with the package.
    """
    path = Path(path)
    if path.parts[:1] == ("recipes",) and not os.path.exists(folder / path):
        ours = shipped("recipes").joinpath(*path.parts[1:])
        if os.path.exists(ours) or not (folder / "recipes").is_dir():
            return ours
    return folder / path
