"""Does the spurious signal J follow the gradient step? Its Pearson correlation over the run [OH §5, Eq 23]."""

from __future__ import annotations

import math


class StepCorrelation:
    """Running Pearson correlation of a metric with the step it was seen at, in constant memory.

    For J = Σ A (φ - 1) a value well above 0 says that training climbs the spurious part of the objective:
    `hacking/J_pcc`. Means and co-moments are updated one observation at a time (Welford), so that a resumed run
    continues bit for bit.
    """

    def __init__(self):
        self._count = 0
        self._mean_step = self._mean_value = 0.0
        self._step_2 = self._value_2 = self._cross = 0.0

    def observe(self, step: int, value: float) -> float | None:
        """The correlation of everything seen so far; None for fewer than 3 observations or where either does not
        vary. A value that is not finite is skipped."""
        if math.isfinite(value):
            self._count += 1
            from_step, from_value = step - self._mean_step, value - self._mean_value
            self._mean_step += from_step / self._count
            self._mean_value += from_value / self._count
            self._step_2 += from_step * (step - self._mean_step)
            self._value_2 += from_value * (value - self._mean_value)
            self._cross += from_step * (value - self._mean_value)
        scale = math.sqrt(self._step_2 * self._value_2)
        if self._count < 3 or scale == 0:
            return None
        return max(-1.0, min(1.0, self._cross / scale))

    def state_dict(self) -> dict[str, float]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, float]) -> None:
        assert state.keys() == vars(self).keys()
        vars(self).update(state)
