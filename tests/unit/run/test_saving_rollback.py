"""What a run remembers of its rollbacks, and the recipes in which an alarm could not take it back."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from megatron_rl.config.monitor import AlarmRule
from megatron_rl.config.recipe import rollback_problems
from megatron_rl.errors import InputError
from megatron_rl.run.saving import Rollbacks
from tests.support.tiny import tiny_recipe

RULE = {"name": "a", "metric": "m", "above": 1.0, "then": ["warn", "rollback"]}


def test_rollbacks_outlive_the_process_and_the_checkpoints_that_they_undo(tmp_path):
    file = tmp_path / "rollbacks.json"
    rollbacks = Rollbacks(file, most=2)
    assert (rollbacks.count, rollbacks.is_spent) == (0, False)
    rollbacks.add(["a"], at=9, to=4)
    rollbacks = Rollbacks(file, most=2)
    assert rollbacks.halvings_due(before=0) == 1, "the checkpoint does not know of it"
    assert rollbacks.halvings_due(before=1) == 0, "the checkpoint was written after it"
    rollbacks.add(["a", "b"], at=9, to=4)
    assert rollbacks.is_spent
    assert Rollbacks(file, most=2).halvings_due(before=0) == 2


def test_a_branch_counts_the_rollbacks_of_its_origin(tmp_path):
    rollbacks = Rollbacks(tmp_path / "rollbacks.json", most=3)
    assert rollbacks.halvings_due(before=2) == 0
    rollbacks.add(["a"], at=9, to=4)
    assert (rollbacks.count, rollbacks.is_spent) == (3, True)


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_a_file_of_something_else_is_named(tmp_path, text):
    (tmp_path / "rollbacks.json").write_text(text)
    with pytest.raises(InputError, match=r"rollbacks\.json: not the list of rollbacks of a run"):
        Rollbacks(tmp_path / "rollbacks.json", most=1)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({}, "checkpoint.every: 0, but alarm 'a' has rollback"),
        ({"checkpoint": {"every": 5, "keep_last": 1}}, "checkpoint.keep_last: 1 of every 5 steps, .*; keep 2"),
        (
            {"checkpoint": {"every": 5}, "rule": {"statistic": "mean", "window": 20, "for_steps": 3}},
            "goes off up to 23 steps after its onset, .*; keep 6",
        ),
        ({"checkpoint": {"every": 5}, "rollout": {"engine": "vllm_server"}}, "servers never go back"),
        (
            {
                "checkpoint": {"every": 5},
                "rollout": {"engine": "exact"},
                "exact": {"noise": {"kind": "stale", "updates": 2}},
            },
            "exact.noise.kind: stale, but alarm 'a' has rollback",
        ),
    ],
)
def test_where_an_alarm_could_not_take_the_run_back_it_is_said(sections, message):
    rule = {**RULE, **sections.pop("rule", {})}
    with pytest.raises(ValidationError, match=message):
        tiny_recipe(monitor={"alarms": [rule]}, **sections)


def test_enough_checkpoints_are_enough():
    for checkpoint in ({"every": 5}, {"every": 1, "keep_last": 2}, {"every": 50, "keep_last": 0}):
        assert rollback_problems(tiny_recipe(monitor={"alarms": [RULE]}, checkpoint=checkpoint)) == []
    assert rollback_problems(tiny_recipe()) == []


def test_stop_and_rollback_are_two_ends():
    with pytest.raises(ValidationError, match="then has rollback and stop"):
        AlarmRule.model_validate({**RULE, "then": ["rollback", "stop"]})
