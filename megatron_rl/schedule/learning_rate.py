"""The full learning-rate schedule of a run with warm-up, without an optimizer: for plans, plots and checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_rl.config.learner import ScheduleConfig
from megatron_rl.schedule.length_decay import LengthDecay


class LearningRateSchedule:
    """The rate of each optimizer step under `ScheduleConfig`; equals Megatron's scheduler step by step.

    ``lr`` is the peak rate, ``total_steps`` the number of optimizer steps of the run.
    """

    def __init__(self, config: ScheduleConfig, lr: float, total_steps: int) -> None:
        self.config, self.max_lr, self.min_lr = config, lr, config.floor(lr)
        self.decay_steps = config.decay_steps or total_steps
        self.length_decay = LengthDecay(config) if config.style == "length-decay" else None

    def lr(self, step: int, max_lr: float | None = None, min_lr: float | None = None) -> float:
        """Return the rate at ``step`` (from 0). ``max_lr`` and ``min_lr``: peak and floor of a parameter group."""
        high = self.max_lr if max_lr is None else max_lr
        low = self.min_lr if min_lr is None else min_lr
        warmup = self.config.warmup_steps
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

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values; empty for styles without memory."""
        return {} if self.length_decay is None else {"length_decay": self.length_decay.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        if self.length_decay is not None and "length_decay" in state:
            self.length_decay.load_state_dict(state["length_decay"])
