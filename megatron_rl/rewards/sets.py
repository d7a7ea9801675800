r"""Sets of real numbers: intervals, inequalities, set builders, ``\mathbb{R}\setminus\{2\}``, as tests of membership.

Two sets are equal if the same points belong to both: every end that they have, points close to it on both sides, and
points between and beyond the ends.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import pairwise

from megatron_rl.rewards.latex import words
from megatron_rl.rewards.tree import Algebra, Node, names_in, number, replaced

DESCRIBE_SETS = frozenset(words("union intersection difference builder and or comma domain empty relation"))
_HOLDS = {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge, "=": operator.eq, "!=": operator.ne}
_SAME = Fraction(1, 10**60)  # relative distance of values that are one value
_NEAR = Fraction(1, 10**9)
_GRID = tuple(map(Fraction, (-(10**9), -1000, -100, *range(-20, 21), 100, 1000, 10**9)))

End = Fraction | float
Test = Callable[[Fraction], bool]
_DOMAINS: dict[str, Test] = {
    "R": lambda at: True, "Z": lambda at: at.denominator == 1, "N": lambda at: at.denominator == 1 and at > 0,
}  # fmt: skip
_MARKS = {"+": ">", "-": "<", "*": "!=", "": "="}  # of `\mathbb{R}^+`, which is `\mathbb{R}_{>0}`


def same_set(ours: Node, theirs: Node, algebra: Algebra) -> bool | None:
    """Return whether two sets of real numbers are equal; None if one is not such a set."""
    names = [_names(node) for node in (ours, theirs)]
    reader = _Reader(algebra)
    tests = [reader.read(node, "".join(own)) if len(own) < 2 else None for node, own in zip((ours, theirs), names)]
    if None in tests:
        return None
    points = list(reader.points())
    for k, node in enumerate((ours, theirs)):
        if node.kind == "comma" and not any(map(tests[k], points)):  # `x<2, x>3` means either
            tests[k] = reader.read(Node("or", node.args), "".join(names[k]))
    one, other = tests
    return (not all(names) or names[0] == names[1] or {""} in names) and all(one(at) == other(at) for at in points)


def _names(node: Node) -> set[str]:
    """The names outside of set builders."""
    return names_in(node) if not any(part.kind == "builder" for part in (node, *node.args)) else set()


class _Reader:
    """Turns trees into tests. One reader serves both answers, so that equal ends get the same value."""

    def __init__(self, algebra: Algebra) -> None:
        self._algebra = algebra
        self._ends: list[Fraction] = []
        self._solved = False  # whether ends were looked for

    def points(self) -> Iterator[Fraction]:
        ends = sorted({*self._ends, *(_GRID if self._solved else ())}) or [Fraction(0)]
        for end in ends:
            near = _NEAR * max(1, abs(end))
            yield from (end - near, end, end + near)
        yield from ((low + high) / 2 for low, high in pairwise(ends))
        yield from (ends[0] - 1, ends[-1] + 1)

    def read(self, node: Node, name: str) -> Test | None:
        """Return the test of the set that ``node`` describes with the variable ``name``; None if it is no such set."""
        kind, args = node.kind, node.args
        if kind == "domain":
            members, mark = _DOMAINS.get(node.value[0]), node.value[2:]
            holds = _HOLDS.get(_MARKS.get(mark, mark.removesuffix("0")))
            return None if members is None or holds is None else lambda at: members(at) and (not mark or holds(at, 0))
        if kind == "empty":
            return lambda at: False
        if kind == "tuple":
            return self._interval(node)
        if kind == "set":
            values = [self._end(arg) for arg in args]
            return None if None in values else lambda at: at in values
        if kind == "relation":
            return self._relation(node, name)
        if kind == "builder":
            return self._builder(*args)
        parts = [self.read(arg, name) for arg in args] if kind in DESCRIBE_SETS or kind == "list" else [None]
        if None in parts:
            return None
        first, *others = parts
        if kind == "difference":
            return lambda at: first(at) and not any(part(at) for part in others)
        rule = any if kind in ("union", "or", "list") else all
        return lambda at: rule(part(at) for part in parts)

    def _end(self, node: Node) -> End | None:
        """The value of a constant, which is kept as a place where a set may end; None if it has none."""
        inner = node.args[0] if node.kind == "neg" else node
        if inner.kind == "constant" and inner.value == "infinity":
            return -math.inf if node.kind == "neg" else math.inf
        value = None if node.kind in ("tuple", "set", "list", "relation") else self._algebra.value(node)
        return None if value is None else self._known(value)

    def _known(self, value: Fraction, keep: bool = True) -> Fraction:
        """The end that ``value`` is; roots and the like have it to 80 digits."""
        for end in self._ends:
            rounded = max(end.denominator, value.denominator) >> 200
            if end == value or (rounded and abs(end - value) <= _SAME * max(1, abs(end))):
                return end
        if keep:
            self._ends.append(value)
        return value

    def _interval(self, node: Node) -> Test | None:
        if len(node.args) != 2 or node.value[0] not in "([" or node.value[1] not in ")]":
            return None
        low, high = (self._end(arg) for arg in node.args)
        if low is None or high is None or low >= high:
            return None
        above, below = _HOLDS["<" if node.value[0] == "(" else "<="], _HOLDS["<" if node.value[1] == ")" else "<="]
        return lambda at: above(low, at) and below(at, high)

    def _builder(self, member: Node, condition: Node) -> Test | None:
        if condition.kind == "list":  # equations beside each other mean either
            either = all(part.kind == "relation" and part.value == ("=",) for part in condition.args)
            condition = Node("or" if either else "and", condition.args)
        if member.kind == "relation" and member.value == ("∈",):
            member, condition = member.args[0], Node("and", (member, condition))
        return self.read(condition, member.value) if member.kind == "name" else None

    def _relation(self, node: Node, name: str) -> Test | None:
        """The test of ``x > 3``, ``0 < x < 1``, ``|x-1| < 3``, ``x \\in S``."""
        signs, variable = node.value, Node("name", value=name)
        if signs == ("∈",) and node.args[0] == variable:
            return self.read(node.args[1], name)
        if names_in(node) != {name} or any(sign not in _HOLDS for sign in signs):
            return None
        constants = {k: self._end(side) for k, side in enumerate(node.args) if not names_in(side)}
        if None in constants.values():
            return None

        def value(k: int, at: Fraction) -> End | None:
            if k in constants or node.args[k] == variable:
                return constants.get(k, at)
            found = self._algebra.value(replaced(node.args[k], variable, number(at)))
            return None if found is None else self._known(found, keep=False)

        def test(at: Fraction) -> bool:
            values = [value(k, at) for k in range(len(node.args))]
            return None not in values and all(_HOLDS[sign](*pair) for sign, pair in zip(signs, pairwise(values)))

        if any(k not in constants and side != variable for k, side in enumerate(node.args)):
            self._solve(value, len(signs))
        return test

    def _solve(self, value: Callable[[int, Fraction], End | None], count: int) -> None:
        """Keep the points where two sides are equal, which a straight line between points of the grid meets."""
        self._solved = True
        for k in range(count):
            sides = [(at, value(k, at), value(k + 1, at)) for at in _GRID]
            gaps = [(at, one - other) for at, one, other in sides if None not in (one, other)]
            for (left, before), (right, behind) in pairwise(gaps):
                if isinstance(before * behind, Fraction) and before * behind < 0:
                    self._known(left - before * (right - left) / (behind - before))
