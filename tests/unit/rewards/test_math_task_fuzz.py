"""Random answers: grading never raises, is 1 for an answer against itself and 0 for another number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.rewards.math_task import final_answer, math_verdict
from tests.support.answers import SMALL, TANGLES, TEXTS, spellings


@SMALL
@given(response=TEXTS, gold=TEXTS)
def test_every_pair_of_texts_gets_a_verdict(response, gold):
    verdict = math_verdict(response, gold)
    assert verdict in (0.0, 1.0) or set(verdict) == {"kind", "candidate", "gold", "accept_unevaluated"}


@SMALL
@given(text=TANGLES)
def test_only_the_last_box_counts(text):
    assert final_answer(text + r" so \boxed{17}") == "17"
    assert final_answer(r"\boxed{17} " + text.replace("boxed", "").replace("fbox", "")) in ("17", None)


@SMALL
@given(data=st.data(), value=st.fractions(max_denominator=1000), other=st.fractions(max_denominator=1000))
def test_another_number_is_never_the_answer(data, value, other):
    if value != other:
        said, gold = data.draw(st.sampled_from(spellings(other))), data.draw(st.sampled_from(spellings(value)))
        assert math_verdict(rf"\boxed{{{said}}}", gold) == 0.0


@SMALL
@given(items=st.lists(st.integers(-99, 99), min_size=2, max_size=6), brackets=st.sampled_from(["()", "[)", "(]"]))
def test_tuples_keep_their_order_and_lists_do_not(items, brackets):
    opening, closing = brackets
    said, turned = ",".join(map(str, items)), ",".join(map(str, reversed(items)))
    palindrome = items == items[::-1]
    assert math_verdict(rf"\boxed{{{opening}{said}{closing}}}", f"{opening}{said}{closing}") == 1.0
    assert math_verdict(rf"\boxed{{{opening}{turned}{closing}}}", f"{opening}{said}{closing}") == float(palindrome)
    assert math_verdict(rf"\boxed{{\{{{turned}\}}}}", rf"\{{{said}\}}") == 1.0


@pytest.mark.parametrize(
    "text", ["{", "\\", "\\frac", "$$", "\\(", "_", "^{", "\\begin{pmatrix}\\end{pmatrix}", "\\\\", "%"]
)
def test_broken_latex_equals_nothing_else(text):
    assert math_verdict(rf"\boxed{{{text}}}", "3") == 0.0 or isinstance(math_verdict(rf"\boxed{{{text}}}", "3"), dict)
