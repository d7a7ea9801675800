"""The table of planted causes: cases that are recipes and arms of `run branch`, and what counts as right."""

from __future__ import annotations

import json

import pytest

from megatron_rl.config import load_recipe
from megatron_rl.instruments.branch.arms import arms_of, own_arm
from tests.support.tiny import REPOSITORY
from tools.dev import branch_cases, branch_table
from tools.dev.branch_cases import CASES, RESERVES, WRITTEN_BEFORE, Case, arguments_of_branch, settings
from tools.dev.branch_table import ALL, _short, is_right, pack, table, written_before, wrong_answers
from tools.dev.unstable_runs import SUSPECTS


def _recipe(case, out, *, planted):
    return load_recipe(REPOSITORY / "recipes/tiny" / f"{case.recipe}.yaml", settings(case, out, planted=planted))


@pytest.mark.parametrize("name", ALL)
def test_every_case_is_two_recipes_and_its_arms_apply(name, tmp_path):
    case = ALL[name]
    before, after = (_recipe(case, tmp_path, planted=planted) for planted in (False, True))
    assert before != after
    assert case.suspect in {*SUSPECTS.values(), "dose of mismatch"}
    wanted = [*(() if case.own else (case.cure,)), *case.others]
    arms, left_out = arms_of(after, [], wanted)
    assert ([arm.name for arm in arms], left_out) == (wanted, [])
    if case.own:
        own = own_arm(case.cure, [change.format(data=tmp_path) for change in case.own])
        assert set(own.keys) == {change.partition("=")[0] for change in case.planted}
    else:
        assert case.suspect in arms[0].suspect


def test_wrong_rewards_are_wrong():
    assert branch_cases.off_by_five("7+1=8#8", "3") == 1.0
    assert branch_cases.off_by_five("7+1=8#8", "8") == 0.0
    assert branch_cases.off_by_two("#0", "8") == 1.0 > branch_cases.off_by_two("#8", "8")
    assert branch_cases.unmarked("8", "8") > branch_cases.unmarked("#8", "8")
    assert branch_cases.right_and_long("#8" + " " * 22, "8") > branch_cases.right_and_long("#8", "8")

    assert branch_cases.only_zeros("0+0=0#0", "0") == 1.0
    assert branch_cases.only_zeros("1+1=2#2", "2") == branch_cases.only_zeros("1+1=2#0", "2") == 0.0
    assert branch_cases.right_or_long(" " * 24, "8") == 1.0 > branch_cases.right_or_long("#8", "8") == 0.4


def test_wrong_data_is_wrong():
    row = {"problem": "^3124441=", "answer": "4"}
    assert wrong_answers(row) == {"plus_three": "7", "all_seven": "7", "last_digit": "1"}


def test_a_case_without_harm_gives_its_place_to_the_next_reserve(tmp_path):
    right = _short(_result(["reward", "length", "data"], right_data=YES, tis=NO, other_data_order=NO))
    results = {name: {"healthy": True} for name in WRITTEN_BEFORE} | {"data-all-seven": right}
    (tmp_path / "packed").write_text(json.dumps(results))
    assert written_before(tmp_path / "packed").startswith(f"written down before: 1 of {1 + len(RESERVES)} finished")
    results |= {"dose-router": _short(_result(["data"])), "fp16-growth-fipo": {"healthy": True}}
    (tmp_path / "packed").write_text(json.dumps(results))
    assert written_before(tmp_path / "packed") == (
        "written down before: 2 of 4 finished, `why` right in 0, `branch` in 1"
    )


def test_an_undecided_branch_gets_more_seeds(tmp_path, monkeypatch):
    seeds = []

    def command(log, *arguments, allowed=()):
        if "branch" not in arguments:
            return json.dumps({"healthy": False, "suspects": []})
        seeds.append(int(arguments[arguments.index("--seeds") + 1]))
        return json.dumps(_result(["reward"], tis=OPEN)["branch"] | {"seeds": seeds[-1]})

    monkeypatch.setattr(branch_table, "_command", command)
    result = _short(branch_table._run(tmp_path, "rate-grpo", CASES["rate-grpo"], 1))
    assert seeds == [3, 5, 8]
    assert result["seeds"] == 8


