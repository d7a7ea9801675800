"""The learning rate of a run: length decay [arXiv 2602.01826, Algorithm 1], halved periodically, by response length.

The full schedule with warm-up needs no optimizer: it is for plans, plots and checks. Megatron's scheduler class is
extended with this logic in `megatron_rl.learner.optimizer`. Arithmetic on step numbers and response lengths, without
torch or Megatron.

`rate_factor` lowers the rate of one update by the effective sample size of its mini-batch [arXiv 2602.17616].
`bounded_factor` keeps it below a bound that falls with the age of the data [arXiv 2607.01083].

`SurgeDetector` detects a surge of the response length, which starts the decay in mode `auto` [arXiv 2602.01826, §4].

The paper reads the surge off a plot. This project's rule is:

* smoothed length ``s_t`` = median of the last `smoothing_steps` observed mean lengths,
* baseline ``b_t`` = smallest ``s`` among the last `baseline_window` observations,
* surge = ``s_t >= surge_ratio · b_t`` in `confirm_steps` consecutive observations, none before `min_step`.

The median ignores outliers that would shift an average. The trailing minimum follows both slow growth and decline.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from megatron_rl.config.learner import DetectorConfig, EffectiveSampleConfig, ScheduleConfig


class SurgeDetector:
    """Observes the mean response length of each step and reports the step of the first surge once."""

    def __init__(self, config: DetectorConfig) -> None:
        self.config = config
        self.surge_step: int | None = None
        self.length: float | None = None  # latest observation
        self.smoothed: float | None = None
        self.baseline: float | None = None
        self.streak = 0  # consecutive observations at or above surge_ratio · baseline
        self._last_step: int | None = None
        self._recent: deque[float] = deque(maxlen=config.smoothing_steps)
        self._window: deque[float] = deque(maxlen=config.baseline_window)

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | DetectorConfig | None) -> SurgeDetector:
        """Return a detector for a recipe's `schedule.detector`; None gives the defaults. Unknown keys are errors."""
        return cls(DetectorConfig.model_validate({} if config is None else config))

    def observe(self, step: int, mean_length: float) -> int | None:
        """Add the mean response length (tokens) of ``step``; return ``step`` if it confirms the surge, else None.

        Steps must not decrease; a step may repeat (an update skipped for overflow is repeated at the same step).
        Lengths that are not finite or not above 0 (an empty step) are ignored.
        """
        if self._last_step is not None and step < self._last_step:
            raise ValueError(f"step {step} comes after step {self._last_step}: observations must be in order")
        self._last_step = int(step)
        if not math.isfinite(mean_length) or mean_length <= 0:
            return None
        self.length = float(mean_length)
        self._recent.append(self.length)
        if len(self._recent) < self.config.smoothing_steps:
            return None  # with few values, a random low would become the baseline of `baseline_window` steps
        self.smoothed = float(median(self._recent))
        self._window.append(self.smoothed)
        self.baseline = min(self._window)
        above = self.ratio >= self.config.surge_ratio
        self.streak = self.streak + 1 if above else 0
        if self.surge_step is None and self.streak >= self.config.confirm_steps and step >= self.config.min_step:
            self.surge_step = int(step)
            return self.surge_step
        return None

    @property
    def ratio(self) -> float:
        """Smoothed length over baseline; 1 until enough lengths are observed."""
        return 1.0 if self.smoothed is None else self.smoothed / self.baseline

    def explain(self) -> str:
        """Return a sentence on the detector's current values and decision."""
        if self.smoothed is None:
            return f"fewer than {self.config.smoothing_steps} response lengths observed so far"
        c = self.config
        seen = (
            f"smoothed length {self.smoothed:.0f} (median of {c.smoothing_steps}) is {self.ratio:.2f} × the baseline "
            f"{self.baseline:.0f} (minimum over {c.baseline_window}); threshold {c.surge_ratio:g} ×, "
            f"{self.streak} of {c.confirm_steps} in a row"
        )
        return f"{seen}; " + (
            f"surge confirmed at step {self.surge_step}" if self.surge_step is not None else "no surge"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state that later decisions depend on, as JSON values."""
        return {
            "surge_step": self.surge_step,
            "streak": self.streak,
            "last_step": self._last_step,
            "recent": list(self._recent),
            "window": list(self._window),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. If the window is now shorter, keep the latest values."""
        self.surge_step, self.streak, self._last_step = state["surge_step"], state["streak"], state["last_step"]
        self._recent = deque(state["recent"], maxlen=self.config.smoothing_steps)
        self._window = deque(state["window"], maxlen=self.config.baseline_window)
        self.length = self._recent[-1] if self._recent else None
        self.smoothed = self._window[-1] if self._window else None
        self.baseline = min(self._window) if self._window else None


def rate_factor(effective_sample: float, config: EffectiveSampleConfig) -> float:
    """Return what the rate of the schedule is multiplied by: min(1, ρ / ρ_0), or its root; at most 1.

    ``effective_sample``: ρ = (Σ w)² / (B Σ w²) of the sequences' weights, in (0, 1].
    """
    share = min(1.0, effective_sample / config.reference)
    return share**0.5 if config.rule == "sqrt" else share


def bounded_factor(factor: float, lr: float, staleness: int, bound: float | None) -> float:
    """Return ``factor``, or the smaller one with which ``lr`` becomes c / S [arXiv 2607.01083, first constraint].

    ``bound`` is c = R_batch / G_upd, None for no bound; ``staleness`` is S, the largest age of the update's tokens in
    optimizer steps. S = 0 bounds nothing.
    """
    return factor if bound is None or staleness * lr == 0 else min(factor, bound / (staleness * lr))


def length_decay_lr(step: int, lr: float = 1e-6, min_lr: float | None = None, decay_period: int | None = 204) -> float:
    """Return η(t) = max(η0 · 2^−floor(t / T_decay), η_min) [arXiv 2602.01826, Algorithm 1].

    ``step`` is t, the absolute optimizer step counted from 0; ``lr`` is η0; ``min_lr`` is η_min, None for 0.1 · η0;
    ``decay_period`` is T_decay in steps, None for a constant rate. The halvings are exact in floating point.
    Raises ValueError for a negative step, a period below 1, or a floor above the peak.
    """
    if step < 0:
        raise ValueError(f"step {step}: optimizer steps are counted from 0")
    if decay_period is not None and decay_period < 1:
        raise ValueError(f"decay_period {decay_period}: must be at least 1 step, or None for a constant rate")
    floor = 0.1 * lr if min_lr is None else min_lr
    if not 0.0 <= floor <= lr:
        raise ValueError(f"min_lr {floor}: must lie between 0 and lr ({lr})")
    if decay_period is None:
        return float(lr)
    return max(math.ldexp(lr, -(step // decay_period)), float(floor))


class LengthDecay:
    """The state of a length-decay schedule: the current period and its origin.

    Modes (`ScheduleConfig.mode`): `manual` has a period from the start; `auto` sets it once, when the detector confirms
    a surge; `shadow` keeps the rate and computes `shadow_lr`.
    """

    def __init__(self, config: ScheduleConfig) -> None:
        assert config.mode is not None, "LengthDecay is for style length-decay, which the schema gives a mode"
        self.config = config
        self.detector = SurgeDetector(config.detector)
        self._latched_period: int | None = None

    @property
    def planned_period(self) -> int | None:
        """The period from the recipe or the surge, even if the mode does not apply it."""
        return self.config.decay_period if self.config.decay_period is not None else self._latched_period

    @property
    def decay_period(self) -> int | None:
        """The current period; None while the rate is constant."""
        return None if self.config.mode == "shadow" else self.planned_period

    def observe(self, step: int, mean_length: float) -> int | None:
        """Add the mean response length (tokens) of ``step``; return the surge step once, else None."""
        surge_step = self.detector.observe(step, mean_length)
        if surge_step is not None and self._latched_period is None:
            # Step 0 is observed twice if its first update overflowed. A surge at step 0 would give period 0.
            self._latched_period = max(1, round(self.config.period_factor * surge_step))
        return surge_step

    def lr(self, step: int, max_lr: float, min_lr: float) -> float:
        """Return the rate at ``step`` between ``max_lr`` and ``min_lr``."""
        return length_decay_lr(step + self.config.decay_phase, max_lr, min_lr, self.decay_period)

    def shadow_lr(self, step: int, max_lr: float, min_lr: float) -> float:
        """Return the rate of the planned period at ``step``; it differs from `lr` only in mode shadow."""
        return length_decay_lr(step + self.config.decay_phase, max_lr, min_lr, self.planned_period)

    def metrics(self, step: int) -> dict[str, float]:
        """Return `lr_sched/*` of ``step`` without the rates. -1 means "none yet".

        `length` is the latest length, `length_ema` its smoothed value, `length_baseline` the minimum for comparison.
        """
        detector, period, clock = self.detector, self.planned_period, step + self.config.decay_phase
        metrics = {
            "lr_sched/step": float(step),
            "lr_sched/surge_step": float(-1 if detector.surge_step is None else detector.surge_step),
            "lr_sched/decay_period": float(-1 if period is None else period),
            "lr_sched/decay_count": float(0 if self.decay_period is None else clock // self.decay_period),
        }
        if detector.length is not None:
            metrics["lr_sched/length"] = detector.length
        if detector.smoothed is not None:
            metrics["lr_sched/length_ema"] = detector.smoothed
            metrics["lr_sched/length_baseline"] = detector.baseline
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return mode, period, latched period and the detector's memory as JSON values."""
        return {
            "mode": self.config.mode,
            "decay_period": self.config.decay_period,
            "latched_period": self._latched_period,
            "detector": self.detector.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`.

        A latched period stays, even if the recipe has another factor; mode and a given `decay_period` come from the
        recipe.
        """
        self._latched_period = state["latched_period"]
        self.detector.load_state_dict(state["detector"])


class LearningRateSchedule:
    """The rate of each optimizer step under `ScheduleConfig`; equals Megatron's scheduler step by step.

    ``lr`` is the peak rate, ``total_steps`` the number of optimizer steps of the run.
    """

    def __init__(self, config: ScheduleConfig, lr: float, total_steps: int) -> None:
        self.config, self.max_lr, self.min_lr = config, lr, config.floor(lr)
        self.decay_steps = config.decay_steps or total_steps
        self.length_decay = LengthDecay(config) if config.style == "length-decay" else None

    def lr(self, step: int) -> float:
        """Return the rate at ``step`` (from 0)."""
        low, high, warmup = self.min_lr, self.max_lr, self.config.warmup_steps
        if warmup > 0 and step <= warmup:
            return self.config.warmup_from + (high - self.config.warmup_from) * float(step) / float(warmup)
        if self.length_decay is not None:
            return self.length_decay.lr(step, high, low)
        if self.config.style == "constant":
            return high
        if step > self.decay_steps:
            return low
        done = float(step - warmup) / float(self.decay_steps - warmup)
        left = 1.0 - done if self.config.style == "linear" else 0.5 * (math.cos(math.pi * done) + 1.0)
        return low + left * (high - low)

    def observe_length(self, step: int, mean_length: float) -> int | None:
        """Add the mean response length (tokens) of ``step``; return the surge step once, else None."""
        return None if self.length_decay is None else self.length_decay.observe(step, mean_length)
