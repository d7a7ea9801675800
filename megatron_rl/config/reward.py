"""The `reward` section: how a response earns its reward."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from megatron_rl.config.base import LookedUp, Section

BUILTIN_REWARDS = ("math", "modsum", "exact")
_CUSTOM = re.compile(r"(?:.+\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*")


def _known(name: str) -> str:
    if name in BUILTIN_REWARDS or _CUSTOM.fullmatch(name):
        return name
    raise ValueError(
        f"unknown reward {name!r}: allowed are {', '.join(BUILTIN_REWARDS)}, by_source, "
        "path/to/file.py:function and package.module:function"
    )


class OverlongConfig(Section):
    """Soft punishment of length [DAPO]: R += min(-(T - (L - buffer)) / buffer · penalty, 0)."""

    buffer: PositiveInt
    """Tokens before the maximum response length L over which the punishment grows from 0 to `penalty`."""
    penalty: PositiveFloat = 1.0
    """Punishment at the maximum length."""


class MaxErrorFracConfig(Section):
    """Share of a batch's responses whose scoring may fail. Above it the run is saved and ends with status 1."""

    first: float = Field(0.5, ge=0, le=1)
    """Of the first batch: a function that does not work at all fails everywhere."""
    later: float = Field(0.1, ge=0, le=1)
    """Of every later batch. 1: never end for it."""


class RewardConfig(Section):
    name: Annotated[str, LookedUp(is_function=True)] = "math"
    """`math`: equal to the gold answer as mathematics. `exact`: the same string. `modsum`: the digit-sum task.
    `by_source`: chosen per prompt. `file.py:function` or `module:function`: your own, run in worker processes, called
    as f(response, answer), or as f(data_source, solution_str, ground_truth, extra_info) if it names these arguments.
    A file, like all that a recipe names to be read, is looked up from the recipe's folder first, then from the working
    directory."""
    by_source: Annotated[dict[str, str], LookedUp(is_function=True)] = {}
    """With `name: by_source`: reward of each `data_source`, spelled like `name`. Every source needs an entry."""
    num_workers: PositiveInt = 2
    """Worker processes for `math` and custom rewards. The other rewards are computed in place."""
    timeout_s: float = Field(5.0, ge=0.1)
    """Processor seconds that one response may cost; then it scores 0, counted in `reward/timeouts`. One that
    waits without computing is given four times this on the clock."""
    memory_limit_mib: PositiveInt = Field(1024, ge=256)
    """Memory that one worker may add to what it holds at start; a response that needs more scores 0, also
    counted in `reward/timeouts`."""
    max_error_frac: MaxErrorFracConfig = MaxErrorFracConfig()
    """How many responses may fail to be scored: their reward function raised or returned no number, or went over its
    limits. Each scores 0; log.txt has an example of each kind."""
    overlong: OverlongConfig | None = None
    """Soft punishment of responses close to the length limit. null: none."""
    mask_truncated: bool = False
    """Leave responses cut at the length limit out of the loss. They keep their place in their group's baseline."""

    @field_validator("name")
    @classmethod
    def _name_is_known(cls, name: str) -> str:
        return name if name == "by_source" else _known(name)

    @field_validator("by_source")
    @classmethod
    def _names_are_known(cls, by_source: dict[str, str]) -> dict[str, str]:
        return {source: _known(name) for source, name in by_source.items()}

    @model_validator(mode="after")
    def _by_source_is_used(self) -> RewardConfig:
        if (self.name == "by_source") != bool(self.by_source):
            raise ValueError(
                "`name: by_source` and the mapping `by_source` go together: "
                f"found name: {self.name} with {len(self.by_source)} entries"
            )
        return self
