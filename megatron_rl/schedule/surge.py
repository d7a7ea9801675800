"""Detects a surge of the response length, which starts the decay in mode `auto` [arXiv 2602.01826, §4].

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

from megatron_rl.config.learner import DetectorConfig


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
