"""Times of phases and the time around them add up, also where a phase raises."""

from __future__ import annotations

import pytest

from megatron_rl.monitor import PhaseTimer
from tests.support.rounding import rounded


def test_phase_times_and_overhead_add_up():
    now = [100.0]
    timer = PhaseTimer(clock=lambda: now[0])

    def work(name: str, seconds: float, tokens: int = 0) -> None:
        with timer.phase(name) as span:
            span.tokens = tokens
            now[0] += seconds

    work("generate", 4.0, tokens=200)
    work("reward", 1.0)
    with timer.phase("update"):
        work("old_logprobs", 1.0)
        work("pack", 0.5)
        with timer.phase("forward_backward"):
            work("optimizer", 1.0)  # inside an engine phase: part of it, not counted twice
            now[0] += 2.0
    now[0] += 0.5
    metrics = timer.collect()
    assert metrics["perf/time/step"] == 10.0
    assert metrics["perf/time/update"] == 4.5
    assert metrics["perf/time/forward_backward"] == 3.0
    assert metrics["perf/tokens_per_s/generate"] == 50.0
    assert metrics["perf/overhead_frac"] == rounded(0.2)  # 10 - 4 - 1 - 3
    assert metrics["perf/peak_mem_gib"] > 0
    now[0] += 1.0  # between the steps: logging
    work("generate", 3.0)
    assert timer.collect()["perf/overhead_frac"] == rounded(0.25)


def test_a_phase_that_raises_is_still_timed():
    now = [0.0]
    timer = PhaseTimer(clock=lambda: now[0])

    def fail() -> None:
        with timer.phase("generate"):
            now[0] += 2.0
            raise KeyError("lost")

    with pytest.raises(KeyError):
        fail()
    assert timer.current is None
    assert timer.collect()["perf/time/generate"] == 2.0
