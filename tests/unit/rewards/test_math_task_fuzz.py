"""Random answers: grading never raises, is 1 for an answer against itself and 0 for another number."""

from __future__ import annotations

import re
import re._constants as _constants
import re._parser as _parser
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.rewards import algebra, compare, forms, grammar, latex, math_task, phrases, units
from megatron_rl.rewards.algebra import NumericAlgebra
from megatron_rl.rewards.compare import same
from megatron_rl.rewards.math_task import final_answer, math_verdict
from tests.support.answers import FORMULAS, SMALL, TANGLES, TEXTS, spellings


@SMALL
@given(response=TEXTS, gold=TEXTS)
def test_every_pair_of_texts_gets_a_verdict(response, gold):
    verdict = math_verdict(response, gold)
    assert verdict in (0.0, 1.0) or set(verdict) == {"kind", "candidate", "gold", "accept_unevaluated"}


CALLS = 3_000  # of Python functions for each character of two texts, above what half of them need


def calls_of(function) -> int:
    """Number of Python functions that ``function`` calls: a cost that depends on no machine."""
    count = 0

    def count_calls(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(count_calls)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@settings(SMALL, max_examples=150)
@given(response=FORMULAS, gold=FORMULAS)
def test_no_pair_of_formulas_raises_or_costs_more_than_its_structure(response, gold):
    """A worker's comparison, with all algebra: no unbounded integers, no search."""

    def judge():
        math_verdict(rf"\boxed{{{response}}}", gold)
        same(response, gold, NumericAlgebra())

    assert calls_of(judge) <= CALLS * (20 + len(response) + len(gold))


@pytest.mark.parametrize("module", [algebra, compare, forms, grammar, latex, math_task, phrases, units])
def test_no_pattern_can_backtrack_through_repeats_of_repeats(module):
    for pattern in (value for value in vars(module).values() if isinstance(value, re.Pattern)):
        assert not repeats_inside_repeats(_parser.parse(pattern.pattern, pattern.flags), False), pattern.pattern


def repeats_inside_repeats(parsed, inside: bool) -> bool:
    """Whether an unbounded repeat that gives back what it took stands inside another one."""
    for operation, argument in parsed:
        name, parts = str(operation), argument if isinstance(argument, tuple | list) else ()
        unbounded = name in ("MAX_REPEAT", "MIN_REPEAT") and argument[1] == _constants.MAXREPEAT
        if unbounded and inside:
            return True
        stack = list(parts)
        while stack:
            part = stack.pop()
            if isinstance(part, _parser.SubPattern):
                if repeats_inside_repeats(part, inside or unbounded):
                    return True
            elif isinstance(part, tuple | list):
                stack += part
    return False


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
