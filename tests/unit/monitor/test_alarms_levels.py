"""Alarms on the level of a metric: its mean, its share of the best, its multiple of the start; told at the end."""

from __future__ import annotations

import json

from megatron_rl.config.monitor import LEVELS, AlarmRule, MonitorConfig
from megatron_rl.monitor import Monitor
from megatron_rl.monitor.alarms import Alarms


def went_off(rule: AlarmRule, values: list[float]) -> list[int]:
    alarms = Alarms([rule])
    return [event.step for step, value in enumerate(values) for event in alarms.observe(step, {rule.metric: value})]


def rule(**keys) -> AlarmRule:
    return AlarmRule(name="rule", metric="m", **keys)


def test_the_mean_of_a_window_is_held_against_a_bound():
    # Means of three: -, -, 1, 2, 3.
    assert went_off(rule(statistic="mean", window=3, above=1.9), [0.0, 0.0, 3.0, 3.0, 3.0]) == [3]
    assert went_off(rule(statistic="mean", window=3, above=0.9), [9.0, 9.0]) == []


def test_of_best_is_the_share_of_the_highest_mean():
    # Means of two: 1, 4, 4, 2, 1.5; shares of the highest so far: 1, 1, 1, 0.5, 0.375.
    values = [1.0, 1.0, 7.0, 1.0, 3.0, 0.0]
    assert went_off(rule(statistic="of_best", window=2, below=0.51), values) == [4]
    assert went_off(rule(statistic="of_best", window=2, below=0.49), values) == [5]


def test_below_zero_the_range_counts_and_noise_is_no_fall():
    # The bottom is the lowest value less three times the median move: -5 - 3 × 2; means of two: -1, -3.
    values = [-1.0, -1.0, -5.0]
    assert went_off(rule(statistic="of_best", window=2, below=0.81), values) == [2]
    assert went_off(rule(statistic="of_best", window=2, below=0.8), values) == []
    noise = [-0.5 + 0.05 * ((7 * step) % 5 - 2) for step in range(100)]
    assert went_off(rule(statistic="of_best", window=3, below=0.5), noise) == []


def test_of_start_is_a_multiple_of_the_runs_first_window():
    # Medians of three: 2, 2, 8, 8; the first is the start.
    values = [1.0, 2.0, 9.0, 1.0, 8.0, 8.0]
    assert went_off(rule(statistic="of_start", window=3, above=3.9), values) == [4]
    assert went_off(rule(statistic="of_start", window=3, above=4.0), values) == []
    assert went_off(rule(statistic="of_start", window=1, above=0.5), [0.0, 5.0]) == []


def collapsing(step: int) -> dict[str, float]:
    return {"critic/rewards/mean": 0.8 if step < 20 else 0.1, "groups/no_signal_frac": 0.0, "actor/grad_norm": 0.5}


def test_a_run_says_at_its_end_what_went_off_also_after_a_resume(tmp_path):
    config = MonitorConfig(terminal="off", plots=False, tensorboard=False)
    with Monitor(tmp_path, config, {}, True, levels=LEVELS) as monitor:
        for step in range(40):
            monitor.record(step, collapsing(step))
        state = monitor.state_dict()
    assert "alarms went off, first at: reward-break (step 21)" in (tmp_path / "log.txt").read_text()
    # A silent rule has a metric only where it goes off.
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if any(key.startswith("alarm/") for key in line)] == [21, 23]
    with Monitor(tmp_path / "on", config, {}, True, levels=LEVELS) as again:
        again.load_state_dict(json.loads(json.dumps(state)))
    assert "reward-break (step 21)" in (tmp_path / "on" / "log.txt").read_text()
