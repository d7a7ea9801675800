"""The monitor's record over failures, resumes and ranks; gradient noise; times of phases."""

import json
import math
import os
import warnings

import numpy as np
import pytest

from megatron_rl.config.monitor import MonitorConfig
from megatron_rl.errors import Fault, OwnWarning
from megatron_rl.learner.gradient_noise import small_batch
from megatron_rl.monitor import Monitor, PhaseTimer, read_metrics
from megatron_rl.monitor.monitor import (
    GradientNoiseScale,
    NoiseMonitor,
    RunningMean,
    StepCorrelation,
    noise_scale_parts,
)
from megatron_rl.monitor.run_directory import encode_line
from tests.support.groups import group
from tests.support.rounding import rounded, standard_errors

SUMMARY = {"name": "unit", "num_steps": 30}

QUIET = {"terminal": "off", "plots": False, "tensorboard": False}


def monitor(folder, is_main=True, **keys) -> Monitor:
    return Monitor(folder, MonitorConfig(**{**QUIET, **keys}), SUMMARY, is_main)


def without_clocks(record: dict) -> dict:
    return {key: value for key, value in record.items() if key != "time" and not key.startswith("perf/")}


# -- metrics.jsonl


def test_resumed_run_continues_the_file_identically(tmp_path):
    rng = np.random.default_rng(0)
    data = [{"actor/grad_norm": rng.uniform(), "mismatch/rho_std": 1e-3 * rng.uniform()} for _ in range(30)]
    alarm = {"name": "up", "metric": "mismatch/rho_std", "statistic": "slope", "window": 5, "above": 0, "for_steps": 2}
    keys = {"growth_window": 6, "alarms": [alarm]}
    whole = monitor(tmp_path / "whole", **keys)
    for step, metrics in enumerate(data):
        whole.record(step, metrics)
    first = monitor(tmp_path / "cut", **keys)
    for step in range(17):
        first.record(step, data[step])
        if step == 11:
            state = json.dumps(first.state_dict())
    second = monitor(tmp_path / "cut", **keys)
    second.load_state_dict(json.loads(state))
    second.resume_at(12)
    for step in range(12, 30):
        second.record(step, data[step])
    expected = [without_clocks(record) for record in read_metrics(tmp_path / "whole")]
    assert [without_clocks(record) for record in read_metrics(tmp_path / "cut")] == expected
    assert any("mismatch/growth" in record for record in expected)
    assert sum(record["alarm/up"] for record in expected) > 0


# -- sinks


def test_a_failing_sink_warns_once_and_training_goes_on(tmp_path, monkeypatch):
    m = monitor(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.warns(UserWarning, match=r"metrics.jsonl failed .*No space left.* training goes on"):
            m.record(0, {"a": 1.0})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            m.record(1, {"a": 2.0})
    m.record(2, {"a": 3.0})
    assert [record["step"] for record in read_metrics(tmp_path)] == [0, 1, 2], (
        "what a full disk refused is written later"
    )


def test_event_files_are_real_and_purged_on_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = monitor(tmp_path, tensorboard=True)
    for step in range(6):
        first.record(step, {"actor/lr": 1.0 + step})
    first.close()
    second = monitor(tmp_path, tensorboard=True)
    second.resume_at(3)
    second.record(3, {"actor/lr": 30.0})
    second.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("actor/lr")] == [(0, 1.0), (1, 2.0), (2, 3.0), (3, 30.0)]


def test_only_the_main_rank_writes(tmp_path):
    other = monitor(tmp_path / "run", is_main=False)
    with other.phase("generate"):
        pass
    other.log("nothing")
    assert other.record(0, {"a": 1.0}) == []
    other.close()
    assert not (tmp_path / "run").exists()


def test_alarms_are_shared_from_the_main_rank(tmp_path):
    rule = {"name": "low", "metric": "reward", "below": 0.5, "then": ["stop"]}
    board: list = []
    main = Monitor(tmp_path, MonitorConfig(**QUIET, alarms=[rule]), SUMMARY, True, share=lambda e: board.append(e) or e)
    other = Monitor(tmp_path, MonitorConfig(**QUIET, alarms=[rule]), SUMMARY, False, share=lambda _: board[-1])
    events = main.record(0, {"reward": 0.1})
    assert [event.name for event in events] == ["low"]
    assert other.record(0, {"reward": 0.9}) == events


# -- what follows from the responses


def test_given_metrics_win_over_derived_ones(tmp_path):
    m = monitor(tmp_path)
    m.record(0, {"critic/rewards/mean": 0.125}, [group([1.0], [[1, 2]])])
    (record,) = read_metrics(tmp_path)
    assert record["critic/rewards/mean"] == 0.125
    assert record["response_length/mean"] == 2.0


# -- the surroundings


