"""Prompts, responses, groups and sequences: what they say of themselves."""

from __future__ import annotations

import numpy as np

from megatron_rl.types import Batch, Group, Prompt, Rollout, Sequence, sequence_id


def rollout(sample: int = 0, tokens: list[int] | None = None, **keys) -> Rollout:
    given = {"finish_reason": "stop", "inference_logprobs": None, "policy_versions": None} | keys
    return Rollout("p", sample, None if tokens is None else np.array(tokens, np.int32), **given)


def test_a_prompt_that_a_step_requests_again_has_other_sequences():
    assert sequence_id("a:3", 1) == "a:3/1"
    assert sequence_id("a:3", 1, 2) == "a:3/1+2"
    assert rollout(4, occurrence=1).id == "p/4+1"


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
    keys = {"advantage": 0.0, "reward": 0.0, "inference_logprobs": None, "policy_versions": None}
    here = Sequence("p/0", np.arange(5), 2, loss_mask=np.array([True, False, True]), mask_elsewhere=9, **keys)
    elsewhere = Sequence("p/1", None, 2, loss_mask=None, length=6, mask_elsewhere=4, **keys)
    assert [(each.length, each.response_length, each.num_trained) for each in (here, elsewhere)] == [
        (5, 3, 2),
        (6, 4, 4),
    ]
    assert Batch(0, [here, elsewhere], [[0, 1]]).num_tokens == 11
