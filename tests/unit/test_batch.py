"""Groups in a batch: responses without a score, and groups that are compared by what is known."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from megatron_rl.batch import build_batch, build_unscored_batch, give_scores, group_metrics, keep_informative
from megatron_rl.config import ObjectiveConfig
from megatron_rl.config.objective import ObjectiveWarning
from megatron_rl.config.sections import BatchConfig
from megatron_rl.monitor.samples import rollout_metrics
from megatron_rl.types import Group, Prompt
from tests.support.groups import any_response
from tests.support.tiny import tiny_recipe


def group(name: str, *texts: str) -> Group:
    rollouts = [any_response(f"{name}/{i}", 2, text=text) for i, text in enumerate(texts)]
    return Group(Prompt(name, [1], "0", data_source="s"), rollouts)


def scored(name: str, *rewards: float | None) -> Group:
    made = group(name, *["t"] * len(rewards))
    for rollout, reward in zip(made.rollouts, rewards, strict=True):
        rollout.reward = rollout.raw_reward = reward or 0.0
        rollout.masked = rollout.unscored = reward is None
    return made


@pytest.mark.parametrize("advantage", ["rloo", "grpo", "dr_grpo", "reinforce_pp", "min_variance", "reinforce"])
def test_advantages_are_those_of_a_group_without_it(advantage):
    with pytest.warns(ObjectiveWarning) if advantage == "min_variance" else nullcontext():
        recipe = tiny_recipe(objective={"advantage": advantage})
    with_it = build_batch(0, [scored("p", 1.0, None, 0.0, 0.5), scored("q", 0.0, 1.0)], recipe.batch, recipe.objective)
    without = build_batch(0, [scored("p", 1.0, 0.0, 0.5), scored("q", 0.0, 1.0)], recipe.batch, recipe.objective)
    kept = [sequence for place, sequence in enumerate(with_it.sequences) if place != 1]
    assert [s.advantage for s in kept] == [s.advantage for s in without.sequences]
    assert (with_it.sequences[1].advantage, with_it.sequences[1].num_trained) == (0.0, 0)
    assert all(sequence.num_trained == 2 for sequence in kept)
    assert [sequence.group for sequence in with_it.sequences] == [0, 0, 0, 0, 1, 1]


def test_what_is_left_alone_has_no_baseline():
    batch = build_batch(0, [scored("p", 1.0, None), scored("q", 0.0, 1.0)], BatchConfig(), ObjectiveConfig())
    assert [sequence.num_trained for sequence in batch.sequences] == [0, 0, 2, 2]
    assert batch.sequences[0].advantage == 0.0
    nothing = build_batch(0, [scored("p", None, None)], BatchConfig(), ObjectiveConfig())
    assert [sequence.num_trained for sequence in nothing.sequences] == [0, 0]


def test_scores_that_come_late_make_the_same_batch():
    """Two of the responses have gone to another rank by then; half of another one's tokens are a tool's result."""

    def groups() -> list[Group]:
        made = [scored("p", 1.0, None, 0.5), scored("q", 0.0, 1.0)]
        made[0].rollouts[0].sampled, made[0].rollouts[0].num_sampled = np.array([True, False]), 1
        return made

    recipe = tiny_recipe()
    expected, late = build_batch(0, groups(), recipe.batch, recipe.objective), groups()
    batch = build_unscored_batch(0, late, recipe.batch)
    assert [s.num_trained for s in batch.sequences] == [1, 0, 2, 2, 2]
    for sequence in batch.sequences[1:3]:
        sequence.tokens = None
    give_scores(late, recipe.objective)
    for late, due in zip(batch.sequences, expected.sequences, strict=True):
        assert (late.advantage, late.reward, late.num_trained) == (due.advantage, due.reward, due.num_trained)
        assert late.loss_mask is None or np.array_equal(late.loss_mask, due.loss_mask)
    assert batch.minibatches == expected.minibatches


def test_groups_are_compared_by_what_is_known():
    groups = [scored("same", 1.0, None, 1.0), scored("other", 1.0, None, 0.0), scored("none", None, None)]
    assert [g.prompt.id for g in keep_informative(groups)] == ["other"]
    assert keep_informative(groups[2:]) == []
    assert group_metrics(groups)["groups/informative_frac"] == 0.5
    assert rollout_metrics(groups)["critic/rewards/mean"] == 0.75
    assert rollout_metrics(groups)["groups/no_signal_frac"] == 2 / 3
    assert "critic/rewards/mean" not in rollout_metrics(groups[2:])
