"""A run directory holds one run: what may change on resume, what is refused, and what is kept of it."""

import json
import shutil

import yaml


def test_another_recipe_is_refused_and_changes_nothing(runs):
    before = runs.files("whole")
    refused = runs.train("whole", "seed=4", "learner.optimizer.lr=1e-3", "num_steps=9", expect=2)
    assert "holds a run with another recipe (recipe.resolved.yaml):\n  seed: 3 → 4\n" in refused.output
    assert "\n  learner.optimizer.lr: 0.0001 → 0.001\n" in refused.output
    assert "num_steps" not in refused.output, "a run may become longer"
    assert "--allow-changes" in refused.last_line
    assert runs.files("whole") == before


def test_a_checkpoint_past_the_end_is_refused(runs):
    """It would record steps that were not made."""
    before = runs.files("whole")
    for resume in ("auto", str(runs.root / "whole" / "checkpoints" / "step_00000007")):
        refused = runs.train("whole", "num_steps=4", resume=resume, expect=2)
        assert "num_steps: 4, but " in refused.last_line
        assert "step_00000007 was written after step 7; raise num_steps" in refused.last_line
    assert runs.files("whole") == before


def test_allowed_changes_are_logged_and_every_recipe_is_kept(runs, whole):
    shutil.copytree(runs.root / "whole", runs.root / "changed")
    changes = ("num_steps=8", "learner.optimizer.lr=1e-3", "checkpoint.keep_last=0")
    runs.train("changed", *changes, flags=("--allow-changes",))
    log = runs.log("changed")
    assert " changed: learner.optimizer.lr: 0.0001 → 0.001\n" in log
    assert " changed: num_steps: 7 → 8\n" in log
    assert " changed: name: whole → changed\n" in log
    rows = runs.rows("changed")
    assert rows[:7] == whole[:7]
    assert rows[7]["actor/lr"] == 1e-3 / 8  # after the three halvings that the run had had
    kept = [runs.root / "changed" / f"recipe.resolved.{number}.yaml" for number in (1, 2)]
    assert [path.read_text().split(",")[0] for path in kept] == [
        "# in force from step 0 on",
        "# in force from step 7 on",
    ]
    rates = [yaml.safe_load(path.read_text())["learner"]["optimizer"]["lr"] for path in kept]
    assert rates == [1e-4, 1e-3]
    current = (runs.root / "changed" / "recipe.resolved.yaml").read_text()
    assert kept[1].read_text().partition("\n")[2] == current
    runs.train("changed", *changes)  # these are the run's own now: complete, and nothing is refused
    assert not (runs.root / "changed" / "recipe.resolved.3.yaml").exists()


def test_another_model_under_the_same_recipe_is_refused(runs, tmp_path):
    shutil.copytree(runs.root / "whole", runs.root / "model")
    model = tmp_path / "model"
    shutil.copytree(runs.model, model)
    checkpoint = str(runs.root / "model" / "checkpoints" / "step_00000006")
    overrides = (f"model.path={model}", "num_steps=8")
    config = json.loads((model / "config.json").read_text())
    other = {"rope_parameters": config["rope_parameters"] | {"rope_theta": 3.0}}
    (model / "config.json").write_text(json.dumps(config | other))
    for resume in ("auto", checkpoint):
        refused = runs.train("model", *overrides, resume=resume, expect=2)
        assert "\n  model.config.json.rope_parameters.rope_theta: 10000.0 → 3.0\n" in refused.output
    branch = runs.train("branch-of-model", *overrides, resume=checkpoint, expect=2)
    assert "\n  model.config.json.rope_parameters.rope_theta: 10000.0 → 3.0\n" in branch.output
    assert not (runs.root / "branch-of-model" / "metrics.jsonl").exists()
    (model / "config.json").write_text(json.dumps(config))
    runs.train("model", *overrides)  # the same model in another folder


def test_a_branch_says_what_differs_and_is_a_run_of_its_own(runs, whole):
    """From another run's checkpoint, under another recipe. Killed before its first step, it does not start anew."""
    checkpoint = str(runs.root / "whole" / "checkpoints" / "step_00000006")
    settings = ("num_steps=8", "learner.optimizer.lr=1e-3", "checkpoint.every=0", "data.seed=1")
    kill = {"at": "phase:generate", "call": 1, "when": "before", "do": "kill"}
    runs.train("branch", *settings, resume=checkpoint, faults=[kill], expect=-9)
    assert " changed: learner.optimizer.lr: 0.0001 → 0.001\n" in runs.log("branch")
    assert " changed: data.seed: 0 → 1\n" in runs.log("branch")
    assert "began from a checkpoint of another run" in runs.train("branch", *settings, expect=2).last_line
    runs.train("branch", *settings, resume=checkpoint)
    assert [row["step"] for row in runs.rows("branch")] == [6, 7, 8]
    again = runs.train("branch", *settings, resume=checkpoint, expect=2)
    assert "holds steps of its own; continue these with --resume auto" in again.last_line


SPOILS = """
import os

def score(response, answer):
    with open({calls!r}, "a") as file:
        file.write("x")
    if os.path.getsize({calls!r}) > {most}:
        raise ValueError("out of order")
    return float(response == answer)
"""


def test_a_reward_that_breaks_in_the_middle_saves_and_ends_the_run(runs, tmp_path):
    file, calls = tmp_path / "mine.py", tmp_path / "calls"
    file.write_text(SPOILS.format(calls=str(calls), most=60))
    ended = runs.train("spoilt", f"reward.name={file}:score", "checkpoint.every=0", expect=1)
    assert ended.last_line.startswith("run failed: ")
    assert "responses could not be scored, more than reward.max_error_frac allows (0.1)" in ended.last_line
    assert ended.last_line.endswith("failed: ValueError: out of order")
    log = runs.log("spoilt")
    assert log.count("ValueError: out of order") == 1, "an example of each kind, once"
    assert f'File "{file}", line 8, in score' in log
    rows = runs.rows("spoilt")
    assert runs.checkpoints("spoilt") == [f"step_{len(rows):08d}"]
    assert all(row["reward/errors"] == 0 for row in rows)
    file.write_text(SPOILS.format(calls=str(calls), most=10**9))
    refused = runs.train("spoilt", f"reward.name={file}:score", "checkpoint.every=0", expect=2)
    assert f"reward.{file}:score: " in refused.output, "another reward function"
    runs.train("spoilt", f"reward.name={file}:score", "checkpoint.every=0", flags=("--allow-changes",))
    assert [row["step"] for row in runs.rows("spoilt")] == list(range(8))
