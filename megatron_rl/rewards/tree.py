"""The tree of an answer, its exact value by bounded arithmetic on fractions, and computations that were left undone.

It is cheap enough for the trainer's process: no value has more than `MAX_BITS` bits.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from itertools import takewhile
from typing import Any

MAX_BITS = 20_000
MAX_ROOT = 1000
MIN_ROUNDED_DIGITS = 6  # a decimal with fewer significant digits is not accepted for a number that it rounds


@dataclass(frozen=True, slots=True)
class Node:
    r"""One node. ``kind``, its ``value`` and its ``args``:

    Scalars: ``number`` (a `Number`), ``name`` (text), ``constant`` (pi, e, i, infinity), ``add``, ``mul``, ``div``
    (a fraction), ``divide`` (the sign ÷), ``neg``, ``pow``, ``root`` (radicand, index), ``pm`` (+1, or -1 for ∓),
    ``call`` (name of the function), ``percent``, ``quantity`` (a `Unit`).
    Collections: ``list`` (any order), ``set``, ``tuple`` (its two brackets), ``matrix`` (number of columns), ``and``,
    ``or``, ``comma`` (inequalities with a comma between them).
    Sets of numbers: ``domain`` (R, Z, …), ``empty``, ``union``, ``intersection``, ``difference``, ``builder``.
    Statements: ``relation`` (its signs), ``congruence`` (left side or none, right side, modulus).
    As written: ``word`` (its letters; args: the product that the same letters may be), ``based`` (digits, base),
    ``ratio``, ``option`` (letter; args: what stands behind it).
    """

    kind: str
    args: tuple[Node, ...] = ()
    value: Any = None


@dataclass(frozen=True, slots=True)
class Number:
    """An exact value, and how it was written. ``places``: digits after the point of a decimal, else None."""

    value: Fraction
    places: int | None = None
    significant: int = 0


def number(value: int | Fraction) -> Node:
    return Node("number", value=Number(Fraction(value)))


def negative(node: Node) -> Node:
    if node.kind in ("quantity", "percent"):  # the unit is outside of the sign
        return Node(node.kind, (negative(node.args[0]),), node.value)
    return Node("neg", (node,))


def walk(node: Node) -> Iterator[Node]:
    """``node`` and all nodes below it."""
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        stack += node.args


def replaced(node: Node, old: Node, new: Node) -> Node:
    """``node`` with ``new`` in every place of ``old``."""
    if node == old:
        return new
    return Node(node.kind, tuple(replaced(arg, old, new) for arg in node.args), node.value) if node.args else node


def depth(node: Node) -> int:
    """Number of nodes from ``node`` down to its deepest leaf."""
    level, count = [node], 0
    while level:
        level, count = [arg for part in level for arg in part.args], count + 1
    return count


class TooLarge(ArithmeticError):
    """A value that is too large to be written down."""


class NeedsWorker(Exception):
    """The comparison needs algebra, which worker processes do."""


class Algebra:
    """Compares by fractions and raises `NeedsWorker` for the rest, which `NumericAlgebra` compares."""

    def equal(self, one: Node, other: Node) -> bool:
        """Return whether two expressions are equal for all values of their variables."""
        raise NeedsWorker

    def same_solutions(self, one: Node, other: Node, inequality: bool = False) -> bool:
        """Return whether two relations, written as differences, have the same solutions."""
        raise NeedsWorker

    def value(self, node: Node) -> Fraction | None:
        """Return the value of a real constant, to 1e-80 if it is irrational; None for anything else."""
        value = exact(node)
        if value is None and not names_in(node):
            raise NeedsWorker
        return value


def is_unknown(node: Node) -> bool:
    """Whether ``node`` is the value of a function of which nothing is known: ``f(x)``, ``g'(2)``, ``F_1(t)``."""
    return node.kind == "call" and node.value[0] in "fghFGH" and node.value[1:2] in ("", "_", "'")


def names_in(node: Node) -> set[str]:
    return {part.value for part in walk(node) if part.kind == "name"}


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise TooLarge
    return value


def exact(node: Node) -> Fraction | None:
    """Return the value of ``node`` by arithmetic on fractions; None if it has none. Raises `TooLarge`."""
    if node.kind == "number":
        return _bounded(node.value.value)
    operation = OPERATIONS.get(node.value if node.kind == "call" else node.kind)
    if operation is None:
        return None
    args = list(takewhile(lambda value: value is not None, map(exact, node.args)))
    if len(args) < len(node.args):
        return None
    try:
        value = operation(*args)
    except (ZeroDivisionError, TypeError, ValueError):  # ``1/0``, ``\\gcd(1/2, 3)``
        return None
    return None if value is None else _bounded(Fraction(value) if type(value) is int else value)


def exact_or_none(node: Node) -> Fraction | None:
    try:
        return exact(node)
    except TooLarge:
        return None


_MODULUS = (2**255 - 19) * (2**448 - 2**224 - 1)  # of two primes


def remainder(node: Node) -> int:
    """Return what is left of a rational number of any size modulo `_MODULUS`. Raises ValueError for other nodes."""
    kind = node.value if node.kind == "call" else node.kind
    if kind in ("pow", "factorial"):
        count = exact_or_none(node.args[-1])
        if count is None or count.denominator != 1 or count.numerator.bit_length() > (64 if kind == "pow" else 12):
            raise ValueError(kind)
        of = math.factorial(count.numerator) if kind == "factorial" else remainder(node.args[0])
        return pow(of, 1 if kind == "factorial" else count.numerator, _MODULUS)
    if kind == "number":
        return node.value.value.numerator * pow(node.value.value.denominator, -1, _MODULUS)
    args = [remainder(arg) for arg in node.args]
    if kind == "div":
        kind, args[1] = "mul", pow(args[1], -1, _MODULUS)
    if kind not in ("add", "mul", "neg"):
        raise ValueError(kind)
    return OPERATIONS[kind](*args) % _MODULUS


