"""Arms of a branch: what each changes, and which are left out and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.errors import InputError
from megatron_rl.instruments.branch.arms import CONTROL, NAMES, arms_of, own_arm
from megatron_rl.instruments.branch.plan import plan_branch
from megatron_rl.run.identity import recipe_changes
from tests.support.sick_run import SICK, STEPS, make_run, rows, write
from tests.support.tiny import tiny_recipe


@pytest.fixture
def sick(tmp_path) -> Path:
    return make_run(tmp_path / "sick")


APPLY = {
    "third-rate": {},
    "one-update": {"batch": {"minibatches": 4}},
    "usual-clip": {"objective": {"policy_term": {"name": "ppo_clip", "clip_high": 5.0}}},
    "no-staleness": {"rollout": {"engine": "vllm_server", "max_staleness": 1}},
    "unrounded": {"rollout": {"quantization": {"weights": "int4", "block": [1, 64]}}},
    "no-dose": {"rollout": {"engine": "exact"}, "exact": {"noise": {"kind": "logits", "std": 0.1}}},
    "bf16": {"rollout": {"dtype": "fp16"}, "learner": {"dtype": "fp16"}},
    "fp32": {"rollout": {"dtype": "bf16"}, "learner": {"dtype": "bf16"}},
    "r3": {},
    "exact-engine": {"rollout": {"quantization": {"weights": "int8"}}},
    "tis": {},
    "overlong-penalty": {},
    "usual-temperature": {"rollout": {"temperature": 0.5}},
    "other-data-order": {},
}
IDLE = {
    "one-update": ({}, "batch.minibatches is 1"),
    "usual-clip": ({"objective": {"policy_term": {"name": "gspo"}}}, "objective.policy_term is gspo"),
    "no-staleness": ({}, "rollout.max_staleness is 0"),
    "unrounded": ({}, "rollout.quantization.weights is None"),
    "no-dose": ({}, "exact.noise is None"),
    "bf16": ({}, "nothing is fp16"),
    "fp32": ({}, "learner.dtype is 'fp32'"),
    "r3": ({"routing": {"replay": "r3"}}, "routing.replay is 'r3'"),
    "exact-engine": ({"rollout": {"engine": "exact"}}, "rollout.engine is 'exact'"),
    "tis": ({"objective": {"correction": [{"mode": "mis"}]}}, "objective.correction has mis already"),
    "overlong-penalty": ({"reward": {"overlong": {"buffer": 4}}}, "reward.overlong is set already"),
    "usual-temperature": ({}, "rollout.temperature is 1.0"),
    "other-data-order": ({"data": {"shuffle": False}}, "data.shuffle is false"),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::megatron_rl.config.objective.ObjectiveWarning")
def test_an_arm_changes_its_own_keys_and_no_other_that_a_resumed_run_may_not_change(name, tmp_path):
    sections = SICK | APPLY[name]
    folder = write(tmp_path / "sick", rows(), tiny_recipe(name="sick", num_steps=STEPS, **sections))
    branch = plan_branch(folder, from_step=0, wanted=[name], seeds=2)
    assert [arm.name for arm in branch.arms] == [name]
    parent = branch.recipe_of_run.model_dump(mode="json")
    for job in branch.jobs(tmp_path):
        _, others = recipe_changes(parent, branch.recipe(job).model_dump(mode="json"))
        seeds = {"seed", "rollout.seed"} if job.seed else set()
        own = set() if job.arm == CONTROL else set(branch.arms[0].keys)
        changed = {change.key for change in others} - seeds
        covered = {
            key for key in own if any(key == c or c.startswith(key + ".") or key.startswith(c + ".") for c in changed)
        }
        assert covered == own
        assert all(any(c == key or c.startswith(key + ".") or key.startswith(c + ".") for key in own) for c in changed)
        assert seeds <= {change.key for change in others}


@pytest.mark.parametrize("name", IDLE)
@pytest.mark.filterwarnings("ignore::megatron_rl.config.objective.ObjectiveWarning")
def test_an_arm_that_would_do_nothing_is_left_out_with_the_reason(name):
    sections, reason = IDLE[name]
    arms, left_out = arms_of(tiny_recipe(**sections), [], [name])
    assert arms == []
    assert left_out[0].name == name
    assert reason in left_out[0].reason


def test_every_kind_of_arm_is_tried_here():
    assert set(APPLY) == set(NAMES)
    assert set(IDLE) == set(NAMES) - {"third-rate"}  # which is another rate always


def test_the_arms_are_those_of_the_suspects_in_their_order_and_the_commonest():
    recipe = tiny_recipe(**(SICK | {"rollout": {"temperature": 0.5}}))
    arms, left_out = arms_of(recipe, ["temperature", "reward", "staleness"], None)
    assert [arm.name for arm in arms] == ["usual-temperature", "tis", "third-rate", "one-update"]
    assert [item.name for item in left_out] == ["no-staleness", "reward"]
    assert "--arm reward KEY=VALUE" in left_out[1].reason
    every, _ = arms_of(recipe, [], None)
    assert len(every) > len(arms)
    with pytest.raises(InputError, match=r"--arms: 'half-rate' does not exist; allowed are all, third-rate"):
        arms_of(recipe, [], ["half-rate"])


def test_an_arm_that_the_recipe_forbids_is_left_out_with_its_message(tmp_path):
    folder = make_run(tmp_path / "sick", routing={"telemetry": True})
    branch = plan_branch(folder, wanted=["exact-engine", "third-rate"])
    assert [arm.name for arm in branch.arms] == ["third-rate"]
    assert [item.name for item in branch.left_out] == ["exact-engine"]
    assert branch.left_out[0].reason.startswith("routing.telemetry: true needs another engine's routes")
    assert "(set:" not in branch.left_out[0].reason


def test_an_arm_of_ones_own(sick):
    arm = own_arm("half", ["learner.optimizer.lr=1.5e-3", "batch.minibatches=2"])
    branch = plan_branch(sick, wanted=["third-rate"], own=[arm])
    job = next(job for job in branch.jobs(sick) if job.arm == "half")
    recipe = branch.recipe(job)
    assert (recipe.learner.optimizer.lr, recipe.batch.minibatches) == (1.5e-3, 2)
    for name, settings, message in (
        ("tis", ["a=1"], "the name of another arm"),
        ("mine", [], "changes nothing"),
        ("mine", ["data.seed=3"], "a key that a branch does not set by itself"),
        ("mine", ["lr"], "expected KEY=VALUE"),
    ):
        with pytest.raises(InputError, match=message):
            own_arm(name, settings)
    with pytest.raises(InputError, match=r"--arm wrong: .*learner\.optimizer\.lr"):
        plan_branch(sick, own=[own_arm("wrong", ["learner.optimizer.lr=-1"])])
