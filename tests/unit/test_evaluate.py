"""Evaluation: a smaller token budget is the beginning of a larger one's responses."""

from __future__ import annotations

import numpy as np

from megatron_rl.evaluate import within_budget
from megatron_rl.types import Group, Prompt, Rollout


def rollout(tokens: list[int], reason: str) -> Rollout:
    return Rollout(
        prompt_id="p",
        sample=0,
        tokens=np.array(tokens, dtype=np.int32),
        inference_logprobs=-np.arange(len(tokens), dtype=np.float32),
        finish_reason=reason,
        policy_versions=np.zeros(len(tokens), np.int32),
        text="whole",
    )


def test_longer_responses_are_cut_and_truncated():
    groups = [Group(Prompt(id="p", tokens=[1], answer=""), [rollout([5, 6, 7], "stop"), rollout([5, 2], "stop")])]
    ((cut, short),) = (group.rollouts for group in within_budget(groups, 2, lambda tokens: f"text of {tokens}"))
    assert (cut.tokens.tolist(), cut.finish_reason, cut.text) == ([5, 6], "length", "text of [5, 6]")
    assert cut.inference_logprobs.tolist() == [0.0, -1.0]
    assert (short.tokens.tolist(), short.finish_reason, short.text) == ([5, 2], "stop", "whole")
    assert groups[0].rollouts[0].tokens.tolist() == [5, 6, 7], "the responses of the larger budget are as they were"