def computed(node: Node) -> Node:
    """``node`` as a number where it has an exact value."""
    value = exact_or_none(node)
    return node if value is None else number(value)


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1:
        if exponent.denominator > MAX_ROOT or _bits(exponent) > 64:
            return None
        root = _root(base, exponent.denominator)
        return None if root is None else _power(root, Fraction(exponent.numerator))
    if base in (0, 1, -1):
        if base == 0 and exponent <= 0:
            return None
        return base if base >= 0 or exponent % 2 else -base
    if abs(exponent) * (_bits(base) - 1) > 2 * MAX_BITS:
        raise TooLarge
    return base**exponent.numerator


def _root(value: Fraction, index: int) -> Fraction | None:
    """Return the rational root; None if there is none."""
    parts = [_integer_root(abs(part), index) for part in (value.numerator, value.denominator)]
    return None if None in parts or (value < 0 and index % 2 == 0) else Fraction(*parts) * (-1 if value < 0 else 1)


def _integer_root(value: int, index: int) -> int | None:
    low, high = 0, 1 << (value.bit_length() // index + 1)
    if index == 2:
        low = high = math.isqrt(value)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**index <= value else (low, middle - 1)
    return low if low**index == value else None


def _whole(function: Callable[..., int]) -> Callable[..., int]:
    """``function`` of fractions that are whole numbers; TypeError for others."""
    return lambda *args: function(*(arg.numerator if arg.denominator == 1 else None for arg in args))


def _factorial(count: int) -> int:
    if count is not None and count > 1500:
        raise TooLarge
    return math.factorial(count)


def _binomial(count: int, chosen: int) -> int:
    if count > 10**6 or min(chosen, count - chosen) > 1000:
        raise TooLarge
    return math.comb(count, chosen)


OPERATIONS: dict[str, Callable[..., Fraction | int | None]] = {
    "add": lambda *args: reduce(lambda one, other: _bounded(one + other), args),
    "mul": operator.mul, "div": operator.truediv, "divide": operator.truediv, "neg": operator.neg,
    "percent": lambda arg: arg / 100, "pow": _power, "root": lambda radicand, index: _power(radicand, 1 / index),
    "abs": abs, "floor": math.floor, "ceil": math.ceil, "max": max, "min": min, "gcd": _whole(math.gcd),
    "lcm": _whole(math.lcm), "factorial": _whole(_factorial), "binom": _whole(_binomial),
}  # fmt: skip


def plain(node: Node) -> Number | None:
    """Return the number that ``node`` is, with its sign; None if it is not a single number."""
    if node.kind == "neg" and node.args[0].kind == "number":
        number = node.args[0].value
        return Number(-number.value, number.places, number.significant)
    return node.value if node.kind == "number" else None


def rounds_to(value: Fraction, decimal: Number | None) -> bool:
    """Return whether ``value`` rounds to ``decimal`` at its places and ``decimal`` has enough digits."""
    if decimal is None or decimal.places is None or decimal.significant < MIN_ROUNDED_DIGITS:
        return False
    return abs(value - decimal.value) <= Fraction(1, 2 * 10**decimal.places)


def _factors(node: Node) -> Iterator[Node]:
    stack = [node]
    while stack:
        part = stack.pop()
        if part.kind == "mul" or part.kind == "neg":
            stack += part.args
        else:
            yield part


def _has_i(node: Node) -> bool:
    return any(part.value == ("i" if part.kind == "constant" else "cis") for part in walk(node))


_POLAR = ("cos", "sin", "cis")  # of `2(\\cos 60^\\circ+i\\sin 60^\\circ)`, which is a way to write a number


def is_unfinished(node: Node) -> bool:
    r"""Whether ``node`` leaves a computation with constants to the reader: ``12\cdot 34``, ``999-1``, ``\log_2 8``.

    A fraction, a root, a power, a mixed number, ``a\times 10^b`` and a sum or product of which no two parts are
    rational (``2+\sqrt3``, ``3-4i``) are ways to write a value, and so is every expression with variables.
    """
    return not names_in(node) and any(_leaves_computation(part, node) for part in walk(node))


def _leaves_computation(node: Node, whole: Node) -> bool:
    if node.kind == "call":
        angle = node.args[0].args[0] if node.args[0].kind == "quantity" else node.args[0]
        if node.value in ("sin", "cos", "tan", "cot"):
            degrees = exact_or_none(replaced(angle, Node("constant", value="pi"), number(180)))
            if degrees is not None and degrees % 18 == 0 != degrees % 90:
                return False  # `\\sin 18^\\circ` and `\\cos\\frac{\\pi}{5}` are long to write with roots
        return not (node.value in _POLAR and _has_i(whole))
    if node.kind == "add":
        values = [exact(arg) for arg in node.args]
        rational = [value for value in values if value is not None]
        if len(rational) == len(values) == 2 and rational[0].denominator == 1:  # `1+\\frac12` is a mixed number
            return not (0 < abs(rational[1]) < 1 and (rational[0] > 0) == (rational[1] > 0))
        return len(rational) > 1
    if node.kind == "mul":
        factors = list(_factors(node))
        scientific = len(factors) == 2 and any(f.kind == "pow" and exact(f.args[0]) == 10 for f in factors)
        return (sum(exact(f) is not None for f in factors) > 1 and not scientific) or sum(map(_has_i, factors)) > 1
    return node.kind == "divide" or (node.kind == "pow" and node.args[0].args != () and _has_i(node.args[0]))
