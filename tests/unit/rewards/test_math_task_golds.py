"""Gold answers that no right response meets are found by other spellings."""

from __future__ import annotations

import logging

import pytest

from megatron_rl.config.data import RewardConfig
from megatron_rl.rewards.math_task import math_reward, respellings
from megatron_rl.rewards.rewarder import Rewarder
from megatron_rl.types import Prompt


@pytest.mark.parametrize(
    ("gold", "spelled"),
    [
        ('["34"]', "34"),
        ('["a", "b"]', "a, b"),
        (r"\\frac{1}{2}", r"\frac{1}{2}"),
        (r"$\frac{1}{2}$", r"\frac{1}{2}"),
        (r"\boxed{7}", "7"),
        (r"\frac12", r"\dfrac12"),
        ("1,234", "1234"),
        ("17.", "17"),
        (r"\left(1,2\right)", "(1,2" + r"\right)"),
    ],
)
def test_a_gold_is_respelled(gold, spelled):
    assert spelled in list(respellings(gold))


@pytest.mark.parametrize("gold", ["34", "Monday", "x+1", "[1, 2]", "", "[", "(a, b)"])
def test_a_plain_gold_has_no_other_spelling(gold):
    assert list(respellings(gold)) == []


def test_golds_that_no_right_answer_meets_are_named(caplog):
    golds = ["34", r"\frac{1}{2}", '["34"]', "1,234", "Monday"]
    prompts = [Prompt(f"p:{i}", [1], gold, "?", "p", {}) for i, gold in enumerate(golds)]
    with Rewarder(RewardConfig(name="math"), 64) as rewarder:
        unmet = rewarder.unmet(prompts)
        with caplog.at_level(logging.WARNING):
            rewarder.try_on(prompts[2:3])
    expected = [gold for gold in golds if any(not math_reward(rf"\boxed{{{t}}}", gold) for t in respellings(gold))]
    assert len(unmet) == len(expected)
    assert all(repr(gold) in line for gold, line in zip(expected, unmet))
    assert ("is not met by the answer '34'" in caplog.text) == ('["34"]' in expected)
