"""The library of unstable runs: arms that are recipes, rewards that break, a file that keeps no path."""

from __future__ import annotations

import json

import pytest

from megatron_rl.config import load_recipe
from megatron_rl.config.monitor import level_rules
from megatron_rl.monitor.alarms import read_packed
from tests.support.tiny import REPOSITORY, tiny_recipe
from tools.dev import unstable_runs
from tools.dev.unstable_runs import ARMS, pack


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_is_a_recipe(name, tmp_path):
    changes = [change.format(answers=tmp_path) for change in ARMS[name].changes]
    recipe = load_recipe(REPOSITORY / "recipes" / "tiny" / f"{ARMS[name].recipe}.yaml", changes)
    assert {rule.name for rule in level_rules(recipe.model_dump(mode="json"))} >= {"reward-drop", "no-signal"}


def test_every_tiny_recipe_has_a_healthy_arm():
    recipes = {path.stem for path in (REPOSITORY / "recipes" / "tiny").glob("*.yaml")} - {"base", "rollback"}
    assert {arm.recipe for arm in ARMS.values() if not arm.cause} == recipes


def test_rewards_break_after_a_number_of_responses(monkeypatch):
    monkeypatch.setattr(unstable_runs, "_WORKING", 2)
    for broken, after in (
        (unstable_runs.zero_after_a_while, [0.0, 0.0]),
        (unstable_runs.inverted_after_a_while, [0, 1]),
    ):
        monkeypatch.setattr(unstable_runs, "_scored", 0)
        assert [broken("#1", "1"), broken("#2", "1")] == [1.0, 0.0]
        assert [broken("#1", "1"), broken("#2", "1")] == after


def test_a_packed_run_has_its_recipe_without_paths_and_four_digits(tmp_path):
    run = tmp_path / "rate-grpo-1e-3-seed0"
    run.mkdir()
    (tmp_path / f"{run.name}.json").write_text('{"status": 0}\n')
    recipe = tiny_recipe(reward={"name": f"{tmp_path}/unstable_runs.py:longer"})
    (run / "recipe.resolved.yaml").write_text(recipe.model_dump_json())
    row = {"step": 0, "time": 1.5, "critic/rewards/mean": 0.123456, "actor/grad_norm": "NaN", "perf/time/step": 1.0}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    file = tmp_path / "packed.jsonl.xz"
    assert pack(tmp_path, file) == 1
    (runs,) = read_packed(file)
    assert (runs.name, runs.cause) == (f"unstable/{run.name}", "rate")
    assert runs.recipe["reward"]["name"] == "unstable_runs.py:longer"
    assert runs.recipe["model"]["path"] == "model"
    assert str(runs.records) == "[{'step': 0, 'critic/rewards/mean': 0.1235, 'actor/grad_norm': nan}]"
    written = file.read_bytes()
    (empty := tmp_path / "empty").mkdir()
    assert pack(empty, file) == 1  # what the file has stays
    assert file.read_bytes() == written
