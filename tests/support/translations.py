"""Translations of other projects' scripts and configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_rl.config import Recipe, load_recipe
from megatron_rl.instruments.translate.translation import Translation


def written(translation: Translation, folder: Path) -> Recipe:
    """Check ``translation``, write its recipe to ``folder``, and return what is read from there."""
    translation.check()
    (folder / "recipe.yaml").write_text(translation.text())
    return load_recipe(folder / "recipe.yaml")


def losses(translation: Translation) -> dict[str, Any]:
    return {line.theirs: line.note for line in translation.lost}


def guesses(translation: Translation) -> dict[str, Any]:
    return {line.ours: line.ours_value for line in translation.guessed}
