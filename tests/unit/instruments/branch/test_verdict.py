"""Verdicts on planted curves."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from megatron_rl.errors import InputError
from megatron_rl.instruments.branch.arms import CONTROL
from megatron_rl.instruments.branch.plan import plan_branch
from megatron_rl.instruments.branch.verdict import (
    MOST_SEEDS,
    count_look,
    judge,
    page,
    price_of_look,
    seeds_to_decide,
)
from megatron_rl.instruments.lab.results import paired_effect, unseen_told
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
    assert cure.effect.alike_upper == rounded(mean + stats.t.ppf(0.975, 3) * deviation / 2)
    assert cure.p_holm == min(1.0, 2 * 2 * cure.p)  # the smaller of two, at the first look
    control = sum(PLANTED[CONTROL]) / 4
    assert cure.restored == rounded(mean / (0.6 - control))
    text = page(judgement)
    assert "Verdict: third-rate (learner.optimizer.lr 0.003 → 0.001) brings critic/score/mean back" in text
    assert "repeats 20 steps of the run, bit for bit" in text
    told = json.loads(json.dumps(judgement.as_json()))
    assert told["arms"][0]["keys"] == {"learner.optimizer.lr": [0.003, 0.001]}
    assert told["control"]["repeated_steps"] == 20
    assert unseen_told(4)[0] in text
    ends = ("lower", "upper", "alike_lower", "alike_upper")
    assert [told["arms"][0][end] for end in ends] == [None, None, cure.effect.alike_lower, cure.effect.alike_upper]


def test_two_seeds_that_disagree_decide_nothing(sick, tmp_path):
    branch = plan_branch(sick, from_step=10, steps=20, wanted=ARMS, seeds=2)
    finish(branch, tmp_path, PLANTED | {"third-rate": (0.60, 0.20)})
    judgement = judge(branch, tmp_path)
    assert judgement.cures == []
    assert judgement.sentence.startswith("undecided: third-rate")


def test_of_two_arms_that_bring_it_back_the_better_one_comes_first(sick, tmp_path):
    branch = plan_branch(sick, from_step=10, steps=20, wanted=("one-update", "third-rate"))
    finish(branch, tmp_path, PLANTED | {"one-update": (0.35, 0.37, 0.36, 0.34)})  # half of what was lost
    judgement = judge(branch, tmp_path)
    assert [cure.arm.name for cure in judgement.cures] == ["third-rate", "one-update"]
    assert judgement.sentence.endswith(" bring critic/score/mean back: each of them alone, the first most")


def chance_to_decide(mean: float, deviation: float, margin: float, num_arms: int, seeds: int) -> float:
    """By a sum over all means that ``seeds`` may have."""
    error = deviation / math.sqrt(seeds)
    estimates = mean + error * np.linspace(-8, 8, 200_001)
    t = np.abs(estimates) / error
    differs = (2 * stats.t.sf(t, seeds - 1) * num_arms < 0.05) & (np.abs(estimates) > margin)
    same = stats.t.sf((margin - np.abs(estimates)) / error, seeds - 1) * num_arms < 0.05
    density = stats.norm.pdf(estimates, mean, error)
    return float((density * (differs | same)).sum() / density.sum())


@pytest.mark.parametrize(
    ("differences", "margin", "num_arms"),
    [
        ((0.02, -0.03, 0.04), 0.1, 3),
        ((0.3, 0.05, 0.2), 0.05, 2),
        ((-0.06, 0.05, -0.02, 0.04), 0.06, 1),
        ((0.0125, 0.1125, 0.2125), 0.1, 1),  # nearly `MOST_SEEDS`
    ],
)
def test_the_seeds_that_decide_are_the_fewest_that_do(differences, margin, num_arms):
    arm, control = dict(enumerate(differences)), dict.fromkeys(range(len(differences)), 0.0)
    effect = paired_effect(arm, control, margin=margin)
    seeds = seeds_to_decide(effect, margin, num_arms)
    known = (float(np.mean(differences)), float(np.std(differences, ddof=1)), margin, num_arms)
    # An estimate that lies between two grid points may fall on either side.
    assert chance_to_decide(*known, seeds) > 0.8 - 1e-4
    assert seeds == len(differences) + 1 or chance_to_decide(*known, seeds - 1) < 0.8 + 1e-4


def test_an_effect_as_large_as_the_margin_is_never_decided():
    effect = paired_effect({0: 0.09, 1: 0.10, 2: 0.11}, dict.fromkeys(range(3), 0.0), margin=0.1)
    assert seeds_to_decide(effect, 0.1, 1) is None
    assert seeds_to_decide(paired_effect({0: 1.0}, {0: 0.0}, margin=0.1), 0.1, 1) is None


SLIGHT = (0.22, 0.14, 0.20, 0.12)


@pytest.mark.parametrize(("third_rate", "verdict"), [((0.90, 0.91, 0.89, 0.90), "does not"), (None, "undecided")])
def test_a_cure_that_restores_more_than_was_lost_says_what_counts_as_none(third_rate, verdict, sick, tmp_path):
    """A quarter of the loss, 0.125, is not excluded, but a quarter of what the cure restores, 0.2, is."""
    branch = plan_branch(sick, from_step=10, steps=20, wanted=ARMS)
    third_rate = third_rate or PLANTED["third-rate"]
    finish(branch, tmp_path, PLANTED | {"third-rate": third_rate, "one-update": SLIGHT})
    judgement = judge(branch, tmp_path)
    gains, whole = (np.subtract(values, PLANTED[CONTROL]) for values in (SLIGHT, third_rate))
    p = stats.ttest_rel(gains, whole / 4, alternative="less").pvalue
    assert (p < 0.05 and whole.mean() > 0.5) == (verdict == "does not")  # of one other arm: nothing to correct for
    judged = next(judged for judged in judgement.arms if judged.arm.name == "one-update")
    assert judged.verdict == verdict
    assert (judged.seeds_to_decide is None) == (verdict == "does not")
    assert ("restores more than was lost: a quarter of that" in page(judgement)) == (verdict == "does not")
    assert judgement.as_json()["beside"] == ("third-rate" if verdict == "does not" else None)


@pytest.mark.parametrize(("second", "verdict"), [((0.11, 0.12, 0.09, 0.10), "does not"), (None, "undecided")])
def test_holms_correction_is_over_the_arms_beside_the_best(second, verdict, sick, tmp_path):
    """An arm that is as slight as this is decided after one that is nothing, but not beside another that is open."""
    from megatron_rl.instruments.branch.arms import own_arm

    slight = (0.23, 0.10, 0.21, 0.08)
    best = (0.90, 0.91, 0.89, 0.90)
    branch = plan_branch(sick, from_step=10, steps=20, wanted=ARMS, own=[own_arm("cold", ["rollout.temperature=0.9"])])
    planted = {"third-rate": best, "one-update": slight, "cold": second or (0.30, 0.07, 0.28, 0.05)}
    finish(branch, tmp_path, PLANTED | planted)
    less = np.subtract(best, PLANTED[CONTROL]) / 4
    first_look = 2
    p = {
        arm: first_look * stats.ttest_rel(np.subtract(planted[arm], PLANTED[CONTROL]), less, alternative="less").pvalue
        for arm in ("one-update", "cold")
    }
    assert p["one-update"] < 0.05 < 2 * p["one-update"]
    assert (2 * p["cold"] < 0.05) == (verdict == "does not")
    judged = next(judged for judged in judge(branch, tmp_path).arms if judged.arm.name == "one-update")
    assert judged.verdict == verdict


def test_an_arm_that_restores_less_than_a_quarter_of_the_best_is_no_cure(sick, tmp_path):
    """It restores more than a quarter of the loss for certain, and so it was a cure beside the loss."""
    branch = plan_branch(sick, from_step=10, steps=20, wanted=ARMS)
    some = (0.26, 0.28, 0.24, 0.27)  # 0.16 of 0.5 more than the control
    finish(branch, tmp_path, PLANTED | {"third-rate": (0.95, 0.65, 0.95, 0.65), "one-update": some})
    judgement = judge(branch, tmp_path)
    assert {judged.arm.name: judged.verdict for judged in judgement.arms} == {
        "third-rate": "brings it back", "one-update": "undecided",
    }  # fmt: skip


def test_an_arm_that_learns_is_found_where_nothing_was_lost(tmp_path):
    """The reward was low from the start: an outcome has to be named, and the best arm says what counts as none."""
    flat = [record | {"critic/score/mean": 0.1, "critic/rewards/mean": 0.1} for record in rows()]
    run = make_run(tmp_path / "flat", flat)
    with pytest.raises(InputError, match=r"(?s)nothing to bring back.*a reward also where it was low from the start"):
        plan_branch(run, from_step=10, steps=20, wanted=ARMS)
    branch = plan_branch(run, from_step=10, steps=20, wanted=ARMS, outcome="critic/score/mean")
    assert (branch.loss.size, branch.loss.back) == (0.0, "higher")
    finish(branch, tmp_path, PLANTED | {"one-update": PLANTED[CONTROL]})  # equal, so that there is no scatter
    judgement = judge(branch, tmp_path)
    assert {judged.arm.name: (judged.verdict, judged.restored) for judged in judgement.arms} == {
        "third-rate": ("brings it back", None), "one-update": ("does not", None),
    }  # fmt: skip
    assert "there; nothing was lost" in page(judgement)
    finish(branch, tmp_path / "open", PLANTED | dict.fromkeys(ARMS, PLANTED[CONTROL]))
    assert judge(branch, tmp_path / "open").sentence.endswith("or not; so far they do exactly what the control does")


def test_a_reward_that_rose_is_not_brought_back_by_a_lower_one(tmp_path):
    risen = [record | {"critic/score/mean": 0.1 if record["step"] < 20 else 0.15} for record in rows()]
    branch = plan_branch(
        make_run(tmp_path / "risen", risen), from_step=10, steps=20, wanted=ARMS, outcome="critic/score/mean"
    )
    assert branch.loss.back == "higher"
    finish(branch, tmp_path, PLANTED | {CONTROL: (0.15, 0.15, 0.16, 0.14), "one-update": (0.01, 0.02, 0.01, 0.0)})
    verdicts = {judged.arm.name: judged.verdict for judged in judge(branch, tmp_path).arms}
    assert verdicts == {"third-rate": "brings it back", "one-update": "makes it worse"}


def test_the_verdict_says_how_many_seeds_would_decide(sick, tmp_path):
    branch = plan_branch(sick, from_step=10, steps=20, wanted=ARMS)
    wide = (0.02, 0.30, 0.01, 0.15)
    finish(branch, tmp_path, PLANTED | {"one-update": wide})
    judgement = judge(branch, tmp_path)
    effect = next(judged.effect for judged in judgement.arms if judged.arm.name == "one-update")
    seeds = seeds_to_decide(effect, branch.loss.margin, 2)
    assert 4 < seeds <= MOST_SEEDS
    assert judgement.sentence.endswith(f" back; undecided: one-update, about --seeds {seeds} would decide")


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


def test_every_look_at_more_seeds_has_its_price(sick, tmp_path):
    branch = plan_branch(sick, from_step=10, steps=20, wanted=ARMS)
    finish(branch, tmp_path)
    assert sum(1 / price_of_look(k) for k in range(1, 10_000)) < 1  # shares of the level
    assert [count_look(tmp_path, seeds) for seeds in (4, 4, 8, 4, 6)] == [1, 1, 2, 1, 3]
    (tmp_path / "looks.json").write_text("[4, x")
    assert count_look(tmp_path, 4) == 1
    first, third = (judge(branch, tmp_path, looks).arms[0] for looks in (1, 3))
    assert (first.p, third.p_holm) == (third.p, rounded(6 * first.p_holm))
    text = page(judge(branch, tmp_path, 3))
    assert "times 12 for the look number 3" in text
    assert "Without it: third-rate +" in text
    assert "a collapse of up to 53% of them may be unseen" in text  # 1 − 0.05 ** (1 / 4)
    last = judge(branch, tmp_path, 200_000).arms[0]
    assert (last.p_holm, last.verdict) == (1.0, "undecided")


def test_a_control_that_does_not_go_wrong_is_a_stop(sick, tmp_path):
    """Arms that begin before the fault compare healthy runs with each other."""
    branch = plan_branch(sick, from_step=10, steps=20, wanted=ARMS)
    finish(branch, tmp_path, {CONTROL: (0.10, 0.60, 0.61, 0.59), "third-rate": (0.50,) * 4, "one-update": (0.60,) * 4})
    judgement = judge(branch, tmp_path)
    assert {judged.verdict for judged in judgement.arms} == {"not judged"}
    assert judgement.sentence.startswith("nothing to explain from here: critic/score/mean is 0.475 in the control")
    assert judgement.cures == []


@pytest.mark.parametrize("arm", [(0.60, 0.61), (0.5, 0.5, 0.5, 0.5)])
def test_too_few_seeds_and_differences_without_spread_decide_nothing(arm, sick, tmp_path):
    branch = plan_branch(sick, from_step=10, steps=20, wanted=["third-rate"], seeds=len(arm))
    finish(branch, tmp_path, {CONTROL: (0.1,) * len(arm), "third-rate": arm})
    (judged,) = judge(branch, tmp_path).arms
    assert judged.verdict == "undecided"


def test_two_seeds_beside_the_best_arm_decide_nothing(sick, tmp_path):
    branch = plan_branch(sick, from_step=10, steps=20, wanted=ARMS)
    finish(branch, tmp_path, PLANTED | {"third-rate": (0.90, 0.91, 0.89, 0.90)})
    for seed in (2, 3):
        (tmp_path / f"one-update-seed{seed}" / "DONE").unlink()
    judgement = judge(branch, tmp_path)
    verdicts = {judged.arm.name: judged.verdict for judged in judgement.arms}
    assert verdicts == {"third-rate": "brings it back", "one-update": "undecided"}
