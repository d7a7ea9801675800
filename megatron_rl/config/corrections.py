"""Corrections of the training-inference mismatch in the `objective` section. Equations: `objective/corrections.py`.

Symbols: mu = probability under the rollout engine, po = under the learner at rollout weights, pi = under the learner
now; the ratio is rho = po/mu, or w = pi/mu where the objective is anchored on the rollout engine; A = advantage.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, NonNegativeFloat, PositiveFloat, field_validator, model_validator

from megatron_rl.config.base import Section

Level = Literal["token", "sequence", "geometric"]


class NoCorrection(Section):
    mode: Literal["none"] = "none"


class Is(Section):
    mode: Literal["is"] = "is"
    level: Level = "token"
    """Which ratio is the weight: the token's, the product over the sequence, or its geometric mean."""


class Tis(Section):
    mode: Literal["tis"] = "tis"
    level: Level = "token"
    """Which ratio is the weight: the token's, the product over the sequence, or its geometric mean."""
    cap: PositiveFloat = 2.0
    """C: the weight is min(ratio, C). 2 in arXiv 2602.01826, 3 in arXiv 2510.26788."""


class _Masking(Section):
    renormalize: bool = False
    """false: a dropped token keeps its place in the denominators. true: it leaves them."""


class Mis(_Masking):
    mode: Literal["mis"] = "mis"
    level: Level = "token"
    """Which ratio is the weight: the token's, the product over the sequence, or its geometric mean."""
    cap: PositiveFloat = 3.0
    """C: the weight is the ratio where it is at most C, else 0 (3 with the sequence level in arXiv 2510.26788)."""
    lower: PositiveFloat | None = None
    """Ratios below this are dropped too. null: one-sided, as the papers write it."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Mis:
        if self.lower is not None and self.lower >= self.cap:
            raise ValueError(f"lower {self.lower:g} is not below cap {self.cap:g}: every token would be dropped")
        return self


class IcePop(_Masking):
    mode: Literal["icepop"] = "icepop"
    level: Literal["token"] = "token"
    """IcePop is defined on tokens."""
    lower: PositiveFloat = 0.5
    """Tokens whose ratio is below are dropped."""
    upper: PositiveFloat = 5.0
    """Tokens whose ratio is above are dropped."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> IcePop:
        if self.lower >= self.upper:
            raise ValueError(
                f"lower {self.lower:g} is not below upper {self.upper:g}: every token would be dropped; "
                f"the bounds look reversed (lower: {self.upper:g}, upper: {self.lower:g}?)"
            )
        return self


class Reject(_Masking):
    mode: Literal["reject"] = "reject"
    statistic: Literal["geometric", "seq_mean_k1", "seq_mean_k3", "max_k3"] = "seq_mean_k3"
    """What a sequence is judged by. `geometric` and `seq_mean_k1` are compared with bounds on the ratio scale (1 is
    agreement): lower <= exp(mean log rho) <= upper. `seq_mean_k3` and `max_k3` are divergences: 0 is agreement."""
    lower: NonNegativeFloat | None = None
    """Sequences with a smaller statistic are dropped. null: no bound."""
    upper: PositiveFloat | None = None
    """Sequences with a larger statistic are dropped. null: no bound."""

    @field_validator("statistic", mode="before")
    @classmethod
    def _other_spellings(cls, statistic: Any) -> Any:
        others = {"geometric_mean": "geometric", "seq_max_k3": "max_k3"}
        return others.get(statistic, statistic) if isinstance(statistic, str) else statistic

    @property
    def on_ratio_scale(self) -> bool:
        return self.statistic in ("geometric", "seq_mean_k1")

    @model_validator(mode="after")
    def _bounds_make_sense(self) -> Reject:
        if self.lower is None and self.upper is None:
            raise ValueError("neither lower nor upper is given: nothing would be rejected; set at least one")
        if self.lower is not None and self.upper is not None and self.lower >= self.upper:
            raise ValueError(f"lower {self.lower:g} is not below upper {self.upper:g}: every sequence would be dropped")
        if self.on_ratio_scale and self.lower == 0:
            raise ValueError("lower 0 on the ratio scale bounds nothing; leave it out")
        return self


class Veto(_Masking):
    mode: Literal["veto"] = "veto"
    threshold: PositiveFloat = 1e-4
    """A sequence with any token ratio below this is dropped."""


class Opsm(_Masking):
    mode: Literal["opsm"] = "opsm"
    delta: PositiveFloat = 1e-4
    """A sequence with A < 0 is dropped where mean_t(log po - log pi) exceeds this."""


Correction = Annotated[
    NoCorrection | Is | Tis | Mis | IcePop | Reject | Veto | Opsm,
    Discriminator("mode"),
]
WEIGHTING_MODES = ("is", "tis", "mis", "icepop")
