"""The commands that read finished runs: curves, the schedule's story, the alarms' score."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from matplotlib.text import Text

from megatron_rl.__main__ import main
from megatron_rl.commands.score_alarms import read_rules
from megatron_rl.config.monitor import AlarmRule
from megatron_rl.errors import InputError
from megatron_rl.monitor.curves import Curves, group_runs, smoothed, smoothing_span
from megatron_rl.monitor.plots import PANELS, View, draw_figure, escaped
from megatron_rl.monitor.run_directory import JsonlSink
from megatron_rl.monitor.scoring import CollapseRule, collapse_step, score_run
from megatron_rl.schedule import length_decay_lr
from tests.support.rounding import CLOSED_FORM, gamma, rounded
from tools.dev import length_curves

RECIPE = "learner: {optimizer: {lr: 1.0e-6}}\nschedule: {style: length-decay, mode: auto}\n"
GROWTH_RULE = {"name": "growth", "metric": "mismatch/rho_std", "statistic": "log_slope_lower", "window": 40}
RULES = [
    {**GROWTH_RULE, "above": 0.01, "for_steps": 3},
    {"name": "short", "metric": "critic/rewards/mean", "below": 0.2},
]


def write_run(folder: Path, seed: int, collapses: bool, decays: bool = True, num_steps: int = 300) -> Path:
    """A made-up run whose length surges near step 110 and whose mismatch, then reward, go wrong if ``collapses``."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    (folder / "recipe.resolved.yaml").write_text(RECIPE)
    lengths, sink = (
        length_curves.paper_curve(110, 3500.0, num_steps=num_steps)(rng, 0.1),
        JsonlSink(folder / "metrics.jsonl"),
    )
    for step in range(num_steps):
        late = max(0, step - 120) if collapses else 0
        sink.write(
            step,
            {
                "critic/rewards/mean": 0.8 - max(0.0, late - 80) / 100 + 0.01 * rng.standard_normal(),
                "mismatch/rho_std": 1e-3 * float(np.exp(0.03 * late + 0.1 * rng.standard_normal())),
                "response_length/mean": float(lengths[step]),
                "lr_sched/lr": length_decay_lr(step, 1e-6, 1e-7, 202 if decays else None),
                **({"val/reward/mean": 0.5, "val/x/num_problems": 250.0} if step % 50 == 0 else {}),
            },
        )
    return folder


def test_plot_runs_makes_a_picture_and_a_page_that_loads_nothing(tmp_path, capsys):
    runs = [write_run(tmp_path / f"{name}-seed{s}", s, name == "bad") for name in ("bad", "good") for s in (0, 1)]
    out = tmp_path / "out"
    assert main(["plot", *map(str, runs), "--out", str(out), "--title", "a <title>"]) == 0
    assert "bad: 2 run(s), 300 steps" in capsys.readouterr().out
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "curves.html").read_text()
    assert "a &lt;title&gt;" in page
    for title in ("reward", "validation", "response length", "mismatch: std of rho"):
        assert f">{title}<" in page
    assert page.count("<svg") == 4
    # Namespace declarations are names; anything else that points outside would be fetched.
    assert not re.search(r'(?:src|href)="(?!#)', re.sub(r'xmlns(:\w+)?="[^"]*"', "", page))
    identifiers = re.findall(r'clipPath id="([^"]+)"', page)
    assert len(identifiers) == len(set(identifiers))


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


def test_explain_schedule_tells_why_and_checks_the_record(tmp_path, capsys):
    run = write_run(tmp_path / "run", 0, collapses=False)
    assert main(["explain-schedule", str(run)]) == 0
    told = capsys.readouterr().out
    surge = int(re.search(r"surge confirmed at step (\d+): T_decay = (\d+)", told)[1])
    period = int(re.search(r"T_decay = (\d+)", told)[1])
    assert period == round(1.8 * surge)
    assert f"step {period} (t = {period}" in told
    assert "lr 1e-06 -> 5e-07" in told
    wrong = abs(period - 202)  # the made-up record halves at 202
    assert f"recorded rate equals the formula at {300 - wrong} of 300 steps" in told
    assert (run / "plots" / "schedule.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "lines",
    [
        [{"step": 1}, {"step": 0}],
        [{"step": 0}, {"step": 0}],
        [{"step": 0, "lr_sched/step": 5}, {"step": 1, "lr_sched/step": 4}],
        [{"step": 0, "lr_sched/step": "NaN"}],
    ],
)
def test_explain_schedule_of_steps_out_of_order(tmp_path, capsys, lines):
    (tmp_path / "recipe.resolved.yaml").write_text("schedule: {style: constant}\n")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["explain-schedule", str(tmp_path)]) == 2
    assert "a run writes its steps in order" in capsys.readouterr().err


