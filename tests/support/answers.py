"""Random answers, and spellings of a number."""

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
_ATOMS = st.sampled_from(
    ["x", "n", "k", "ab", "2", "-3", "0.5", r"\pi", "e", "i", "100000", "10^{7000}", r"\infty", r"\text{ cm}",
     r"\text{six}",
     r"0.\overline{3}", "0.(27)", r"\mathbb{Z}", r"\text{ apples}", r"\ldots", "2023", r"30^\circ 15'", "是"]
)  # fmt: skip
_SHAPES = st.sampled_from(
    ["{}+{}", "{}{}", "{}-{}", r"{}\cdot {}", r"\frac{{{}}}{{{}}}", "({})^{{{}}}", "{}^{{{}}}", r"\sqrt[{}]{{{}}}",
     "({},{})",
     "[{},{})", r"\{{{},{}\}}", "{}={}", "{}<{}", "{}:{}", r"\binom{{{}}}{{{}}}", "({})!{}", r"\lfloor {}\rfloor {}",
     r"{}\pm {}",
     r"{}\equiv {}\pmod 7", r"\log_{{{}}} {}", r"\sin({}){}", "{}, {}", r"{}\text{{ or }}{}", r"\sum_{{k=1}}^{{{}}} {}",
     r"\int_0^{{{}}} {} dx", r"\begin{{cases}}{} & x>0\\ {}\end{{cases}}", r"\begin{{pmatrix}}{}\\{}\end{{pmatrix}}",
     r"\begin{{aligned}}{}&={}\end{{aligned}}", r"{}\in {}", "|{}|{}", r"{}\text{{ ft }}{}\text{{ in}}", r"{}\%{}",
     "{}/{}"]
)  # fmt: skip
FORMULAS = st.recursive(
    _ATOMS,
    lambda inner: st.builds(lambda shape, one, other: shape.format(one, other), _SHAPES, inner, inner),
    max_leaves=12,
)
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