def test_steps_that_could_not_be_written_are_a_fault_and_stay_in_the_state(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    first = monitor(tmp_path)
    with pytest.warns(OwnWarning, match="metrics.jsonl failed"):
        first.record(0, {"a": 1.0})
    first.record(1, {"a": 2.0})
    with pytest.raises(Fault, match=r"metrics\.jsonl: 2 steps could not be written"):
        first.refuse_lost_steps()
    state = json.loads(json.dumps(first.state_dict()))
    (tmp_path / "metrics.jsonl").rmdir()
    second = monitor(tmp_path)
    second.load_state_dict(state | {"unwritten": [*state["unwritten"], encode_line(2, {"a": 3.0})]})
    second.resume_at(2)  # the third is recorded again
    second.refuse_lost_steps()
    assert [record["a"] for record in read_metrics(tmp_path)] == [1.0, 2.0]
    assert "unwritten" not in second.state_dict()


def quadratic_gradients(rng: np.random.Generator, num: int) -> tuple[np.ndarray, float]:
    """Per-sample gradients ``[num, D]`` of ½(θ−x)ᵀH(θ−x) with x ~ N(0, Σ), and the true tr(HΣH) / |Hθ|²."""
    dims = 50
    hessian = np.diag(np.linspace(0.5, 2.0, dims))
    theta, std = np.full(dims, 0.3), np.linspace(0.5, 3.0, dims)
    samples = rng.standard_normal((num, dims)) * std
    truth = float((np.diag(hessian) ** 2 * std**2).sum() / ((hessian @ theta) ** 2).sum())
    return (theta - samples) @ hessian, truth


@pytest.mark.parametrize("sizes", [[16] * 8, [8, 8, 16, 16, 16, 32, 32]], ids=["equal", "unequal"])
def test_noise_scale_of_a_quadratic(sizes):
    rng = np.random.default_rng(0)
    total, scale = sum(sizes), GradientNoiseScale(decay=0.99)
    seen = []
    for _ in range(300):
        gradients, truth = quadratic_gradients(rng, total)
        parts = np.split(gradients, np.cumsum(sizes)[:-1])
        sq_small, size = small_batch([float((part.mean(0) ** 2).sum()) for part in parts], sizes)
        estimate = scale.observe(sq_small, float((gradients.mean(0) ** 2).sum()), size, total)
        seen.append(noise_scale_parts(sq_small, float((gradients.mean(0) ** 2).sum()), size, total))
    # The estimate is a ratio of means, both with the weights of decay 0.99: its relative error is that of their ratio.
    grad_sq, trace = np.array(seen).T
    weights = 0.99 ** np.arange(300)
    draws = weights.sum() ** 2 / (weights**2).sum()
    error = standard_errors((trace / trace.mean() - grad_sq / grad_sq.mean()).std(ddof=1), draws)
    assert error < 0.2
    assert abs(estimate / truth - 1) < error


def test_noise_scale_parts_undo_the_expectations():
    grad_sq, trace = 3.0, 40.0
    parts = noise_scale_parts(grad_sq + trace / 8, grad_sq + trace / 64, 8, 64)
    assert parts == rounded((grad_sq, trace))
    with pytest.raises(ValueError, match="small one first"):
        noise_scale_parts(1.0, 1.0, 8, 8)


def test_noise_drowning_the_signal_is_not_a_number():
    scale = GradientNoiseScale(0.9)
    assert math.isnan(scale.observe(10.0, 0.5, 8, 64))


def test_noise_monitor_resumes_and_passes_over_overflows():
    inputs = [
        {
            "actor/grad_norm": g,
            "noise/sq_small": 2 + g,
            "noise/sq_big": 1.0,
            "noise/batch_small": 4,
            "noise/batch_big": 8,
        }
        for g in (1.0, math.inf, 3.0, 2.0)
    ]
    whole = NoiseMonitor(0.5)
    expected = [whole.observe(metrics) for metrics in inputs]
    first, second = NoiseMonitor(0.5), NoiseMonitor(0.5)
    observed = [first.observe(metrics) for metrics in inputs[:2]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert observed + [second.observe(metrics) for metrics in inputs[2:]] == expected
    # Weights 1/2, 1/4, 1/8 from the newest back, the overflow left out.
    assert expected[-1]["noise/grad_norm_ema"] == rounded((2 / 2 + 3 / 4 + 1 / 8) / (7 / 8))
    assert expected[1]["noise/grad_norm_ema"] == 1.0
    assert second.observe({"loss": 1.0}) == {}


def test_running_mean_has_no_start_bias():
    mean = RunningMean(0.99)
    assert math.isnan(mean.observe(math.nan))
    assert [mean.observe(5.0) for _ in range(3)] == rounded([5.0] * 3)


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
    assert timer.collect()["perf/time/generate"] == 2.0