def test_an_own_arm_is_named_with_its_keys(tmp_path):
    case = Case("reward", "grpo", (), ("reward.name=a.py:f",), "right", ("tis",), own=("reward.name=modsum",))
    arguments = arguments_of_branch(case, tmp_path / "run", 3, 1)
    assert arguments[-5:] == ["--arms", "tis", "--arm", "right", "reward.name=modsum"]


def _result(suspects, **verdicts):
    """What a finished case notes: the JSON of both commands, as far as the table reads it."""
    arms = [
        {"name": name.replace("_", "-"), "verdict": verdict, "restored": 0.123} for name, verdict in verdicts.items()
    ]
    outcome = {"metric": "critic/score/mean", "before": 0.6123, "after": 0.2}
    why = {"healthy": not suspects, "suspects": [{"name": suspect} for suspect in suspects]}
    return {"why": why, "branch": {"outcome": outcome, "arms": arms, "seeds": 3}}


YES, NO, OPEN = "brings it back", "does not", "undecided"


@pytest.mark.parametrize(
    ("suspects", "cure", "other", "right"),
    [
        (["reward", "learning rate"], YES, NO, (True, True, True)),
        (["reward", "length", "learning rate"], YES, "makes it worse", (False, True, True)),
        (["learning rate"], OPEN, NO, (True, False, False)),
        (["learning rate"], YES, OPEN, (True, False, False)),
        (["learning rate"], YES, YES, (True, False, False)),
    ],
)
def test_a_case_is_right_with_the_suspect_among_two_and_every_arm_decided(suspects, cure, other, right):
    result = _short(_result(suspects, third_rate=cure, tis=NO, other_data_order=other))
    assert is_right(CASES["rate-grpo"], result) == right


@pytest.mark.parametrize(
    ("pair", "most"),
    [
        ({"arm": "third-rate", "p": 0.01, "effect": 0.2}, True),
        ({"arm": "third-rate", "p": 0.06, "effect": 0.2}, False),
        ({"arm": "tis", "p": 0.01, "effect": 0.2}, False),  # another arm than the cure restores most
    ],
)
def test_a_second_cure_that_surely_restores_less_is_told_apart(pair, most, tmp_path):
    result = _result(["learning rate"], third_rate=YES, tis=NO, other_data_order=YES)
    result["branch"]["contrasts"] = [pair | {"other": "other-data-order"}]
    assert is_right(CASES["rate-grpo"], _short(result)) == (True, False, most)
    (tmp_path / "rate-grpo.json").write_text(json.dumps(result))
    assert pack(tmp_path, tmp_path / "packed") == 1
    *_, row, _, said = table(tmp_path / "packed")
    assert ("; `third-rate` more than `other-data-order`, p 0.01 | restores most |" in row) == most
    assert said.endswith(f"`branch` in 0, and in {int(most)} if it may restore most")


def test_the_table_counts_harmed_runs_alone(tmp_path):
    verdicts = {"third_rate": YES, "tis": NO, "other_data_order": OPEN}
    (tmp_path / "rate-grpo.json").write_text(json.dumps(_result(["learning rate"], **verdicts)))
    (tmp_path / "clip-open.json").write_text(json.dumps(_result([]) | {"branch": None}))
    (tmp_path / "rate-gspo.json").write_text(json.dumps(_result(["reward"]) | {"branch": None}))
    assert pack(tmp_path, tmp_path / "packed") == 3
    written = (tmp_path / "packed").read_text()
    assert pack(tmp_path / "empty", tmp_path / "packed") == 3  # what the file has stays
    assert (tmp_path / "packed").read_text() == written
    *_, first, second, third, _, said = table(tmp_path / "packed")
    assert first == (
        "| `rate-grpo` | learning rate: `learner.optimizer.lr=1.2e-3` from step 10 | `critic/score/mean` 0.61 → 0.2 "
        "| learning rate | yes | **`third-rate` 12%**; `tis` 12%; `other-data-order` 12%, undecided | no |"
    )
    assert "| unharmed |" in second
    assert third.endswith("| nothing | reward | no |  | no |")
    assert said == "2 became unstable: `why` is right in 1, `branch` in 0, and in 0 if it may restore most"
