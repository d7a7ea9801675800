"""The `precision` section and the learner's loss scaling: what is computed in which type, on both engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from megatron_rl.config.base import Section
from megatron_rl.errors import InputError
from megatron_rl.process.fp32_products import Fp32Product


class LossScaleConfig(Section):
    """Dynamic loss scaling of an fp16 learner; without effect on bf16 and fp32, which run unscaled."""

    initial: float = Field(32768.0, gt=0)
    """Scale of the first update."""
    minimum: float = Field(1.0, gt=0)
    """The scale never falls below this."""
    growth_interval: PositiveInt = 1000
    """Updates in a row without overflow after which the scale doubles."""
    backoff_factor: float = Field(0.5, gt=0, lt=1)
    """The scale is multiplied by this at an overflow."""
    hysteresis: PositiveInt = 1
    """From this many overflows on, counted since the scale last grew, each one lowers the scale. 1: every overflow."""

    @model_validator(mode="after")
    def _minimum_below_initial(self) -> LossScaleConfig:
        if self.minimum > self.initial:
            raise ValueError(f"minimum: {self.minimum} is above initial ({self.initial}); lower one or raise the other")
        return self


class PrecisionConfig(Section):
    """What both engines compute in fp32 whatever their dtypes are, and which weights the rollout engine gets.

    The dtypes themselves are `learner.dtype` and `rollout.dtype`; docs/precision.md has the pairs.
    """

    fp32_head: bool = False
    """Compute the logits in fp32 from the learner's weights, on both engines."""
    fp32_router: bool = False
    """Compute the router's logits and the experts' weights in fp32, on both engines. MoE models only."""
    allow_asymmetric: bool = False
    """Permit what makes mu another policy than pi: `rollout_fp32_head` and `rollout_fp32_router` unlike the two keys
    above, `rollout.top_p` below 1 and `rollout.top_k`."""
    rollout_fp32_head: bool | None = None
    """Ablation: fp32 logits on the rollout engine alone or the learner alone. null: as `fp32_head`."""
    rollout_fp32_router: bool | None = None
    """Ablation: fp32 router on the rollout engine alone or the learner alone. null: as `fp32_router`."""
    export_from: Literal["learner", "master"] = "learner"
    """Which weights the rollout engine gets when `rollout.dtype` differs from a 16-bit `learner.dtype`. learner: those
    that pi is computed with. master: the optimizer's fp32 copy, rounded once to `rollout.dtype`; mu then has weights
    that pi does not have. With equal dtypes both are the same numbers."""

    @property
    def rollout_head(self) -> bool:
        """fp32 logits on the rollout engine."""
        return self.fp32_head if self.rollout_fp32_head is None else self.rollout_fp32_head

    @property
    def rollout_router(self) -> bool:
        """fp32 router on the rollout engine."""
        return self.fp32_router if self.rollout_fp32_router is None else self.rollout_fp32_router

    @model_validator(mode="after")
    def _asymmetry_is_asked_for(self) -> PrecisionConfig:
        for name, rollout in (("fp32_head", self.rollout_head), ("fp32_router", self.rollout_router)):
            learner = getattr(self, name)
            if rollout != learner and not self.allow_asymmetric:
                raise ValueError(
                    f"rollout_{name}: {str(rollout).lower()} on the rollout engine but {str(learner).lower()} on the "
                    f"learner ({name}) makes mu and pi different policies; remove rollout_{name}, or set "
                    "allow_asymmetric: true for an ablation"
                )
        return self


def fp32_products(
    learner_dtype: str, rollout_dtype: str, precision: PrecisionConfig
) -> tuple[set[Fp32Product], set[Fp32Product]]:
    """What the learner, and what the rollout engine, needs of products of fp32 matrices; empty: it has none.

    Within one process all such products are of one kind (`process.fp32_products`).
    """
    learner = _products(learner_dtype, precision.fp32_head or precision.fp32_router)
    return learner, rollout_fp32_products(rollout_dtype, precision)


def rollout_fp32_products(dtype: str, precision: PrecisionConfig) -> set[Fp32Product]:
    """What a rollout engine of ``dtype`` needs of products of fp32 matrices."""
    return _products(dtype, precision.rollout_head or precision.rollout_router)


def only_product(kinds: set[Fp32Product]) -> Fp32Product | None:
    """The one that ``kinds`` has, None where there is none. Recipes that need both in one process are refused."""
    return "tf32" if "tf32" in kinds else "fp32" if kinds else None


def refuse_both_products(flag: str, dtypes: Iterable[str]) -> None:
    """Raise `InputError` where the ``dtypes`` of one command, from its ``flag``, have fp32 and tf32."""
    if {"fp32", "tf32"} <= set(dtypes):
        raise InputError(
            f"{flag}: fp32 and tf32, but a process multiplies all fp32 matrices alike, in full or as TF32; use a "
            "command for each"
        )


def _products(dtype: str, has_fp32_parts: bool) -> set[Fp32Product]:
    kinds: set[Fp32Product] = {"fp32"} if has_fp32_parts or dtype == "fp32" else set()
    return kinds | {"tf32"} if dtype == "tf32" else kinds