def test_explain_schedule_of_another_schedule(tmp_path, capsys):
    run = write_run(tmp_path / "run", 0, collapses=False, decays=False)
    assert main(["explain-schedule", str(run), "--as", "mode=shadow,detector.surge_ratio=20"]) == 0
    assert "nothing happened: no surge" in capsys.readouterr().out
    assert main(["explain-schedule", str(run), "--as", "mode=shadow,detector.surge_ration=20"]) == 2
    assert "surge_ration" in capsys.readouterr().err
    assert main(["explain-schedule", str(tmp_path)]) == 2


@pytest.mark.parametrize("collapses", [True, False])
def test_collapse_is_found_where_the_reward_halves(collapses):
    values = [0.8] * 50 + ([0.8 - 0.01 * i for i in range(1, 81)] if collapses else [0.8] * 80)
    records = [{"step": i, "critic/rewards/mean": v} for i, v in enumerate(values)]
    # 0.4 is reached at step 89; the median of 5 trails by 2.
    assert collapse_step(records, CollapseRule()) == (91 if collapses else None)


def test_a_dip_is_no_collapse_and_nan_is():
    dip = [0.8] * 30 + [0.1] * 4 + [0.8] * 30
    assert collapse_step([{"step": i, "critic/rewards/mean": v} for i, v in enumerate(dip)], CollapseRule()) is None
    nan = [0.8] * 20 + [0.3] + [float("nan")] * 20
    assert collapse_step([{"step": i, "critic/rewards/mean": v} for i, v in enumerate(nan)], CollapseRule()) == 22


def test_lead_and_false_alarms_are_counted():
    rewards = [0.8] * 100 + [0.1] * 20
    signal = [0.0] * 10 + [1.0] * 2 + [0.0] * 68 + [1.0] * 40
    records = [
        {"step": i, "critic/rewards/mean": r, "s": s} for i, (r, s) in enumerate(zip(rewards, signal, strict=True))
    ]
    rule = AlarmRule(name="s", metric="s", above=0.5)
    (score,) = score_run(records, [rule], CollapseRule(), horizon=50)
    assert (score.fired, score.collapse, score.lead, score.false_alarms) == ((10, 80), 102, 22, 1)
    (calm,) = score_run(records[:90], [rule], CollapseRule(), horizon=50)
    assert (calm.collapse, calm.lead, calm.false_alarms) == (None, None, 2)


def test_score_alarms_over_runs(tmp_path, capsys):
    runs = [str(write_run(tmp_path / f"{c}", s, c == "bad")) for s, c in enumerate(("bad", "good"))]
    rules = tmp_path / "rules.yaml"
    rules.write_text(json.dumps(RULES))
    assert main(["score-alarms", *runs, "--rules", str(rules), "--json"]) == 0
    bad, good = json.loads(capsys.readouterr().out).values()
    assert 230 <= bad[0]["collapse"] <= 250
    assert 60 <= bad[0]["lead"] <= 110
    assert (good[0]["fired"], good[0]["collapse"]) == ([], None)
    assert main(["score-alarms", *runs, "--rules", str(rules)]) == 0
    assert re.search(r"growth +1 +1 +\d+ +0 +2\n", capsys.readouterr().out)
    assert main(["score-alarms", *runs]) == 2
    assert "no rules" in capsys.readouterr().err


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
    """Arms of noisy seeds, with a metric that is 0 throughout and three that are one."""
    draw = np.random.default_rng(0)
    names = ("critic/rewards/mean", "actor/entropy", "actor/grad_norm", "perf/time/generate", "perf/time/update")
    groups = []
    for arm in range(arms):
        runs = []
        for _ in range(seeds):
            values = {name: 1 + arm + np.arange(steps) / steps + draw.normal(0, 0.3, steps) for name in names}
            values |= dict.fromkeys(("val/reward/mean", "val/a/avg@1", "val/a/pass@1"), values["critic/rewards/mean"])
            values |= {"actor/pg_clipfrac": np.zeros(steps), "actor/lr": np.full(steps, 1e-4)}
            values |= {"perf/time/step": np.full(steps, 36.0), "perf/rollout_tokens": np.full(steps, 5e5)}
            runs.append([{"step": s} | {name: float(v[s]) for name, v in values.items()} for s in range(steps)])
        groups.append(Curves(f"arm {arm}", runs))
    return groups


def test_an_overlay_can_be_read():
    """No legend over a curve, no curve twice, nothing that is 0, ticks that fit."""
    groups = overlay()
    del groups[0].runs[0][100:]  # a seed that still runs
    figure = draw_figure(groups, "four arms, three seeds")
    figure.draw_without_rendering()
    by_title = {axes.get_title(): axes for axes in figure.axes}
    assert "clip fraction" not in by_title
    assert figure._supxlabel.get_text() == "0 throughout, not drawn: clip fraction"
    assert len(by_title["validation"].lines) == 4
    (equal,) = by_title["validation"].get_legend().get_texts()
    assert equal.get_text() == "val/reward/mean = avg@1 = pass@1"
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


