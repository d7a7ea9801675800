"""Shapes of the checkpoints that recipes name, so that `plan` and `check --offline` work where none is at hand.

A family's file holds the keys of each checkpoint's own config.json that `read_architecture` reads, under the folder
name that the checkpoint has on the hub. Where the checkpoint is at hand, its config.json counts alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.model.architecture import Architecture, architecture_from, read_architecture
from megatron_rl.model.families import FAMILIES

KNOWN_MODELS: dict[str, dict[str, Any]] = {
    name: {"model_type": family.model_type, **config}
    for family in FAMILIES.values()
    for name, config in family.known.items()
}
HUB_ORGANIZATIONS = {
    start: organization for family in FAMILIES.values() for start, organization in family.organizations.items()
}  # by how a folder's name begins


def how_to_get(path: Path) -> str:
    """The command that downloads the checkpoint that ``path`` is named after; "" where the name is not known."""
    organization = next((o for start, o in HUB_ORGANIZATIONS.items() if path.name.startswith(start)), None)
    if path.name not in KNOWN_MODELS or organization is None:
        return ""
    name = f"{organization}/{path.name}"
    return f"hf download {name}" + ("" if str(path) == name else f" --local-dir {path}")


def shape_of(path: Path) -> tuple[Architecture, bool]:
    """The architecture of the checkpoint at ``path``, and whether it came from this table by the folder's name.

    Raises `InputError` where neither the checkpoint nor its name is known.
    """
    if (path / "config.json").is_file() or path.name not in KNOWN_MODELS:
        try:
            return read_architecture(path), False
        except InputError as error:
            if (path / "config.json").is_file():
                raise
            raise InputError(f"{error}; shapes known by folder name: {', '.join(KNOWN_MODELS)}") from error
    return architecture_from(KNOWN_MODELS[path.name]), True
