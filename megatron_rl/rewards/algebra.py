r"""Equality of two mathematical expressions by math-verify. Imported by worker processes alone.

Expressions are read with math-verify's LaTeX reader, whole: its `parse`, made to find an answer somewhere in a text,
would take `1/2` out of anything that holds ``\frac{1}{2}``.

math-verify (SymPy behind it) proposes; a numeric check at high precision disposes. The check is needed: math-verify
compares decimals at six places and chops small differences to zero, so that it takes ``.0000671`` for ``.0000672`` and
``2^{-97}`` for ``2^{-98}``.

Decimals are read as the fractions that they are: as floating-point numbers they agree with nothing to 30 digits.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from functools import lru_cache

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from math_verify import verify
from math_verify.grader import should_treat_as_complex

from megatron_rl.rewards.canonical import plain_number, rounds_to

logging.disable(logging.CRITICAL)  # math-verify logs each expression that it cannot read

_DIGITS = 30  # of numeric evaluation
_AGREE = sympy.Float("1e-20", _DIGITS)  # relative difference of equal values at that precision, with room to spare
_ZERO = sympy.Float("1e-25", _DIGITS)  # what is left of an expression whose exact value is zero
_SPELLING = NormalizationConfig(basic_latex=True, malformed_operators=True, boxed="none")
_POINTS = (Fraction(17, 13), Fraction(29, 11), Fraction(5, 7))  # where expressions with variables are compared
_DECIMAL = re.compile(r"(?<![\d.])((?:\d{1,3}(?:,\d{3})+|\d*))\.(\d+)(?![\d.])")


def _exact_decimals(latex: str) -> str:
    r"""``0.5`` as ``\frac{5}{10}``."""

    def fraction(match: re.Match[str]) -> str:
        return rf"\frac{{{int(match[1].replace(',', '') + match[2])}}}{{{10 ** len(match[2])}}}"

    return _DECIMAL.sub(fraction, latex)


@lru_cache(maxsize=4096)
def _expression(latex: str) -> sympy.Basic | None:
    """``latex`` as SymPy reads it, or None. The time limit is the worker's, hence none here."""
    latex = _exact_decimals(latex.replace(r"\text{degree}", r"^{\circ}"))
    latex = normalize_latex(latex, _SPELLING)
    try:
        expression = latex2sympy(latex, is_real=not should_treat_as_complex(latex), normalization_config=None)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  the reader raises whatever it stumbles over; such text is no expression
        return None
    if not isinstance(expression, sympy.Basic | sympy.MatrixBase):
        return None
    if {str(symbol) for symbol in expression.free_symbols} == {"i"}:
        return expression.subs(next(iter(expression.free_symbols)), sympy.I)
    return expression


def algebra_equal(candidate: str, gold: str) -> bool:
    """Whether two LaTeX expressions, or two equations, are equal. May take any time and memory: run it limited."""
    ours, theirs = _expression(candidate), _expression(gold)
    if ours is None or theirs is None:
        return False
    if isinstance(theirs, sympy.Eq) or isinstance(ours, sympy.Eq):
        return isinstance(theirs, sympy.Eq) and isinstance(ours, sympy.Eq) and _same_locus(ours, theirs)
    if _agree(ours, theirs) and _proved(ours, theirs):  # the quick test first
        return True
    decimal, other = plain_number(candidate), theirs
    if decimal is None or decimal.places is None:
        decimal, other = plain_number(gold), ours
    if decimal is None or decimal.places is None:
        return False
    value = _constant(other)
    return value is not None and rounds_to(value, decimal)


def _proved(ours: sympy.Basic, theirs: sympy.Basic) -> bool:
    if verify(theirs, ours, timeout_seconds=None):
        return True
    expressions = isinstance(ours, sympy.Expr) and isinstance(theirs, sympy.Expr)
    return expressions and sympy.simplify((ours - theirs).doit()) == 0  # math-verify misses 2·(1/2)·x against x


def _constant(expression: sympy.Basic) -> Fraction | None:
    """Value of a real constant to 30 digits; None for anything else."""
    if not isinstance(expression, sympy.Expr) or expression.free_symbols:
        return None
    value = expression.doit().evalf(_DIGITS)
    return Fraction(str(value)) if value.is_Float or value.is_Rational else None


def _same_locus(ours: sympy.Eq, theirs: sympy.Eq) -> bool:
    """Two equations with one solution set: their sides' differences have a constant ratio other than zero."""
    difference, reference = ours.lhs - ours.rhs, theirs.lhs - theirs.rhs
    if difference.free_symbols != reference.free_symbols or not reference.free_symbols:
        return False
    ratio = sympy.cancel(difference.doit() / reference.doit())
    return bool(ratio.is_number and ratio.is_finite and ratio.is_nonzero)


def _agree(ours: sympy.Basic, theirs: sympy.Basic) -> bool:
    """Numeric agreement: of constants at 30 digits, of expressions with variables at points of them."""
    if not isinstance(ours, sympy.Expr) or not isinstance(theirs, sympy.Expr):
        return True  # sets and functions: nothing to evaluate, math-verify compared their structure
    names = sorted(ours.free_symbols | theirs.free_symbols, key=str)
    if not names:
        return _close(ours.doit().evalf(_DIGITS), theirs.doit().evalf(_DIGITS))
    seen = 0
    for shift in range(len(_POINTS)):
        point = {
            name: sympy.Rational(*_POINTS[(k + shift) % len(_POINTS)].as_integer_ratio()) + k
            for k, name in enumerate(names)
        }
        values = [expression.doit().subs(point).evalf(_DIGITS) for expression in (ours, theirs)]
        if not all(value.is_number and value.is_finite for value in values):
            continue  # a pole, or a function without a value
        if not _close(*values):
            return False
        seen += 1
    return seen > 0 or ours == theirs


def _close(one: sympy.Expr, other: sympy.Expr) -> bool:
    if not (one.is_finite and other.is_finite):
        return bool(one == other)
    if one == 0 or other == 0:
        return bool(abs(one - other) < _ZERO)
    return bool(abs(one - other) <= _AGREE * sympy.Max(abs(one), abs(other)))
