"""Random answers: grading never raises, is 1 for an answer against itself and 0 for another number."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.rewards.math_task import final_answer, math_verdict

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
@given(response=TEXTS, gold=TEXTS)
def test_every_pair_of_texts_gets_a_verdict(response, gold):
    verdict = math_verdict(response, gold)
    assert verdict in (0.0, 1.0) or set(verdict) == {"kind", "candidate", "gold", "accept_unevaluated"}


@SMALL
@given(text=TANGLES)
def test_only_the_last_box_counts(text):
    assert final_answer(text + r" \boxed{17}") == "17"
    assert final_answer(r"\boxed{17} " + text.replace("boxed", "").replace("fbox", "")) in ("17", None)


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
