"""The commands that read finished runs: curves, the schedule's story, the alarms' score."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.__main__ import main
from megatron_rl.config.monitor import AlarmRule
from megatron_rl.monitor.jsonl import JsonlSink
from megatron_rl.monitor.plots import PANELS, Curves, group_runs
from megatron_rl.monitor.scoring import CollapseRule, collapse_step, score_run
from megatron_rl.schedule import length_decay_lr, synthetic

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
        synthetic.paper_curve(110, 3500.0, num_steps=num_steps)(rng, 0.1),
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
    from megatron_rl.monitor.plots import draw_figure

    names = {"val/reward/mean", "val/aime/avg@8", "val/aime/pass@8", "perf/time/generate", "perf/time/step"}
    names |= {name for panel in PANELS for name in panel.metrics if re.fullmatch(r"[\w/]+", name)}
    records = [{"step": step} | dict.fromkeys(names, 10.0 ** (step - 2)) for step in range(5)]
    figure = draw_figure([Curves("all", [records])], "all")
    assert [axes.get_title() for axes in figure.axes] == [panel.title for panel in PANELS]
    for axes, panel in zip(figure.axes, PANELS, strict=True):
        assert axes.get_yscale() == ("log" if panel.is_log else "linear")
        assert len(axes.lines) == {"validation": 3}.get(panel.title, len(panel.metrics))
        assert list(axes.lines[0].get_ydata()) == [10.0 ** (step - 2) for step in range(5)]


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
    from megatron_rl.monitor.plots import draw_figure

    records = [{"step": 0} | {f"perf/time/phase{i}": float(i) for i in range(9)}]
    one = draw_figure([Curves("a", [records])], "a")
    assert [line.get_ydata()[0] for line in one.axes[0].lines] == [8, 7, 6, 5, 4]
    two = draw_figure([Curves("a", [records]), Curves("b", [records])], "a")
    assert [line.get_label() for line in two.axes[0].lines] == [f"{r} perf/time/phase{i}" for r in "ab" for i in (8, 7)]
