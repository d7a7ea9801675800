"""The monitor's record over failures, resumes and ranks: sinks that fail, steps that could not be written."""

from __future__ import annotations

import json
import os
import warnings

import numpy as np
import pytest

from megatron_rl.config.monitor import MonitorConfig
from megatron_rl.errors import Fault, OwnWarning
from megatron_rl.monitor import Monitor, read_metrics
from megatron_rl.monitor.run_directory import encode_line
from tests.support.groups import group

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
