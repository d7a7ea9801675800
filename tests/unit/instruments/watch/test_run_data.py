"""Metrics by name are those of metrics.jsonl; curves of many steps are few points that lose no extreme."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.instruments.watch.run import Columns, WatchedRun, decimated
from megatron_rl.monitor.run_directory import encode_line, read_metrics
from tests.support.written_run import WrittenRun


def columns_of(*lines: str | bytes) -> Columns:
    columns = Columns()
    for line in lines:
        columns.add_line(line.encode() if isinstance(line, str) else line)
    return columns


def test_they_hold_what_read_metrics_reads(tmp_path):
    written = WrittenRun(tmp_path / "run")
    for step in range(5):
        written.step(
            step, **({"val/reward/mean": 0.5} if step % 2 == 0 else {}), odd=math.nan if step == 3 else math.inf
        )
    run = WatchedRun("run", tmp_path / "run")
    run.refresh()
    records = read_metrics(tmp_path / "run")
    assert set(run.columns.names) == {name for record in records for name in record} - {"step", "time"}
    for record in records:
        for name, value in record.items():
            if name not in ("step", "time"):
                assert run.columns.at(name, record["step"]) == pytest.approx(value, rel=0, abs=0, nan_ok=True), name
    assert run.columns.at("val/reward/mean", 1) is None
    assert run.columns.latest("val/reward/mean") == 0.5
    assert run.columns.last_time == records[-1]["time"]


def test_a_step_that_is_recorded_again_replaces_it_and_all_later():
    columns = columns_of(*(encode_line(step, {"a": step, "b": 1}) for step in range(4)), encode_line(2, {"a": 20}))
    rows, steps, values = columns.series("a")
    assert rows.tolist() == [0, 1, 2]
    assert steps.tolist() == [0, 1, 2]
    assert values.tolist() == [0, 1, 20]
    assert columns.series("b")[1].tolist() == [0, 1]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        '{"step": 1, "a": "x"}',
        '{"a": 1}',
        '{"step": 1, "a": true}',
        b"\xff",
        '{"step": 99999999999999999999}',
    ],
)
def test_a_line_that_is_no_record_is_counted_and_left_out(line):
    columns = columns_of(encode_line(0, {"a": 1}), line, encode_line(1, {"a": 2}))
    assert columns.broken_lines == 1
    assert columns.series("a")[2].tolist() == [1, 2]
    columns.keep_lines(1)
    assert columns.broken_lines == 0
    assert columns.series("a")[2].tolist() == [1]


def test_a_resumed_run_shows_the_steps_of_its_second_life(tmp_path):
    written = WrittenRun(tmp_path / "run")
    for step in range(8):
        written.step(step, reward=0.1)
    run = WatchedRun("run", tmp_path / "run")
    run.refresh()
    version = run.version
    written.resume_at(5)
    written.step(5, reward=0.9)
    run.refresh()
    assert run.version > version
    assert run.columns.last_step == 5
    assert run.columns.series("critic/rewards/mean")[2].tolist() == [0.1] * 5 + [0.9]


def test_a_replaced_step_is_there_again_once_its_replacement_is_cut(tmp_path):
    """A copy put together by hand: the step's second line goes, and the first one stands."""
    run = WatchedRun("run", tmp_path)
    file = tmp_path / "metrics.jsonl"
    lines = [encode_line(step, {"a": value}).encode() for step, value in ((0, 1), (1, 2), (1, 3))]
    file.write_bytes(b"".join(lines))
    run.refresh()
    assert run.columns.series("a")[2].tolist() == [1, 3]
    file.write_bytes(b"".join(lines[:2]))
    run.refresh()
    assert run.columns.series("a")[2].tolist() == [1, 2]


def test_axes_add_up_what_steps_took():
    steps = [{"perf/time/step": 1800, "perf/rollout_tokens": 250_000}, {"a": 1}, {"perf/time/step": 3600}]
    columns = columns_of(*(encode_line(step, values) for step, values in enumerate(steps)))
    assert columns.along("step").tolist() == [0, 1, 2]
    assert columns.along("time").tolist() == [0.5, 0.5, 1.5]
    assert columns.along("tokens").tolist() == [0.25, 0.25, 0.25]


numbers = st.one_of(st.floats(-1e6, 1e6), st.sampled_from([math.nan, math.inf, -math.inf]))


@given(st.lists(numbers, min_size=1, max_size=60), st.integers(2, 20))
def test_points_are_means_between_the_extremes_of_their_neighbours(values, points):
    x = np.arange(len(values), dtype=float)
    points_left = decimated(x, np.array(values), points)
    json.dumps(points_left, allow_nan=False)
    assert points_left["num_holes"] == sum(not math.isfinite(value) for value in values)
    if len(values) <= points:
        assert points_left["x"] == x.tolist()
        assert [value is None for value in points_left["y"]] == [not math.isfinite(value) for value in values]
        return
    assert len(points_left["x"]) == points
    assert points_left["x"][-1] == len(values) - 1
    start = 0
    for i, end in enumerate(points_left["x"]):
        group = [value for value in values[start : int(end) + 1] if math.isfinite(value)]
        start = int(end) + 1
        got = [points_left[name][i] for name in ("low", "y", "high")]
        if not group:
            assert got == [None, None, None]
        else:  # six digits of each
            wanted = [min(group), math.fsum(group) / len(group), max(group)]
            assert got == pytest.approx(wanted, rel=1e-5, abs=1e-5 * max(map(abs, group)) + 1e-300)


def test_a_pause_between_two_lives_of_a_run_is_no_step():
    times = [0, 2, 4, 6, 1000, 1002, 1006]
    columns = columns_of(*(f'{{"step": {step}, "time": {at}}}' for step, at in enumerate(times)))
    assert columns.seconds_a_step() == (2 + 2 + 2 + 2 + 4) / 5
    assert columns.seconds_a_step(1) == 4
    assert columns_of('{"step": 0, "time": 5}').seconds_a_step() is None


@pytest.mark.parametrize("time", ["NaN", "Infinity", "-Infinity"])
def test_a_time_that_is_no_number_is_that_of_the_row_before(time):
    columns = columns_of('{"step": 0, "time": 5.0}', f'{{"step": 1, "time": "{time}"}}', '{"step": 2, "time": 7.0}')
    assert columns.seconds_a_step() == 1.0
    assert columns_of(f'{{"step": 0, "time": "{time}"}}').last_time == 0.0
