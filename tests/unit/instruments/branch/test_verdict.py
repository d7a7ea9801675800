"""Verdicts on planted curves."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from scipy import stats

from megatron_rl.instruments.branch.arms import CONTROL
from megatron_rl.instruments.branch.plan import plan_branch
from megatron_rl.instruments.branch.verdict import judge, page
from megatron_rl.monitor.run_directory import JsonlSink
from tests.support.rounding import rounded
from tests.support.sick_run import PLANTED, finish, make_run, rows


@pytest.fixture
def sick(tmp_path) -> Path:
    return make_run(tmp_path / "sick")


ARMS = ("third-rate", "one-update")


def test_the_arm_that_brings_the_reward_back_is_named_and_the_others_are_not(sick, tmp_path):
    branch = plan_branch(sick, from_step=10, steps=20, wanted=ARMS)
    finish(branch, tmp_path)
    judgement = judge(branch, tmp_path)
    verdicts = {judged.arm.name: judged.verdict for judged in judgement.arms}
    assert verdicts == {"third-rate": "brings it back", "one-update": "does not"}
    cure = judgement.cures[0]
    differences = [arm - control for arm, control in zip(PLANTED["third-rate"], PLANTED[CONTROL], strict=True)]
    mean = sum(differences) / 4
    deviation = math.sqrt(sum((d - mean) ** 2 for d in differences) / 3)
    assert cure.effect.mean == rounded(mean)
    assert cure.effect.upper == rounded(mean + stats.t.ppf(0.975, 3) * deviation / 2)
    assert cure.p_holm == min(1.0, 2 * cure.p)  # the smaller of two
    control = sum(PLANTED[CONTROL]) / 4
    assert cure.restored == rounded(mean / (0.6 - control))
    text = page(judgement)
    assert "Verdict: third-rate (learner.optimizer.lr 0.003 → 0.001) brings critic/score/mean back" in text
    assert "repeats 20 steps of the run, bit for bit" in text
    told = json.loads(json.dumps(judgement.as_json()))
    assert told["arms"][0]["keys"] == {"learner.optimizer.lr": [0.003, 0.001]}
    assert told["control"]["repeated_steps"] == 20


def test_two_seeds_that_disagree_decide_nothing(sick, tmp_path):
    branch = plan_branch(sick, from_step=10, steps=20, wanted=ARMS, seeds=2)
    finish(branch, tmp_path, PLANTED | {"third-rate": (0.60, 0.20)})
    judgement = judge(branch, tmp_path)
    assert judgement.cures == []
    assert judgement.sentence.startswith("undecided: third-rate")


def test_arms_that_all_do_nothing_leave_the_cause_open(sick, tmp_path):
    branch = plan_branch(sick, from_step=10, steps=20, wanted=ARMS)
    finish(branch, tmp_path, PLANTED | {"third-rate": PLANTED["one-update"]})
    assert judge(branch, tmp_path).sentence.startswith("none of these arms brings critic/score/mean back")


def test_a_control_that_does_not_repeat_the_run_is_told(sick, tmp_path):
    branch = plan_branch(sick, from_step=10, steps=20, wanted=ARMS)
    finish(branch, tmp_path)
    sink = JsonlSink(tmp_path / "control-seed0" / "metrics.jsonl")
    sink.resume_at(15)
    for record in rows()[15:30]:
        sink.write(record["step"], {k: v for k, v in record.items() if k != "step"} | {"actor/entropy": 0.25})
    text = page(judge(branch, tmp_path))
    assert "differs from the run: step 15: actor/entropy is 0.3 in the first run and 0.25 in the second" in text
