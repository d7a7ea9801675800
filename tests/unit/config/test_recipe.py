"""Keys that recipes had in earlier versions."""

from __future__ import annotations

from functools import reduce

import pytest
from pydantic import ValidationError

from megatron_rl.config import load_recipe
from megatron_rl.config.recipe import REMOVED, without_removed
from tests.support.tiny import REPOSITORY

GRPO = REPOSITORY / "recipes" / "tiny" / "grpo.yaml"


def test_removed_keys_without_effect_are_read_over():
    """Resolved recipes of runs that earlier versions started hold every key with its value."""
    recipe = load_recipe(GRPO)
    values = recipe.model_dump(mode="json")
    for path, removed in REMOVED.items():
        *sections, key = path.split(".")
        reduce(dict.__getitem__, sections, values)[key] = removed.neutral
    assert without_removed(values) == recipe.model_dump(mode="json")
    assert type(recipe).model_validate(values) == recipe
    values["monitor"]["repetition_ngram"] = 8.0  # another type: not what a run has written
    with pytest.raises(ValidationError, match="repetition_ngram"):
        type(recipe).model_validate(values)
