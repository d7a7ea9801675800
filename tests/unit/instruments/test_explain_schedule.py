"""The command `explain-schedule`: why the rate moved, whether the record agrees, and other schedules."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from megatron_rl.__main__ import main
from tests.support.finished_run import write_run


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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ("mode=auto", "mode: 'auto' has no effect with style 'constant'"),
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
