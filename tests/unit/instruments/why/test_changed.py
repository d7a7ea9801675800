"""What changed in a run, from its folder; and in what two runs differ."""

from __future__ import annotations

import json

from megatron_rl.__main__ import main
from megatron_rl.instruments.why.changed import history_of
from megatron_rl.monitor import RunDirectory
from megatron_rl.run.identity import keep_recipe
from tests.support.sick_run import rows, write
from tests.support.tiny import tiny_recipe


def start(commit: str, data: str, **more) -> dict:
    return {
        "versions": {"vllm": "0.30"},
        "git": {"commit": commit, "branch": "x", "changed": []},
        "variables": {"SLURM_JOB_ID": commit},
        "identity": {"data": {"train": data}, "reward": {}},
    } | more


def run_of(folder, **keys):
    write(folder, rows(), tiny_recipe(name="run", num_steps=40))
    directory = RunDirectory(folder)
    keep_recipe(directory, tiny_recipe(name="run", num_steps=60, **keys), 12)
    return directory


def test_recipes_files_versions_and_resumes_are_told_with_their_steps(tmp_path):
    keys = {
        "objective": {"entropy_bonus": 1.0},
        "reward": {"overlong": {"buffer": 4}},
        "learner": {"recompute": "full"},
    }
    directory = run_of(tmp_path / "run", **keys)
    later = start("b", "new", step=12, versions={"vllm": "0.31"})
    directory.environment.write_text(json.dumps(start("a", "old", step=0) | {"resumed": [later]}))
    told = {(e.step, e.kind, e.key, e.weight) for e in history_of(directory)}
    assert {
        (12, "recipe", "objective.entropy_bonus", "strong"),
        (12, "recipe", "reward.overlong", "strong"),
        (12, "recipe", "learner.recompute", "weak"),
        (12, "recipe", "num_steps", "none"),
        (12, "file", "data.train", "strong"),
        (12, "environment", "versions.vllm", "weak"),
        (12, "environment", "git.commit", "weak"),
        (12, "resume", "resumed", "none"),
    } == told


def test_servers_that_came_and_went_and_rollbacks_are_told(tmp_path):
    directory = run_of(tmp_path / "run")
    directory.rollbacks.write_text(json.dumps([{"alarms": ["steep"], "at": 20, "to": 8, "time": 1.0}]))
    records = [{"step": step, "rollout/servers": 2.0 if step < 15 else 1.0} for step in range(20)]
    told = [(e.step, e.kind) for e in history_of(directory, records) if e.weight != "none"]
    assert told == [(8, "rollback"), (15, "servers")]


def test_a_process_that_was_killed_while_it_wrote_leaves_the_recipes(tmp_path):
    directory = run_of(tmp_path / "run", objective={"entropy_bonus": 1.0})
    directory.environment.write_text("{")
    assert {e.kind for e in history_of(directory)} == {"recipe"}


def test_two_runs_differ_in_keys_files_and_versions(tmp_path, capsys):
    write(tmp_path / "good", rows(healthy=True), tiny_recipe(name="good", num_steps=40))
    write(tmp_path / "bad", rows(), tiny_recipe(name="bad", num_steps=40, learner={"optimizer": {"lr": 3e-3}}))
    for name, data in (("good", "old"), ("bad", "new")):
        RunDirectory(tmp_path / name).environment.write_text(json.dumps(start("a", data, step=0)))
    assert main(["run", "why", str(tmp_path / "bad"), "--against", str(tmp_path / "good")]) == 0
    said = capsys.readouterr().out
    assert "recipe      learner.optimizer.lr: " in said
    assert "file        data.train: old → new" in said
    assert "num_steps" not in said
