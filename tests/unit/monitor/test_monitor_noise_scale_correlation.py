"""The correlation of J with the step, over a run and over a resumed run."""

from __future__ import annotations

import numpy as np

from megatron_rl.monitor.monitor import StepCorrelation
from tests.support.rounding import rounded


def test_it_is_the_pearson_correlation_and_survives_a_restart():
    rng = np.random.default_rng(0)
    steps = np.arange(1000, 1060)
    values = 1e6 + 0.01 * steps + rng.normal(size=60)
    straight, first, second = StepCorrelation(), StepCorrelation(), StepCorrelation()
    observed = [straight.observe(int(s), v) for s, v in zip(steps, values)]
    for s, v in zip(steps[:30], values[:30]):
        first.observe(int(s), v)
    second.load_state_dict(first.state_dict())
    resumed = [second.observe(int(s), v) for s, v in zip(steps[30:], values[30:])]
    assert observed[:2] == [None, None]
    assert resumed == observed[30:]
    spread = 1e6  # over deviations near 1: a mean of values near 1e6 loses that many digits of theirs
    for n in (3, 17, 60):
        assert observed[n - 1] == rounded(np.corrcoef(steps[:n], values[:n])[0, 1], roundings=8 * n, scale=spread)


def test_constant_and_broken_values():
    correlation = StepCorrelation()
    assert [correlation.observe(step, 2.0) for step in range(5)] == [None] * 5
    before = correlation.state_dict()
    assert correlation.observe(5, float("nan")) is None
    assert correlation.state_dict() == before
    assert correlation.observe(6, 3.0) > 0
