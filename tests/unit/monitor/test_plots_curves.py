"""Curves of runs: seeds grouped and averaged, and smoothing."""

from __future__ import annotations

import numpy as np

from megatron_rl.monitor.plots import group_runs, smoothed, smoothing_span
from megatron_rl.monitor.run_directory import JsonlSink
from tests.support.rounding import CLOSED_FORM, gamma, rounded


def test_seeds_are_grouped_and_averaged(tmp_path):
    for name, values in (("x-seed0", [1.0, 3.0]), ("x_s1", [3.0, 5.0, 7.0]), ("y", [0.0])):
        (tmp_path / name).mkdir()
        sink = JsonlSink(tmp_path / name / "metrics.jsonl")
        for step, value in enumerate(values):
            sink.write(step, {"m": value})
    groups = group_runs([str(tmp_path / "x-seed0"), str(tmp_path / "x_s1" / "metrics.jsonl"), f"mine={tmp_path / 'y'}"])
    assert [(group.label, len(group.runs)) for group in groups] == [("x", 2), ("mine", 1)]
    steps, values = groups[0].series("m")
    assert steps.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(values, [[1, 3, np.nan], [3, 5, 7]])


def test_smoothing_is_a_mean_of_what_was_seen():
    np.testing.assert_allclose(
        smoothed(np.array([[1.0, 1.0, np.nan, 1.0]]), 5), [[1, 1, np.nan, 1]], rtol=gamma(CLOSED_FORM)
    )
    # Weights 1/2 of the last, for span 3: (1/4 · 4 + 1/2 · 2 + 8) / (1/4 + 1/2 + 1)
    assert smoothed(np.array([4.0, 2.0, 8.0]), 3)[-1] == rounded(10 / 1.75)
    assert (smoothing_span(40, None), smoothing_span(400, None), smoothing_span(400, 1)) == (1, 20, 1)
