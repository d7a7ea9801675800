"""Random answers, and spellings of a number."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import settings
from hypothesis import strategies as st

PIECES = st.sampled_from(
    [r"\frac", r"\sqrt", r"\text{", r"\boxed{", r"\pm", r"\cup", r"\in", r"\le", r"\left(", r"\right]",
     r"\begin{pmatrix}", r"\end{pmatrix}", r"\\", "&",
     "{", "}", "(", ")", "[", "]", "1", "23", ".5", ",", "=", "<", "^", "_", "%", r"\%",
     r"\$", "$", "x", "or", " ", "\n", r"\!", "cm", "°", "−", "answer is ", "####", r"\approx", ":", "/", "-"]
)  # fmt: skip
TANGLES = st.lists(PIECES, max_size=30).map("".join)
TEXTS = TANGLES | st.text(max_size=80)
SMALL = settings(max_examples=300)


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
