"""Equality of answers: random answers equal themselves, and spellings of a number have its value."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.rewards.compare import same, spelling
from megatron_rl.rewards.grammar import readings
from megatron_rl.rewards.math_task import math_verdict
from megatron_rl.rewards.tree import Algebra, exact_or_none
from tests.support.answers import SMALL, TEXTS, spellings


@SMALL
@given(text=TEXTS)
def test_an_answer_is_equal_to_itself(text):
    assert same(text, text, Algebra()) == bool(spelling(text))


@SMALL
@given(data=st.data(), value=st.fractions(min_value=-(10**9), max_value=10**9, max_denominator=10**4))
def test_spellings_of_a_number_have_its_value(data, value):
    one, other = (data.draw(st.sampled_from(spellings(value))) for _ in range(2))
    assert value in [exact_or_none(tree) for tree in readings(one)]
    assert math_verdict(rf"\boxed{{{one}}}", other) == 1.0
