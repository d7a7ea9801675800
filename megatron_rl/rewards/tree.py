"""The tree of an answer, its exact value by bounded arithmetic on fractions, and computations that were left undone.

It is cheap enough for the trainer's process: no value has more than `MAX_BITS` bits.

`RegionReader` reads sets of real numbers: intervals, inequalities, set builders, ``\mathbb{R}\setminus\{2\}``. A set
is kept as a sorted list of half-open pieces between cuts. The cut ``(v, 0)`` lies just below v and ``(v, 1)``
just above it, so that open and closed ends need no cases: [a, b] runs from ``(a, 0)`` to ``(b, 1)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
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
    ``dash`` and ``date`` (whole numbers with - or / between them), ``ratio``, ``option`` (letter; args: what stands
    behind it).
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

    def same_family(self, one: Node, parameter: str, other: Node, its_parameter: str) -> bool:
        """Return whether two expressions have the same values for all whole numbers as their parameters."""
        raise NeedsWorker

    def value(self, node: Node) -> Fraction | None:
        """Return the value of a real constant, to 1e-80 if it is irrational; None for anything else."""
        value = exact(node)
        if value is None and not has_names(node):
            raise NeedsWorker
        return value


def has_names(node: Node) -> bool:
    return any(part.kind == "name" for part in walk(node))


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
    if node.kind == "dash":
        first, *subtrahends = map(int, node.value)
        return _bounded(Fraction(first - sum(subtrahends)))
    if node.kind not in ("add", "mul", "div", "divide", "neg", "pow", "root", "percent", "call"):
        return None
    args = []
    for arg in node.args:
        value = exact(arg)
        if value is None:
            return None
        args.append(value)
    try:
        return _apply(node, args)
    except ZeroDivisionError:
        return None


def exact_or_none(node: Node) -> Fraction | None:
    try:
        return exact(node)
    except TooLarge:
        return None


def _apply(node: Node, args: list[Fraction]) -> Fraction | None:
    kind = node.kind
    if kind == "add":
        total = Fraction(0)
        for arg in args:
            total = _bounded(total + arg)
        return total
    if kind == "mul":
        return _bounded(args[0] * args[1])
    if kind in ("div", "divide"):
        return _bounded(args[0] / args[1])
    if kind == "neg":
        return -args[0]
    if kind == "percent":
        return args[0] / 100
    if kind == "pow":
        return _power(*args)
    if kind == "root":
        return _power(args[0], 1 / args[1])
    return _call(node.value, args)


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
    return _bounded(base**exponent.numerator)


def _root(value: Fraction, index: int) -> Fraction | None:
    """Return the rational root; None if there is none."""
    if value < 0:
        root = _root(-value, index) if index % 2 else None
        return None if root is None else -root
    parts = [_integer_root(part, index) for part in (value.numerator, value.denominator)]
    return None if None in parts else Fraction(*parts)


def _integer_root(value: int, index: int) -> int | None:
    if value < 2:
        return value
    low, high = 1, 1 << (value.bit_length() // index + 1)
    if index == 2:
        low = high = math.isqrt(value)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**index <= value else (low, middle - 1)
    return low if low**index == value else None


def _call(name: str, args: list[Fraction]) -> Fraction | None:
    is_whole = all(arg.denominator == 1 for arg in args)
    if len(args) == 1 and name in ("abs", "floor", "ceil"):
        return {"abs": abs, "floor": math.floor, "ceil": math.ceil}[name](args[0]) * Fraction(1)
    if name in ("max", "min") and args:
        return {"max": max, "min": min}[name](args)
    if not is_whole:
        return None
    integers = [arg.numerator for arg in args]
    if name in ("gcd", "lcm") and args:
        return _bounded(Fraction(getattr(math, name)(*integers)))
    if name == "factorial" and len(args) == 1 and integers[0] >= 0:
        if integers[0] > 1500:
            raise TooLarge
        return Fraction(math.factorial(integers[0]))
    if name == "binom" and len(args) == 2 and min(integers) >= 0:
        if integers[0] > 10**6 or min(integers[1], integers[0] - integers[1]) > 1000:
            raise TooLarge
        return _bounded(Fraction(math.comb(*integers)))
    return None


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


def _rational(node: Node) -> bool:
    try:
        return exact(node) is not None
    except TooLarge:
        return True


_POLAR = ("cos", "sin", "cis")  # of `2(\\cos 60^\\circ+i\\sin 60^\\circ)`, which is a way to write a number


def is_unfinished(node: Node) -> bool:
    r"""Whether ``node`` leaves a computation with constants to the reader: ``12\cdot 34``, ``999-1``, ``\log_2 8``.

    A fraction, a root, a power, a mixed number, ``a\times 10^b`` and a sum or product of which no two parts are
    rational (``2+\sqrt3``, ``3-4i``) are ways to write a value. Of an expression with variables only function values
    of constants count.
    """
    symbolic = has_names(node)
    stack = [node]
    while stack:
        part = stack.pop()
        if part.kind == "call" and not has_names(part) and not (part.value in _POLAR and _has_i(node)):
            return True
        if not symbolic and _leaves_arithmetic(part):
            return True
        stack += _parts(part)
    return False


def _parts(node: Node) -> list[Node]:
    return list(_factors(node)) if node.kind == "mul" else list(node.args)


def _leaves_arithmetic(node: Node) -> bool:
    if node.kind in ("divide", "dash"):
        return True
    if node.kind == "add":
        rational = [arg for arg in node.args if _rational(arg)]
        return len(rational) > 1 and not (len(node.args) == 2 and _is_mixed(*node.args))
    if node.kind == "mul":
        factors = list(_factors(node))
        rational = [factor for factor in factors if _rational(factor) and plain(factor) != Number(Fraction(1), None, 1)]
        scientific = len(factors) == 2 and any(_is_power_of_ten(factor) for factor in factors)
        return (len(rational) > 1 and not scientific) or sum(map(_has_i, factors)) > 1
    return node.kind == "pow" and _has_i(node.args[0])


def _is_power_of_ten(node: Node) -> bool:
    return (
        node.kind == "pow" and plain(node.args[0]) == Number(Fraction(10), None, 2) and plain(node.args[1]) is not None
    )


def _is_mixed(whole: Node, part: Node) -> bool:
    r"""``1+\frac12``: a whole number and a proper fraction of the same sign."""
    first, second = exact(whole), exact(part)
    assert first is not None
    assert second is not None
    return plain(whole) is not None and first.denominator == 1 and 0 < abs(second) < 1 and (first > 0) == (second > 0)


Cut = tuple[Fraction | float, int]
Pieces = tuple[tuple[Cut, Cut], ...]

DESCRIBE_SETS = frozenset(
    ["union", "intersection", "difference", "builder", "and", "or", "comma", "domain", "empty", "relation"]
)
_LINE: Pieces = (((-math.inf, 1), (math.inf, 0)),)
_SAME = Fraction(1, 10**60)  # relative distance of values that are one value
TURNED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!=", "=": "="}


@dataclass(frozen=True)
class Region:
    """A set of real numbers. ``variable``: the name in the inequalities, "" if there is none."""

    pieces: Pieces
    variable: str = ""


class RegionReader:
    """Turns trees into regions. One reader serves both answers, so that equal ends get the same value."""

    def __init__(self, algebra: Algebra) -> None:
        self._algebra = algebra
        self._known: list[Fraction] = []

    def read(self, node: Node) -> Region | None:
        """Return the set of real numbers that ``node`` describes; None if it is not such a set."""
        if node.kind == "domain":
            return {"R": Region(_LINE), "R^+": Region((((Fraction(0), 1), (math.inf, 0)),))}.get(node.value)
        if node.kind == "empty":
            return Region(())
        if node.kind == "tuple" and len(node.args) == 2 and node.value[0] in "([" and node.value[1] in ")]":
            return self._interval(node)
        if node.kind == "set":
            values = [self._end(arg) for arg in node.args]
            return None if None in values else Region(_union(tuple(((v, 0), (v, 1)) for v in values)))
        if node.kind == "relation":
            return self._relation(node)
        if node.kind == "builder":
            return self._builder(node)
        if node.kind in ("union", "or", "intersection", "and", "difference", "comma"):
            return self._joined(node)
        return None

    def _end(self, node: Node) -> Fraction | float | None:
        inner = node.args[0] if node.kind == "neg" else node
        if inner.kind == "constant" and inner.value == "infinity":
            return -math.inf if node.kind == "neg" else math.inf
        if node.kind in ("tuple", "set", "list", "relation"):
            return None
        value = self._algebra.value(node)
        if value is None:
            return None
        for end in self._known:
            if abs(end - value) <= _SAME * max(1, abs(end)):
                return end
        self._known.append(value)
        return value

    def _interval(self, node: Node) -> Region | None:
        low, high = (self._end(arg) for arg in node.args)
        if low is None or high is None:
            return None
        start = (low, int(node.value[0] == "(" or low == -math.inf))
        end = (high, int(node.value[1] == "]" and high != math.inf))
        return Region(((start, end),)) if start < end else None

    def _relation(self, node: Node) -> Region | None:
        signs, sides = node.value, node.args
        if len(sides) == 2 and sides[0].kind == "call" and sides[0].value == "abs":
            return self._distance(sides[0].args[0], signs[0], sides[1])
        places = [k for k, side in enumerate(sides) if side.kind == "name"]
        if len(places) != 1 or any(sign not in TURNED for sign in signs) or len(signs) > 2:
            return None
        place = places[0]
        if len(signs) == 2 and (place != 1 or not _one_way(signs)):
            return None
        pieces = _LINE
        for k, sign in enumerate(signs):
            value = self._end(sides[k] if k < place else sides[k + 1])
            if value is None or (isinstance(value, float) and sign not in ("<", ">")):
                return None
            pieces = _intersection(pieces, _half_line(TURNED[sign] if k < place else sign, value))
        return Region(pieces, sides[place].value)

    def _distance(self, inside: Node, sign: str, bound: Node) -> Region | None:
        """``|x| < 3`` and ``|x-1| < 3``."""
        centre = Fraction(0)
        if inside.kind == "add" and len(inside.args) == 2 and inside.args[0].kind == "name":
            shift = self._end(inside.args[1])
            inside, centre = inside.args[0], None if shift is None else -shift
        size = self._end(bound)
        if inside.kind != "name" or centre is None or size is None or size <= 0 or sign not in ("<", "<=", ">", ">="):
            return None
        closed = sign in ("<=", ">")
        pieces: Pieces = (((centre - size, int(not closed)), (centre + size, int(closed))),)
        return Region(pieces if sign in ("<", "<=") else _complement(pieces), inside.value)

    def _builder(self, node: Node) -> Region | None:
        member, condition = node.args
        if member.kind == "relation" and member.value == ("∈",):
            member, domain = member.args
            if domain.kind != "domain" or domain.value != "R":
                return None
        if member.kind != "name":
            return None
        if condition.kind == "list":
            condition = Node("and", tuple(part for part in condition.args if not _is_real(part, member.value)))
        region = self.read(condition)
        return Region(region.pieces) if region is not None and region.variable == member.value else None

    def _joined(self, node: Node) -> Region | None:
        parts = [self.read(arg) for arg in node.args]
        if None in parts or not parts:
            return None
        variables = {part.variable for part in parts if part.variable}
        if len(variables) > 1:
            return None
        pieces = parts[0].pieces
        for part in parts[1:]:
            if node.kind in ("union", "or"):
                pieces = _union(pieces + part.pieces)
            elif node.kind == "difference":
                pieces = _intersection(pieces, _complement(part.pieces))
            else:
                pieces = _intersection(pieces, part.pieces)
        if node.kind == "comma" and not pieces:  # `x<2, x>3` means either
            pieces = _union(tuple(piece for part in parts for piece in part.pieces))
        return Region(pieces, next(iter(variables), ""))


def _one_way(signs: tuple[str, ...]) -> bool:
    return all(sign in ("<", "<=") for sign in signs) or all(sign in (">", ">=") for sign in signs)


def _is_real(node: Node, name: str) -> bool:
    """``x \\in \\mathbb{R}``"""
    is_membership = node.kind == "relation" and node.value == ("∈",)
    return is_membership and node.args == (Node("name", value=name), Node("domain", value="R"))


def _half_line(sign: str, value: Fraction | float) -> Pieces:
    below, above = ((-math.inf, 1), (value, int(sign == "<="))), ((value, int(sign == ">")), (math.inf, 0))
    if sign == "!=":
        return (((-math.inf, 1), (value, 0)), ((value, 1), (math.inf, 0)))
    if sign == "=":
        return (((value, 0), (value, 1)),)
    return tuple(piece for piece in ((below,) if sign in ("<", "<=") else (above,)) if piece[0] < piece[1])


def _union(pieces: Pieces) -> Pieces:
    joined: list[tuple[Cut, Cut]] = []
    for start, end in sorted(pieces):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return tuple(joined)


def _intersection(one: Pieces, other: Pieces) -> Pieces:
    overlaps = ((max(a[0], b[0]), min(a[1], b[1])) for a in one for b in other)
    return _union(tuple(piece for piece in overlaps if piece[0] < piece[1]))


def _complement(pieces: Pieces) -> Pieces:
    cuts = [(-math.inf, 1), *(cut for piece in pieces for cut in piece), (math.inf, 0)]
    return tuple((start, end) for start, end in zip(cuts[::2], cuts[1::2]) if start < end)
