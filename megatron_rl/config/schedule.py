"""The `schedule` section: how the learning rate and the weight decay move over optimizer steps."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from megatron_rl.config.base import Section


class DetectorConfig(Section):
    """When a rise of the mean response length counts as a surge (`tools.dev.tune_surge_detector` prints why so)."""

    smoothing_steps: PositiveInt = 7
    """The length is smoothed by the median of this many observations: outliers shorter than half of it vanish."""
    surge_ratio: float = Field(2.0, gt=1)
    """A surge is a smoothed length of at least this many times the baseline. The paper reads the surge off a plot as a
    threefold rise; with 2.0 its curves (from 1000 to 3000 tokens and more) are seen while they rise, and the period
    comes out near its 204 and 160. With 3.0 a curve that ends at 3000 may be seen late or never."""
    confirm_steps: PositiveInt = 2
    """Consecutive observations (one per rollout batch) that must pass before the surge is believed."""
    baseline_window: PositiveInt = 80
    """The baseline is the smallest smoothed length among this many latest observations."""
    min_step: NonNegativeInt = 20
    """No surge is reported before this optimizer step: the first steps of a run say little."""


class ScheduleConfig(Section):
    """Steps are optimizer steps counted from 0; one that is skipped for overflow does not count."""

    style: Literal["constant", "linear", "cosine", "length-decay"] = "constant"
    """What follows the warm-up: the peak rate for ever; a line or a half cosine down to `min_lr`;
    or halving every `decay_period` steps (arXiv 2602.01826, Algorithm 1)."""
    min_lr: float | None = Field(None, ge=0)
    """Floor of the decay; null: a tenth of learner.optimizer.lr."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up from `warmup_from` to the peak rate, before anything else."""
    warmup_from: float = Field(0.0, ge=0)
    """Rate of step 0 where there is a warm-up."""
    decay_steps: PositiveInt | None = None
    """Step at which linear and cosine reach `min_lr`; null: the last step of the run."""
    mode: Literal["manual", "auto", "shadow"] | None = None
    """Length-decay only. manual: `decay_period` is given. auto: constant until the response length surges at step
    t_s, then decay_period = round(period_factor · t_s). shadow: constant, and the rate that manual (where
    `decay_period` is given) or auto would have set is logged as lr_sched/shadow_lr."""
    decay_period: PositiveInt | None = None
    """Steps between halvings, counted from step 0 (T_decay)."""
    decay_phase: NonNegativeInt = 0
    """Length-decay only: the halvings come this many steps earlier, at n · T_decay − decay_phase. An instrument: a
    clock of the same period that no surge has set."""
    period_factor: float = Field(1.8, gt=1)
    """T_decay over the step of the surge, in mode auto; above 1, so that the first halving comes after the surge."""
    detector: DetectorConfig = DetectorConfig()
    """When a surge is believed."""
    weight_decay_end: float | None = Field(None, ge=0)
    """Weight decay reached at the last step, from learner.optimizer.weight_decay; null: it stays constant."""
    weight_decay_style: Literal["linear", "cosine"] = "linear"
    """How the weight decay moves where `weight_decay_end` is given."""

    @model_validator(mode="after")
    def _keys_of_one_style(self) -> ScheduleConfig:
        if self.style != "length-decay":
            for key in ("mode", "decay_period"):
                if getattr(self, key) is not None:
                    raise ValueError(
                        f"{key}: {getattr(self, key)!r} has no effect with style {self.style!r}; "
                        f"remove it or set style: length-decay"
                    )
            if self.decay_phase:
                raise ValueError(f"decay_phase: {self.decay_phase} has no effect with style {self.style!r}; remove it")
        elif self.mode is None:
            raise ValueError("mode: missing; style length-decay needs mode manual, auto or shadow")
        elif self.mode == "manual" and self.decay_period is None:
            raise ValueError("decay_period: missing; mode manual needs it (204 in the paper's main run)")
        elif self.mode == "auto" and self.decay_period is not None:
            raise ValueError("decay_period: mode auto finds it from the response length; remove it or set mode: manual")
        if self.decay_steps is not None and self.style not in ("linear", "cosine"):
            raise ValueError(f"decay_steps: has no effect with style {self.style!r}; remove it")
        if self.decay_period is not None and self.warmup_steps >= self.decay_period:
            raise ValueError(
                f"warmup_steps: {self.warmup_steps} leaves no step at the peak rate before the first halving at step "
                f"{self.decay_period} (decay_period); shorten the warm-up"
            )
        return self

    def floor(self, lr: float) -> float:
        """The smallest rate that the decay reaches from peak rate ``lr``."""
        return 0.1 * lr if self.min_lr is None else self.min_lr
