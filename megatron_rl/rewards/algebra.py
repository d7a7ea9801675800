r"""Equality of expressions by their values at 120 digits. Only worker processes import this module.

Two expressions without variables are equal if their values agree to 60 digits. Two with variables are equal if they
agree at several points of both signs and several sizes; points where an expression has no real value do not count, and
more points are drawn where few have one. Expressions with steps (``\lfloor x\rfloor``) must also agree at whole and
half numbers, and for variables from i to n at whole numbers alone. For expressions as short as an answer, such
agreement at arbitrary points is not a coincidence. There is no rewriting, so time and memory are bounded by the size
of the expressions.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import lru_cache
from itertools import chain, islice, product

import mpmath

from megatron_rl.rewards import units
from megatron_rl.rewards.latex import words
from megatron_rl.rewards.tree import OPERATIONS, Algebra, Node, exact, is_unknown, number, walk

_MP = mpmath.mp.clone()
_MP.prec = 400
_MAX_MAGNITUDE = 1 << 14  # largest number of bits before the binary point of an intermediate value
_AGREE = _MP.mpf(10) ** -60  # relative difference of equal values
_ZERO = _MP.mpf(10) ** -90
_STEPS = frozenset(["floor", "ceil", "sign", "sum", "prod"])
_WHOLE, _HALVES = (1, 2, 3, 6, 4, 5), (0.5, -2, -1.5, 3, 0, 2.5)
_FIRST, _DRAWS = 8, 90  # points that are drawn, and at most where an expression has few values
_ENDS = (Fraction(2, 9), Fraction(3, 7), Fraction(7, 11), Fraction(12, 13))  # where integrands are compared
_MIN_POINTS = 2
_NEAR_WHOLE = _MP.mpf(10) ** -60

Value = mpmath.mpf | mpmath.mpc


class _NoValue(ArithmeticError):
    """Raised if the expression has no value at this point, or none within the bounds."""


class NumericAlgebra(Algebra):
    """Compares by values with many digits where exact fractions do not decide."""

    def equal(self, one: Node, other: Node) -> bool:
        """As in `Algebra`. The base of ``\\log`` without a base is e or 10, the same in both answers."""
        bare = any(part.value == "log" and len(part.args) == 1 for node in (one, other) for part in walk(node))
        return _agree(one, other, _MP.e) or (bare and _agree(one, other, _MP.mpf(10)))

    def same_solutions(self, one: Node, other: Node, inequality: bool = False) -> bool:
        """Return whether two relations, written as differences, have the same solutions.

        Either their ratio is constant, and positive for an ``inequality``; or each is zero where the other is.
        """
        names = _names(one)
        if names != _names(other) or not names:
            return False
        ratios = []
        for point in _points(names):
            values = _values_at(one, other, point, _MP.e)
            if values is not None and abs(values[1]) > _ZERO:
                ratios.append(values[0] / values[1])
        if len(ratios) > _MIN_POINTS and all(abs(r) > _ZERO and _close(r, ratios[0]) for r in ratios):
            return not inequality or ratios[0] > 0
        return not inequality and _solves(one, other, names) and _solves(other, one, names)

    def value(self, node: Node) -> Fraction | None:
        exact_value = exact(node)
        if exact_value is not None:
            return exact_value
        try:
            value = _Evaluator({}, _MP.e).value(node)
        except _NoValue:
            return None
        if _imaginary(value):
            return None
        sign, mantissa, exponent, _ = _MP.mpf(_MP.re(value))._mpf_
        return (-1) ** sign * Fraction(int(mantissa)) * Fraction(2) ** exponent


def _names(*nodes: Node) -> list[str]:
    return sorted({part.value for node in nodes for part in walk(node) if part.kind == "name"} - {"ldots"})


def _whole_points(names: list[str], halves: bool = False) -> Iterator[dict[str, Value]]:
    """Yield small whole numbers, and half numbers for variables that are not named from i to n."""
    for k in range(len(_WHOLE)):
        values = [_HALVES if halves and name[0] not in "ijklmnN" else _WHOLE for name in names]
        yield {name: _MP.mpf(values[j][(k + 2 * j) % len(_WHOLE)]) for j, name in enumerate(names)}


@lru_cache(maxsize=2048)
def _coordinate(k: int, j: int) -> Value:
    """The j-th variable at point k: of either sign, in turn from each of the decades between 0.1 and 1000."""
    share = _MP.mpf((48271 ** (k + 1) + 16807 ** (k + j + 2)) % 2147483647) / 2147483647
    return (-1) ** (k + j * (k // 2)) * 10 ** (k // 2 % 4 - 1 + share)


def _points(names: list[str], count: int = _FIRST) -> Iterator[dict[str, Value]]:
    return ({name: _coordinate(k, j) for j, name in enumerate(names)} for k in range(count))


def _solves(one: Node, other: Node, names: list[str]) -> bool:
    """Whether ``other`` is zero where ``one`` is, at points found by the names in which ``one`` is linear."""
    solved = 0
    for name, point in product(names, _points(names)):
        values = [_values_at(one, other, {**point, name: _MP.mpf(k)}, _MP.e) for k in (1, 2, 3)]
        if None in values:
            continue
        first, second, third = (value for value, _ in values)
        slope = second - first
        if abs(slope) > _ZERO and _close(third - second, slope):
            root = _values_at(one, other, {**point, name: 1 - first / slope}, _MP.e)
            if root is not None and abs(root[1]) > _AGREE * max(abs(value) for _, value in values):
                return False
            solved += root is not None
    return solved > _MIN_POINTS


def _agree(one: Node, other: Node, log_base: Value) -> bool:
    names = _names(one, other)
    if not names:
        values = _values_at(one, other, {}, log_base, complex_too=True)
        return values is not None and _close(*values)
    parts = [part for node in (one, other) for part in walk(node)]
    has_i = any(part.kind == "constant" and part.value == "i" for part in parts)
    has_steps = any(part.kind == "call" and part.value in _STEPS for part in parts)
    whole = has_steps and any(name[0] in "ijklmnN" for name in names)
    drawn = _points(names, _DRAWS)
    first = [_whole_points(names, halves=True)] * has_steps + [islice(drawn, _FIRST)] * (not whole)
    seen = 0
    for points in (chain(*first), _whole_points(names), drawn):
        for point in points:
            values = _values_at(one, other, point, log_base, complex_too=has_i)
            if values is not None and not _close(*values):
                return False
            seen += values is not None
            if seen > _FIRST + len(_WHOLE):
                break
        if seen >= _MIN_POINTS:
            return True
    return False


def _values_at(
    one: Node, other: Node, point: Mapping[str, Value], log_base: Value, complex_too: bool = False
) -> tuple[Value, Value] | None:
    """Return both values; None if there are none, or no real ones."""
    evaluator = _Evaluator(point, log_base)
    try:
        values = evaluator.value(one), evaluator.value(other)
    except _NoValue:
        return None
    return values if complex_too or not any(map(_imaginary, values)) else None


def _imaginary(value: Value) -> bool:
    return abs(_MP.im(value)) > _AGREE * max(1, abs(_MP.re(value)))


def _close(one: Value, other: Value) -> bool:
    size = max(abs(one), abs(other))
    return bool(size < _ZERO or abs(one - other) <= _AGREE * size)


class _Evaluator:
    """Evaluates at one point. Each operation is bounded before it is done."""

    def __init__(self, point: Mapping[str, Value], log_base: Value) -> None:
        self._point, self._log_base = point, log_base

    def value(self, node: Node) -> Value:
        try:
            value = self._of(node)
        except (ArithmeticError, ValueError, TypeError, KeyError) as error:
            raise _NoValue from error
        if not _MP.isfinite(value) or (value and _MP.mag(value) > _MAX_MAGNITUDE):
            raise _NoValue
        return value

    def _of(self, node: Node) -> Value:
        kind = node.kind
        if kind == "number":
            return _MP.mpf(node.value.value.numerator) / node.value.value.denominator
        if kind in ("name", "bound"):
            return self._point[node.value if kind == "name" else f"bound {node.value}"]
        if kind == "constant":
            return {"pi": _MP.pi, "e": _MP.e, "i": _MP.mpc(0, 1)}[node.value] * 1
        if kind == "pow":
            return self._power(*node.args)
        if kind == "root":
            return self._power(node.args[0], Node("div", (number(1), node.args[1])))
        if kind == "call":
            return self._call(node)
        args = [self.value(arg) for arg in node.args]
        if kind == "add":
            return _MP.fsum(args)
        if kind in ("mul", "div", "divide", "neg", "percent"):
            return OPERATIONS[kind](*args)
        if kind == "quantity" and node.value.dimensions == units.DEGREE.dimensions:
            return args[0] * _MP.pi * node.value.factor.numerator / (180 * 3600 * node.value.factor.denominator)
        raise _NoValue

    def _power(self, base_node: Node, exponent_node: Node) -> Value:
        base, rational = self.value(base_node), exact(exponent_node)
        exponent = self.value(exponent_node)
        if base == 0:
            if _MP.re(exponent) <= 0:
                raise _NoValue
            return _MP.mpf(0)
        if abs(exponent) * (abs(_MP.mag(base)) + 1) > _MAX_MAGNITUDE:
            raise _NoValue
        if rational is not None and rational.denominator == 1:
            return base**rational.numerator
        if rational is not None and rational.denominator % 2 and not _imaginary(base) and _MP.re(base) < 0:
            sign = -1 if rational.numerator % 2 else 1  # the real root, as taught in school
            return sign * _MP.power(-_MP.re(base), exponent)
        if _MP.im(exponent) == 0 and not _imaginary(base) and exponent == _MP.nint(_MP.re(exponent)):
            return _MP.re(base) ** int(_MP.re(exponent))
        return _MP.power(base, exponent)

    def _call(self, node: Node) -> Value:
        name = node.value
        if name in ("sum", "prod", "int"):
            return self._over_range(node)
        args = [self.value(arg) for arg in node.args]
        if name in ("factorial", "binom") and any(abs(arg) > 1000 for arg in args):
            raise _NoValue
        if name in _ELEMENTARY:
            if abs(args[0]) > _MAX_MAGNITUDE and name not in _COARSE:
                raise _NoValue
            return _ELEMENTARY[name](*args)
        if name == "log":
            return _MP.log(args[0]) / _MP.log(args[1] if len(args) == 2 else self._log_base)
        if is_unknown(node):
            # a value of its own; two answers agree only if they use it at the same arguments
            seed = zlib.crc32(name.encode())
            if any(abs(arg) > 10**6 for arg in args):
                raise _NoValue
            shares = (
                _MP.sin(arg * (seed % (31 + k) + 7) / 13 + k) + arg * (seed % 17 + 3) / (11 + k)
                for k, arg in enumerate(args)
            )
            return _MP.fsum(shares) + _MP.mpf(seed % 89 + 1) / 97
        raise _NoValue

    def _over_range(self, node: Node) -> Value:
        """Return a short sum or product; else a number that two expressions share only if their terms agree."""
        low, high = (_MP.inf if end.value == "infinity" else self.value(end) for end in node.args[:2])
        bound = f"bound {max((part.value for part in walk(node.args[2]) if part.kind == 'bound'), default=0)}"

        def term(at: Value) -> Value:
            return _Evaluator({**self._point, bound: at}, self._log_base).value(node.args[2])

        if node.value != "int" and low == _MP.nint(low) and high == _MP.nint(high) and high - low <= 60:
            terms = [term(low + k) for k in range(int(high - low) + 1)]
            return _MP.fsum(terms) if node.value == "sum" else _MP.fprod(terms)
        width = high - low if _MP.isfinite(high) else _MP.mpf(3)
        terms = [term(low + width * end.numerator / end.denominator) for end in _ENDS]
        if node.value == "prod":
            return _MP.fprod(terms) * _MP.exp(width)
        return width * _MP.fsum(value * (k + 2) for k, value in enumerate(terms))


def _floor(value: Value) -> Value:
    if _imaginary(value):
        raise _NoValue
    real = _MP.re(value)
    nearest = _MP.nint(real)
    return nearest if abs(real - nearest) < _NEAR_WHOLE else _MP.floor(real)


_COARSE = ("abs", "floor", "ceil", "Re", "Im", "max", "min")  # functions of arguments of any size
_NAMED = words(
    "sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh coth sech csch arcsinh arccosh "
    "arctanh sign arg factorial"
)
_ELEMENTARY: dict[str, Callable[..., Value]] = {name: getattr(_MP, name.replace("arc", "a")) for name in _NAMED} | {
    "abs": abs, "floor": _floor, "ceil": lambda value: -_floor(-value), "Re": _MP.re, "Im": _MP.im, "cis": _MP.expj,
    "binom": _MP.binomial, "max": max, "min": min,
}  # fmt: skip
