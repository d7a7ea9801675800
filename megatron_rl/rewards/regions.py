r"""Sets of real numbers that answers describe: intervals, inequalities, set builders, ``\mathbb{R}\setminus\{2\}``.

A set is kept as a sorted list of half-open pieces between cuts. The cut ``(v, 0)`` lies just below v and ``(v, 1)``
just above it, so that open and closed ends need no cases: [a, b] runs from ``(a, 0)`` to ``(b, 1)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from megatron_rl.rewards.tree import Algebra, Node

Cut = tuple[Fraction | float, int]
Pieces = tuple[tuple[Cut, Cut], ...]

DESCRIBE_SETS = frozenset(
    ["union", "intersection", "difference", "builder", "and", "or", "comma", "domain", "empty", "relation"]
)
_LINE: Pieces = (((-math.inf, 1), (math.inf, 0)),)
_SAME = Fraction(1, 10**60)  # relative distance of values that are one value
_TURNED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!=", "=": "="}


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
        if len(places) != 1 or any(sign not in _TURNED for sign in signs) or len(signs) > 2:
            return None
        place = places[0]
        if len(signs) == 2 and (place != 1 or not _one_way(signs)):
            return None
        pieces = _LINE
        for k, sign in enumerate(signs):
            value = self._end(sides[k] if k < place else sides[k + 1])
            if value is None or (isinstance(value, float) and sign not in ("<", ">")):
                return None
            pieces = _intersection(pieces, _half_line(_TURNED[sign] if k < place else sign, value))
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
