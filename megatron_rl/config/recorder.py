"""The `recorder` section: which batches go to disk."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from megatron_rl.config.base import Section


class RecorderConfig(Section):
    record_batches: Literal["off", "on_alarm", "last_n", "all"] = "on_alarm"
    """Batches written to batches/ with tokens, log-probs, routes, rewards and versions, for `megatron-rl replay`.
    off: none. on_alarm: those of steps in which an alarm with record_batch goes off. last_n: those of the newest
    `keep` steps, and of such alarms. all: every step's."""
    keep: PositiveInt = 4
    """Batches that last_n keeps. From a checkpoint on, the weights of a step can be had again by repeating the
    updates in between: for that, at least as many as checkpoint.every."""
