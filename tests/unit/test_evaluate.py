"""Evaluation: a smaller token budget is the beginning of a larger one's responses; what the curriculum reads of it."""

from __future__ import annotations

import json

import numpy as np

from megatron_rl.data import PromptSet
from megatron_rl.data.sampler import read_success_rates
from megatron_rl.evaluate import within_budget, write_success_rates
from megatron_rl.types import Group, Prompt, Rollout
from tests.support.groups import any_response


def rollout(tokens: list[int], reason: str) -> Rollout:
    return Rollout(
        id="p/0",
        prompt=[1],
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


def group(name: str, rewards: list[float], source: str = "", cut: int = 0) -> Group:
    rollouts = [
        any_response(f"{name}/{i}", i + 1, "length" if i < cut else "stop", raw_reward=reward)
        for i, reward in enumerate(rewards)
    ]
    return Group(Prompt(name, [1], "0", data_source=source), rollouts)


def test_the_curriculum_reads_what_eval_wrote(tmp_path):
    file = tmp_path / "results.prompts.jsonl"
    write_success_rates(file, [group("a:1", [1.0, 0.5, 0.0, 1.0]), group("a:0", [0.0])])
    known = PromptSet.of([Prompt(f"a:{i}", [i], "") for i in range(3)])
    assert np.array_equal(read_success_rates(file, known), np.array([0, 0.5, np.nan], np.float32), equal_nan=True)
    assert json.loads(file.read_text().splitlines()[0])["reward"] == 0.625
