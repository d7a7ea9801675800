"""What every section of a recipe shares."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Dtype = Literal["bf16", "fp16", "fp32"]


class Section(BaseModel):
    """A section of a recipe: unknown keys are errors, and defaults are checked like given values."""

    model_config = ConfigDict(extra="forbid", validate_default=True, use_attribute_docstrings=True)
