"""The recipe: one file that says everything about a run."""

from __future__ import annotations

from pydantic import model_validator

from megatron_rl.config.rules import section_problems
from megatron_rl.config.sections import RecipeSections


class Recipe(RecipeSections):
    """All sections (`config.sections`), and the promise that they go together (`config.rules`)."""

    @model_validator(mode="after")
    def _sections_fit(self) -> Recipe:
        if found := section_problems(self):
            raise ValueError("\n".join(found))
        return self
