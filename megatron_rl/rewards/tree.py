"""The tree of nodes that a parsed answer gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any


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


def depth(node: Node) -> int:
    """Number of nodes from ``node`` down to its deepest leaf."""
    level, count = [node], 0
    while level:
        level, count = [arg for part in level for arg in part.args], count + 1
    return count
