"""Answers are compared as numbers, whatever a hostile response asks for."""

from __future__ import annotations

import time

from megatron_rl.rewards.algebra import NumericAlgebra
from megatron_rl.rewards.compare import same

NESTED = [
    "(",
    "{",
    r"\{",
    "|",
    r"\frac{",
    r"\sqrt{",
    "x^",
    "e^",
    "9^",
    r"\sin ",
    "-",
    "--",
    r"\not",
    r"\text{",
    "x_",
    "f(",
]
REPEATED = [
    r"\pm1,",
    "(x+1)",
    "(x+1)^{99}",
    r"\pi",
    "1+",
    "1/3+",
    r"\sqrt[9]{7}",
    "1 000 ",
    "9!",
    r"\binom{9}{4}",
    "a ",
    "x=",
    "&",
]
LARGE = [
    "9^{9^{9}}", "x^{9999999}", r"\sin(9^{9^9})", "(9^9)^{9^9}", "((10!)!)!", r"\binom{1000000}{500000}", "2^{20000}",
    "1e999999999", "9" * 1990, r"\sqrt[" + "9" * 50 + "]{2}", r"e^{e^{e^{e^e}}}", r"\tan(\tan(10^{90}))", "x^{x^{x^x}}",
    r"\lfloor e^{10000}\rfloor", r"(1+\sqrt2)^{99999}", r"\sinh(10^9)", r"0.\overline{" + "9" * 1500 + "}",
    r"\gcd(" + "9" * 900 + "," + "8" * 900 + ")",
]  # fmt: skip


def test_no_answer_costs_much_or_raises():
    hostile = [piece * (1990 // len(piece)) for piece in NESTED + REPEATED] + LARGE
    hostile += [piece * 60 + "9" + closing * 60 for piece in NESTED for closing in ("", "}", ")")]
    algebra = NumericAlgebra()
    start = time.process_time()
    for answer in hostile:
        for gold in ("5", r"\sqrt2+\pi", "x+1", r"x>3", "1,2,3"):
            assert not same(answer, gold, algebra)
    assert time.process_time() - start < 30.0  # some 2 s; a number written out or a search takes minutes each
