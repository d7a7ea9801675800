"""TensorBoard has verl's names beside ours, with the same numbers; metrics.jsonl has ours alone."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_rl.config.monitor import MonitorConfig
from megatron_rl.monitor import Monitor
from megatron_rl.types import Batch, Rollout
from tests.support.groups import any_response


def sequence(prompt: int, length: int, advantage: float, masked: int = 0) -> Rollout:
    mask = np.arange(length) >= masked
    return any_response("p/0", length, prompt=[1] * prompt, sampled=mask, advantage=advantage)


def test_the_same_numbers_under_both_names(tmp_path):
    batch = Batch(4, [sequence(3, 2, 1.0), sequence(5, 6, -0.5), sequence(4, 3, 9.0, masked=3)], [[0, 1, 2]])
    with Monitor(tmp_path, MonitorConfig(terminal="off", plots=False), {"num_steps": 1}, True) as monitor:
        monitor.record(
            4, {"perf/time/generate": 2.0, "perf/time/optimizer": 0.5, "perf/time/noise": 0.25}, None, batch, 7
        )
        monitor.record(5, {"perf/time/validate": 1.5})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    seen = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert seen["timing_s/gen"] == seen["perf/time/generate"] == [(4, 2.0)]
    assert seen["timing_s/update_actor"] == [(4, 0.75)]
    assert seen["timing_s/testing"] == [(5, 1.5)]
    assert seen["training/global_step"] == [(4, 5.0)]
    assert seen["training/epoch"] == [(4, 7.0)]
    assert [seen[f"prompt_length/{which}"][0][1] for which in ("mean", "max", "min")] == [4, 5, 3]
    assert seen["critic/advantages/mean"] == [(4, (2 * 1.0 - 6 * 0.5) / 8)]  # over trained tokens
    assert [seen[f"critic/advantages/{which}"][0][1] for which in ("max", "min")] == [1.0, -0.5]
    assert seen["perf/total_num_tokens"] == [(4, 23.0)]
    recorded = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert not [name for record in recorded for name in record if name.startswith(("timing_s", "prompt_length"))]


@pytest.mark.parametrize("batch", [None, Batch(0, [], []), Batch(0, [sequence(3, 2, 1.0, masked=2)], [[0]])])
def test_a_step_without_tokens_to_learn_from_is_recorded(batch, tmp_path):
    with Monitor(tmp_path, MonitorConfig(terminal="off", plots=False), {"num_steps": 1}, True) as monitor:
        assert monitor.record(0, {}, None, batch) == []
