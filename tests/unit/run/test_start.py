"""The start of a run."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from megatron_rl.batch import build_unscored_batch
from megatron_rl.rewards.rewarder import RewardFault, Scores
from megatron_rl.run.start import Run
from megatron_rl.train import score_batch, update
from megatron_rl.types import Group, Prompt
from tests.support.groups import any_response
from tests.support.tiny import tiny_recipe


class Announcing:
    def announce_to(self, listener): ...


SEVERAL = {"batch": {"prompts": 4, "minibatches": 2}}
CHOOSES = {"minibatches": 2, "prompts": 4, "filter_groups": True}
UNDONE = {"acceptance": {"tolerance": 0.1}, "data": {"train": "t.jsonl", "validation": "v.jsonl"}}


@pytest.mark.parametrize(
    ("sections", "has_functions", "generator", "late"),
    [
        (SEVERAL, True, Announcing(), True),
        ({"routing": {"replay": "r2"}}, True, Announcing(), True),
        ({}, True, Announcing(), False),  # there is no pass to wait in
        (SEVERAL, False, Announcing(), False),  # built-in rewards are quick
        (SEVERAL, True, object(), False),  # nothing was scored meanwhile
        ({"batch": CHOOSES}, True, Announcing(), False),  # rewards choose the batch
        ({**SEVERAL, "objective": {"anchor": "bypass"}}, True, Announcing(), False),
        ({**SEVERAL, **UNDONE}, True, Announcing(), False),
        ({"reference": {}, "objective": {"kl_in_reward": {"coef": 0.1}}}, True, Announcing(), True),
    ],
)
def test_scores_may_come_late_where_the_pass_for_old_logprobs_does_not_need_them(
    sections, has_functions, generator, late
):
    run = SimpleNamespace(
        recipe=tiny_recipe(**sections), rewarder=SimpleNamespace(has_functions=has_functions), generator=generator
    )
    assert Run.scores_late.fget(run) is late


def test_what_a_divergence_takes_off_stands_beside_a_score_that_comes_late():
    """The learner finds `kl_penalty` before the scores come: it is no part of the reward that they set."""
    groups = [Group(Prompt("p", [1], ""), [any_response(f"p/{i}", 2) for i in range(2)])]
    recipe = tiny_recipe(reference={}, objective={"kl_in_reward": {"coef": 0.1}})
    batch = build_unscored_batch(0, groups, recipe.batch)

    def learn(batch, complete):
        batch.sequences[0].kl_penalty = 3.0
        complete()
        return {}

    def reward(groups, step):
        groups[0].rollouts[0].reward = 1.0
        return Scores({"reward/errors": 0.0}, [], 2)

    run = MagicMock(recipe=recipe, reward=reward)
    run.learner.update, run.learner.scheduler.metrics.return_value = learn, {}
    update(run, batch, groups, partial(score_batch, run, batch, groups, {}))
    assert batch.sequences[0].advantage < 0 < batch.sequences[1].advantage  # 1 - 3 against 0


def test_a_batch_that_is_scored_late_is_scored_before_its_first_update():
    """And a step whose scores cannot be had is saved with what was taken before it was sampled."""
    calls = []
    groups = [Group(Prompt("p", [1], ""), [any_response(f"p/{i}", 2) for i in range(2)])]
    recipe = tiny_recipe(**SEVERAL)
    batch = build_unscored_batch(0, groups, recipe.batch)

    def learn(batch, complete):
        calls.append([sequence.advantage for sequence in batch.sequences])
        complete()
        calls.append([sequence.advantage for sequence in batch.sequences])
        return {}

    def reward(groups, step):
        groups[0].rollouts[0].reward = 1.0
        return Scores({"reward/errors": 0.0}, [], 2)

    def refuse(scores, step):
        raise RewardFault("too many")

    run = MagicMock(recipe=recipe, reward=reward)
    run.learner.update = learn
    run.learner.scheduler.metrics.return_value = {}
    metrics = update(run, batch, groups, partial(score_batch, run, batch, groups, {"taken": 1}))
    assert calls[0] == [0.0, 0.0]
    assert calls[1][0] > 0 > calls[1][1]
    assert metrics["groups/sampled"] == 1.0
    assert run.saved_on_fault.call_args.args == ({"taken": 1},)
    (observed,) = run.learner.scheduler.observe_length.call_args_list
    assert observed.args[1] == 2.0
    run.refuse_failures = refuse
    run.saved_on_fault.return_value.__exit__.return_value = False
    with pytest.raises(RewardFault):
        update(run, batch, groups, partial(score_batch, run, batch, groups, {"taken": 1}))
    assert run.learner.scheduler.observe_length.call_count == 1, "the step will come again"
