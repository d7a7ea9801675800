"""Equality of answers: random answers equal themselves, and spellings of a number have its value."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.rewards.compare import exact_or_none, same, spelling
from megatron_rl.rewards.grammar import readings
from megatron_rl.rewards.math_task import math_verdict
from megatron_rl.rewards.tree import Algebra

PIECES = st.sampled_from(
    [r"\frac", r"\sqrt", r"\text{", r"\boxed{", r"\pm", r"\cup", r"\in", r"\le", r"\left(", r"\right]",
     r"\begin{pmatrix}", r"\end{pmatrix}", r"\\", "&",
     "{", "}", "(", ")", "[", "]", "1", "23", ".5", ",", "=", "<", "^", "_", "%", r"\%",
     r"\$", "$", "x", "or", " ", "\n", r"\!", "cm", "°", "−", "answer is ", "####", r"\approx", ":", "/", "-"]
)  # fmt: skip
TANGLES = st.lists(PIECES, max_size=30).map("".join)
TEXTS = TANGLES | st.text(max_size=80)
SMALL = settings(max_examples=300)


@SMALL
@given(text=TEXTS)
def test_an_answer_is_equal_to_itself(text):
    assert same(text, text, Algebra()) == bool(spelling(text))


def spellings(value: Fraction):
    sign, size = ("-" if value < 0 else ""), abs(value)
    whole, rest = divmod(size.numerator, size.denominator)
    forms = [
        rf"{sign}\frac{{{size.numerator}}}{{{size.denominator}}}",
        rf"{sign}\dfrac {{{3 * size.numerator}}} {{{3 * size.denominator}}}",
        f"{sign}{size.numerator}/{size.denominator}",
        rf"${sign}\frac{{{size.numerator}}}{{{size.denominator}}}$.",
    ]
    if whole and rest:
        forms.append(rf"{sign}{whole}\frac{{{rest}}}{{{size.denominator}}}")
    if size.denominator == 1:
        forms += [
            f"{sign}{size.numerator}",
            f"{sign}{size.numerator:,}",
            f"{sign}{size.numerator}.00",
            f"{sign}00{size.numerator}",
        ]
    return forms


@SMALL
@given(data=st.data(), value=st.fractions(min_value=-(10**9), max_value=10**9, max_denominator=10**4))
def test_spellings_of_a_number_have_its_value(data, value):
    one, other = (data.draw(st.sampled_from(spellings(value))) for _ in range(2))
    assert value in [exact_or_none(tree) for tree in readings(one)]
    assert math_verdict(rf"\boxed{{{one}}}", other) == 1.0
