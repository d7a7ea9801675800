"""Figures of runs: every panel, overlays that can be read, any title, curves of seeds."""

import re

import numpy as np
import pytest
from matplotlib.text import Text

from megatron_rl.monitor.plots import (
    PANELS,
    Curves,
    disagreement,
    draw_disagreement,
    draw_figure,
    escaped,
    group_runs,
    smoothed,
    smoothing_span,
)
from megatron_rl.monitor.run_directory import JsonlSink
from tests.support.rounding import CLOSED_FORM, gamma, rounded


def test_every_panel_can_be_drawn(tmp_path):
    names = {"val/reward/mean", "val/aime/avg@8", "val/aime/pass@8", "perf/time/generate", "perf/time/step"}
    names |= {name for panel in PANELS for name in panel.metrics if re.fullmatch(r"[\w/]+", name)}
    factors = {name: 1 + number for number, name in enumerate(sorted(names))}  # equal curves are drawn once
    records = [{"step": s} | {name: f * 10.0 ** (s - 2) for name, f in factors.items()} for s in range(5)]
    figure = draw_figure([Curves("all", [records])], "all")
    assert [axes.get_title() for axes in figure.axes] == [panel.title for panel in PANELS]
    for axes, panel in zip(figure.axes, PANELS, strict=True):
        assert axes.get_yscale() == ("log" if panel.is_log else "linear")
        assert len(axes.lines) == {"validation": 3}.get(panel.title, len(panel.metrics))
        ydata = axes.lines[0].get_ydata()
        assert ydata / ydata[0] == rounded(10.0 ** np.arange(5))


def test_zeros_are_gaps_on_a_logarithmic_axis():
    """Drawn as the axis' lower edge, a run without mismatch falls to a value that nobody measured."""
    (panel,) = (panel for panel in PANELS if panel.title == "mismatch: std of rho")
    records = [{"step": step, panel.metrics[0]: value} for step, value in enumerate([1e-4, 0.0, 1e-2, 1.0])]
    (axes,) = draw_figure([Curves("a", [records])], "a").axes
    assert axes.get_yscale() == "log"
    drawn = axes.lines[0].get_transform().transform_path(axes.lines[0].get_path()).vertices[:, 1]
    assert np.isfinite(drawn).tolist() == [True, False, True, True]


def test_crowded_panels_keep_the_largest(tmp_path):
    records = [{"step": 0} | {f"perf/time/phase{i}": float(i) for i in range(9)}]
    one = draw_figure([Curves("a", [records])], "a")
    assert [line.get_ydata()[0] for line in one.axes[0].lines] == [8, 7, 6, 5, 4]
    two = draw_figure([Curves("a", [records]), Curves("b", [records])], "a")
    assert [line.get_ydata()[0] for line in two.axes[0].lines] == [8, 8, 7, 7]
    legend = two.axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["perf/time/phase8", "perf/time/phase7"]
    assert [text.get_text() for text in two.legends[0].get_texts()] == ["a", "b"]


def overlay(arms: int = 4, seeds: int = 3, steps: int = 120) -> list[Curves]:
    """Arms of noisy seeds, with a metric that is 0 throughout."""
    draw = np.random.default_rng(0)
    names = ("critic/rewards/mean", "actor/entropy", "actor/grad_norm", "perf/time/generate", "perf/time/update")
    groups = []
    for arm in range(arms):
        runs = []
        for _ in range(seeds):
            values = {name: 1 + arm + np.arange(steps) / steps + draw.normal(0, 0.3, steps) for name in names}
            values |= dict.fromkeys(("val/reward/mean", "val/a/pass@1"), values["critic/rewards/mean"])
            values |= {"actor/pg_clipfrac": np.zeros(steps), "actor/lr": np.full(steps, 1e-4)}
            values |= {"perf/time/step": np.full(steps, 36.0), "perf/rollout_tokens": np.full(steps, 5e5)}
            runs.append([{"step": s} | {name: float(v[s]) for name, v in values.items()} for s in range(steps)])
        groups.append(Curves(f"arm {arm}", runs))
    return groups


def test_an_overlay_can_be_read():
    """No legend over a curve, nothing that is 0, ticks that fit, smooth curves over the values of one seed."""
    groups = overlay()
    del groups[0].runs[0][100:]  # a seed that still runs
    figure = draw_figure(groups, "four arms, three seeds")
    figure.draw_without_rendering()
    by_title = {axes.get_title(): axes for axes in figure.axes}
    assert "clip fraction" not in by_title
    legends = [legend for axes in figure.axes if (legend := axes.get_legend()) is not None] + figure.legends
    assert len(legends) == 3
    for legend in legends:
        box = legend.get_window_extent()
        assert not any(box.overlaps(axes.get_window_extent()) for axes in figure.axes)
        assert figure.bbox.x0 <= box.x0
        assert box.x1 <= figure.bbox.x1
    rates = by_title["learning rate"]
    assert all(len(label.get_text()) <= 9 for label in rates.get_yticklabels())
    ends = [axes.get_tightbbox() for axes in figure.axes]
    assert not any(one.overlaps(other) for i, one in enumerate(ends) for other in ends[:i])
    (group,) = overlay(1, 1)
    raw = [record["actor/entropy"] for record in group.runs[0]]
    one = {axes.get_title(): axes for axes in draw_figure([group], "").axes}["entropy"]
    smooth, faint = (line.get_ydata() for line in one.lines)
    assert list(faint) == raw
    assert np.abs(np.diff(smooth)).sum() < 0.5 * np.abs(np.diff(raw)).sum()


LABELS = ["$x_{$", "$", r"\frac{", "_hidden", "a$b$c", "<b>&", "x" * 300]


@pytest.mark.parametrize("title", LABELS)
@pytest.mark.parametrize("arms", [1, 2])
def test_any_title_can_be_drawn(title, arms):
    """Above one arm, and above the names of several."""
    records = [{"step": step, "actor/entropy": 1.0 + step} for step in range(3)]
    figure = draw_figure([Curves(f"arm {arm}", [records]) for arm in range(arms)], title)
    figure.draw_without_rendering()
    assert escaped(title) in {text.get_text() for text in figure.findobj(Text)}


def test_heat_map_holds_every_layer_and_step():
    records = [
        {"step": 0, "router/agree_frac/layer_0": 0.99, "router/agree_frac/layer_10": 0.9},
        {"step": 1},  # every group filtered out
        {"step": 2, "router/agree_frac/layer_0": 1.0, "router/agree_frac/layer_10": 0.5},
    ]
    layers, steps, values = disagreement(records)
    assert (layers, steps) == ([0, 10], [0, 2])
    assert values == rounded(np.array([[0.01, 0.0], [0.1, 0.5]]))
    image = draw_disagreement(records, "run").axes[0].images[0].get_array()
    assert np.asarray(image) == rounded(np.array([[0.01, 1e-4], [0.1, 0.5]]))
    assert draw_disagreement([{"step": 0}], "run") is None


def test_the_last_validation_is_no_step():
    steps = [{"step": i, "critic/score/mean": 0.1, "val/reward/mean": 0.2} for i in range(10)]
    last = {"step": 10, "val/reward/mean": 0.3, "perf/time/validate": 1.0}
    assert Curves("a", [[*steps, last], steps[:3]]).num_steps == 10
    assert Curves("foreign", [[{"step": 0, "loss": 1.0}, {"step": 1, "loss": 0.5}]]).num_steps == 2


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
    assert (smoothing_span(40), smoothing_span(400)) == (1, 20)
