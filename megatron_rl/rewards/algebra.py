"""Equality of expressions by their values at 120 digits. Only worker processes import this module.

Two expressions without variables are equal if their values agree to 60 digits. Two with variables are equal if they
agree at several points of both signs and several sizes; points where an expression has no real value do not count. For
expressions as short as an answer, such agreement at arbitrary points is not a coincidence. There is no search and no
rewriting, so time and memory are bounded by the size of the expressions.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from fractions import Fraction

import mpmath

from megatron_rl.rewards import units
from megatron_rl.rewards.tree import Algebra, Node, TooLarge, exact, number, walk

_MP = mpmath.mp.clone()
_MP.prec = 400
_MAX_MAGNITUDE = 1 << 14  # largest number of bits before the binary point of an intermediate value
_AGREE = _MP.mpf(10) ** -60  # relative difference of equal values
_ZERO = _MP.mpf(10) ** -90
_SCALES = (1, 1, -1, -1, 9, 60, 700, -9)  # sizes and signs of the points
_MIN_POINTS = 2
_NEAR_WHOLE = _MP.mpf(10) ** -60

Value = mpmath.mpf | mpmath.mpc


class _NoValue(ArithmeticError):
    """Raised if the expression has no value at this point, or none within the bounds."""


class NumericAlgebra(Algebra):
    """Compares by values with many digits where exact fractions do not decide."""

    def equal(self, one: Node, other: Node) -> bool:
        return any(_agree(one, other, base) for base in _log_bases(one, other))

    def same_solutions(self, one: Node, other: Node) -> bool:
        """Return whether two equations (differences of their sides) have a constant nonzero ratio."""
        names = _names(one)
        if names != _names(other) or not names:
            return False
        ratios = []
        for point in _points(names, real=True):
            values = _values_at(one, other, point, _MP.e)
            if values is not None and abs(values[1]) > _ZERO:
                ratios.append(values[0] / values[1])
        return len(ratios) > _MIN_POINTS and all(abs(r) > _ZERO and _close(r, ratios[0]) for r in ratios)

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


def _log_bases(one: Node, other: Node) -> tuple[Value, ...]:
    r"""Return the bases to try for ``\log`` without a base: e and 10. Both answers must use the same one."""
    bare = any(
        part.kind == "call" and part.value == "log" and len(part.args) == 1 for n in (one, other) for part in walk(n)
    )
    return (_MP.e, _MP.mpf(10)) if bare else (_MP.e,)


def _names(*nodes: Node) -> list[str]:
    return sorted({part.value for node in nodes for part in walk(node) if part.kind == "name"})


def _points(names: list[str], real: bool):
    """Yield the points to compare at: arbitrary fractions, or small whole numbers."""
    for k, scale in enumerate(_SCALES):
        point = {}
        for j, name in enumerate(names):
            if real:
                size = Fraction((37 * (j + 1) + 53 * (k + 1) ** 2) % 97 + 20, 71) * abs(scale)
                flip = scale < 0 and (len(names) == 1 or (j + k) % 2 == 0)
                point[name] = _MP.mpf((-size if flip else size).numerator) / size.denominator
            else:
                point[name] = _MP.mpf(k + 2 * j + 1)
        yield point


def _agree(one: Node, other: Node, log_base: Value) -> bool:
    names = _names(one, other)
    if not names:
        values = _values_at(one, other, {}, log_base, complex_too=True)
        return values is not None and _close(*values)
    has_i = any(part.kind == "constant" and part.value == "i" for node in (one, other) for part in walk(node))
    for real in (True, False):
        seen = 0
        for point in _points(names, real):
            values = _values_at(one, other, point, log_base, complex_too=has_i)
            if values is None:
                continue
            if not _close(*values):
                return False
            seen += 1
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
    if not complex_too and any(_imaginary(value) for value in values):
        return None
    return values


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
        except (ZeroDivisionError, ValueError, OverflowError, TypeError, TooLarge) as error:
            raise _NoValue from error
        if not _MP.isfinite(value) or (value and _MP.mag(value) > _MAX_MAGNITUDE):
            raise _NoValue
        return value

    def _of(self, node: Node) -> Value:
        kind = node.kind
        if kind == "number":
            return _MP.mpf(node.value.value.numerator) / node.value.value.denominator
        if kind == "name" and node.value in self._point and node.value != "ldots":
            return self._point[node.value]
        if kind == "constant" and node.value != "infinity":
            return {"pi": _MP.pi, "e": _MP.e, "i": _MP.mpc(0, 1)}[node.value] * 1
        if kind == "dash":
            return _MP.mpf(exact(node).numerator)
        if kind == "pow":
            return self._power(*node.args)
        if kind == "root":
            return self._power(node.args[0], Node("div", (number(1), node.args[1])))
        if kind == "call":
            return self._call(node)
        args = [self.value(arg) for arg in node.args]
        if kind == "add":
            return _MP.fsum(args)
        if kind == "mul":
            return args[0] * args[1]
        if kind in ("div", "divide"):
            return args[0] / args[1]
        if kind == "neg":
            return -args[0]
        if kind == "percent":
            return args[0] / 100
        if kind == "quantity" and node.value == units.DEGREE:
            return args[0] * _MP.pi / 180
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
        if name == "det":
            return self._determinant(node.args[0])
        args = [self.value(arg) for arg in node.args]
        if name in _ELEMENTARY and len(args) == 1:
            if args[0] and _MP.mag(args[0]) > 100 + 8 * (name in ("abs", "floor", "ceil", "Re", "Im")) * 1000:
                raise _NoValue
            if name in ("sinh", "cosh", "tanh", "coth", "sech", "csch") and abs(args[0]) > _MAX_MAGNITUDE:
                raise _NoValue
            return _ELEMENTARY[name](args[0])
        if name == "log":
            base = args[1] if len(args) == 2 else self._log_base
            return _MP.log(args[0]) / _MP.log(base)
        if name in ("factorial", "binom"):
            if any(abs(arg) > 1000 for arg in args):
                raise _NoValue
            return _MP.factorial(args[0]) if name == "factorial" else _MP.binomial(*args)
        if name in ("max", "min") and not any(_imaginary(arg) for arg in args):
            return {"max": max, "min": min}[name](args)
        if name in ("f", "g", "h", "F", "G", "H") or name.startswith(("f_", "g_", "h_", "f'", "g'", "h'")):
            return self._unknown(name, args)
        result = exact(node)
        if result is None:
            raise _NoValue
        return _MP.mpf(result.numerator) / result.denominator

    def _unknown(self, name: str, args: list[Value]) -> Value:
        """Return a value for an unknown function; two answers agree only if they use it at the same arguments."""
        seed = zlib.crc32(name.encode())
        total = _MP.mpf(seed % 89 + 1) / 97
        for place, arg in enumerate(args):
            if abs(arg) > 10**6:
                raise _NoValue
            total += _MP.sin(arg * (seed % (31 + place) + 7) / 13 + place) + arg * (seed % 17 + 3) / (11 + place)
        return total

    def _determinant(self, matrix: Node) -> Value:
        size = matrix.value if matrix.kind == "matrix" else 0
        if not 0 < size <= 6 or len(matrix.args) != size * size:
            raise _NoValue
        values = [self.value(arg) for arg in matrix.args]
        return _MP.det(_MP.matrix([values[k : k + size] for k in range(0, len(values), size)]))


def _floor(value: Value) -> Value:
    if _imaginary(value):
        raise _NoValue
    real = _MP.re(value)
    nearest = _MP.nint(real)
    return nearest if abs(real - nearest) < _NEAR_WHOLE else _MP.floor(real)


_ELEMENTARY: dict[str, Callable[[Value], Value]] = {
    "sin": _MP.sin, "cos": _MP.cos, "tan": _MP.tan, "cot": _MP.cot, "sec": _MP.sec, "csc": _MP.csc,
    "arcsin": _MP.asin, "arccos": _MP.acos, "arctan": _MP.atan, "arccot": _MP.acot, "arcsec": _MP.asec,
    "arccsc": _MP.acsc, "sinh": _MP.sinh, "cosh": _MP.cosh, "tanh": _MP.tanh, "coth": _MP.coth, "sech": _MP.sech,
    "csch": _MP.csch, "abs": abs, "floor": _floor, "ceil": lambda value: -_floor(-value), "Re": _MP.re, "Im": _MP.im,
    "sign": _MP.sign, "arg": _MP.arg,
}  # fmt: skip