@pytest.mark.parametrize(("x", "last"), [("step", 119), ("time", 1.2), ("tokens", 60)])
def test_curves_over_steps_hours_and_tokens(x, last):
    figure = draw_figure(overlay(), "", view=View(x, 1))
    ends = {line.get_xdata()[-1] for axes in figure.axes for line in axes.lines}
    assert list(ends) == rounded([last] * len(ends))
    (group,) = overlay(1, 1)
    raw = [record["actor/entropy"] for record in group.runs[0]]
    one = {axes.get_title(): axes for axes in draw_figure([group], "", view=View(x)).axes}["entropy"]
    smooth, faint = (line.get_ydata() for line in one.lines)
    assert list(faint) == raw
    assert np.abs(np.diff(smooth)).sum() < 0.5 * np.abs(np.diff(raw)).sum()


def test_smoothing_is_a_mean_of_what_was_seen():
    np.testing.assert_allclose(
        smoothed(np.array([[1.0, 1.0, np.nan, 1.0]]), 5), [[1, 1, np.nan, 1]], rtol=gamma(CLOSED_FORM)
    )
    # Weights 1/2 of the last, for span 3: (1/4 · 4 + 1/2 · 2 + 8) / (1/4 + 1/2 + 1)
    assert smoothed(np.array([4.0, 2.0, 8.0]), 3)[-1] == rounded(10 / 1.75)
    assert (smoothing_span(40, None), smoothing_span(400, None), smoothing_span(400, 1)) == (1, 20, 1)


LABELS = ["$x_{$", "$", r"\frac{", "_hidden", "a$b$c", "<b>&", "x" * 300]


def test_any_label_can_be_drawn(tmp_path, capsys):
    run = write_run(tmp_path / "run", 0, collapses=False)
    out = tmp_path / "out"
    assert main(["plot", *(f"{label}={run}" for label in LABELS), "--out", str(out), "--title", LABELS[0]]) == 0
    assert (out / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize("title", LABELS)
@pytest.mark.parametrize("arms", [1, 2])
def test_any_title_can_be_drawn(title, arms):
    """Above one arm, and above the names of several."""
    records = [{"step": step, "actor/entropy": 1.0 + step} for step in range(3)]
    figure = draw_figure([Curves(f"arm {arm}", [records]) for arm in range(arms)], title)
    figure.draw_without_rendering()
    assert escaped(title) in {text.get_text() for text in figure.findobj(Text)}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"[1, 2]", "a list, not an object"),
        (b"7", "a int, not an object"),
        (b'{"x": 1.0}', "no step"),
        (b'{"step": "one"}', "'step' is not a number"),
        (b'{"step": 1, "x": [1]}', "'x' is not a number"),
        (b'{"step": 1, "x": null}', "'x' is not a number"),
        (b'\xff\xfe{"step": 1}', "can't decode byte"),
        (b"[" * 100_000, "recursion"),
        (b'{"step": 1, "x": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
    ],
)
def test_a_record_that_is_none_is_named_with_its_line(line, said, tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + line + b'\n{"step": 2}\n')
    assert main(["plot", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "metrics.jsonl, line 2: not valid JSON of a step (" in error
    assert said in error


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ("mode=auto", "mode: 'auto' has no effect with style 'constant'"),
        ("mode=auto", "the run's style is constant; --as style=length-decay,… asks for another"),
        ("style=lenght-decay", "did you mean 'length-decay'?"),
        ("style=length-decay,mode=[", "--as mode=[: the value is not valid YAML"),
        ("min_lr=1_0", "min_lr: found '1_0'"),
    ],
)
def test_explain_schedule_says_what_is_wrong_with_other_keys(changes, said, tmp_path, capsys):
    run = write_run(tmp_path / "run", 0, collapses=False)
    recipe = yaml.safe_load((run / "recipe.resolved.yaml").read_text())
    (run / "recipe.resolved.yaml").write_text(yaml.safe_dump({**recipe, "schedule": {"style": "constant"}}))
    assert main(["explain-schedule", str(run), "--as", changes]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "pydantic" not in error


def test_alarm_rules_are_read_as_recipes_are(tmp_path, capsys):
    """YAML 1.2: 1e-08 is a number, as a resolved recipe writes it; PyYAML's own reader makes it text."""
    rules = tmp_path / "rules.yaml"
    rules.write_text("- {name: tiny, metric: mismatch/rho_std, above: 1e-08, for_steps: 2, then: [warn]}\n")
    (rule,) = read_rules(rules)
    assert rule.above == 1e-8
    rules.write_text("- {name: [\n")
    with pytest.raises(InputError, match=r"rules\.yaml: not valid YAML"):
        read_rules(rules)
