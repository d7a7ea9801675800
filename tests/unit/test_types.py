"""Prompts, responses, groups and sequences: what they say of themselves."""

from __future__ import annotations

import numpy as np

from megatron_rl.types import Batch, Group, Prompt, Rollout, sequence_id


def rollout(sample: int | str = 0, tokens: list[int] | None = None, **keys) -> Rollout:
    given = {"finish_reason": "stop", "inference_logprobs": None, "policy_versions": None} | keys
    return Rollout(f"p/{sample}", [1, 2], None if tokens is None else np.array(tokens, np.int32), **given)


def test_a_prompt_that_a_step_requests_again_has_other_sequences():
    assert sequence_id("a:3", 1) == "a:3/1"
    assert sequence_id("a:3", 1, 2) == "a:3/1+2"
    assert rollout("4+1").sample == 4


def test_the_length_is_that_of_the_tokens_where_they_are_here():
    assert rollout(tokens=[5, 6, 7], length=99).length == 3
    assert rollout(length=99).length == 99
    assert [rollout(finish_reason=reason).truncated for reason in ("stop", "length", "abort")] == [False, True, False]


def test_a_groups_rewards_are_those_that_are_known():
    rollouts = [rollout(0, reward=0.5), rollout(1, reward=9.0, unscored=True), rollout(2, reward=1.0, masked=True)]
    group = Group(Prompt("p", [1], ""), rollouts)
    assert [each.sample for each in group.scored] == [0, 2]
    assert group.rewards == [0.5, 1.0]


def test_a_sequence_counts_its_trained_tokens_here_or_elsewhere():
    here = rollout(tokens=[2, 3, 4], sampled=np.array([True, False, True]))
    elsewhere = rollout(1, length=4)
    assert [(each.whole_length, each.length, each.num_trained) for each in (here, elsewhere)] == [
        (5, 3, 2),
        (6, 4, 4),
    ]
    assert here.whole.tolist() == [1, 2, 2, 3, 4]
    assert (here.loss_mask.tolist(), elsewhere.loss_mask) == ([True, False, True], None)
    here.masked = elsewhere.masked = True
    assert (here.num_trained, here.loss_mask.any(), elsewhere.num_trained) == (0, False, 0)
    assert Batch(0, [here, elsewhere], [[0, 1]]).num_tokens == 11
