"""The `precision` section and the learner's loss scaling: what is computed in which type, on both engines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from megatron_rl.config.base import Section


class LossScaleConfig(Section):
    """Dynamic loss scaling of an fp16 learner; without effect on bf16 and fp32, which run unscaled."""

    initial: float = Field(32768.0, gt=0)
    """Scale of the first update."""
    minimum: float = Field(1.0, gt=0)
    """The scale never falls below this."""
    growth_factor: float = Field(2.0, gt=1)
    """The scale is multiplied by this after `growth_interval` updates in a row without overflow."""
    growth_interval: PositiveInt = 1000
    """Updates in a row without overflow after which the scale grows."""
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

    The dtypes themselves are `learner.dtype` and `rollout.dtype`; all nine pairs are legal.
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
