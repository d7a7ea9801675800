"""Forms of answers: the same answer in one shape, and what a part of an answer is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import reduce
from itertools import permutations, product

from megatron_rl.rewards import tree, units
from megatron_rl.rewards.tree import Node, exact_or_none, is_unknown, names_in, negative, number, replaced, walk

MAX_ITEMS = 64  # longest list that is compared in any order
_MAX_SIGNS = 3  # largest number of ± in one value
_VERDICTS = ("yes", "no")
DOTS = Node("name", value="ldots")
_VOWELS = frozenset("eiou")
_TURNED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}


def is_equation(node: Node) -> bool:
    return node.kind == "relation" and set(node.value) <= {"=", "≈"}


def is_score(node: Node) -> bool:
    """Whether ``node`` is a score, a range, a difference left undone (``6-3``) or a date (``2/3/2023``)."""
    if node.kind == "div":
        return node.args[0].kind == "div" and (exact_or_none(node.args[1]) or 0) >= 1000
    numbers = [exact_or_none(part) if part.kind in ("number", "neg") else None for part in node.args]
    is_sum = node.kind == "add" and None not in numbers
    return is_sum and all(n.denominator == 1 and (n < 0) == (k > 0) for k, n in enumerate(numbers))


def canonical(node: Node) -> Node:
    """``node`` with its ± written out, without what only says of which set it is, and its families as such."""
    return _family(_spread_signs(_membership(_without_dots(node))))


def _membership(node: Node) -> Node:
    r"""``x \in S`` says S; ``\{x \mid x=2k, k \in \mathbb{Z}\}`` says 2k for these; ``P(3,4)`` says the point."""
    if node.kind == "list" and node.args[0].kind == "word" and node.args[0].value in _VERDICTS:  # `Yes, it converges`
        return node if any(part.value in _VERDICTS for part in node.args[1:]) else node.args[0]
    if node.kind == "builder" and node.args[0].kind in ("add", "mul", "div"):
        return Node("list", node.args)
    if node.kind == "builder" and node.args[1].kind in ("list", "comma"):
        first, *others = node.args[1].args
        is_value = first.value == ("=",) and first.args[0] == node.args[0]
        if is_value or all(item.value == ("∈",) and item.args[0] != node.args[0] for item in others):
            return Node("list", (first.args[1] if is_value else first, *others))
    if node.kind == "relation" and node.value == ("∈",) and names_something(node.args[0]):
        return node.args[1]
    if node.kind == "mul" and node.args[1].kind == "tuple" and str(node.args[0].value).isupper():
        return node.args[1]
    is_point = is_unknown(node) and node.value[0].isupper() and len(node.args) > 1  # `F(0,1)`
    return Node("tuple", node.args, "()") if is_point else node


def _without_dots(node: Node) -> Node:
    """``1,2,\\ldots,5`` as ``1,2,3,4,5``; a row without end by its first two numbers."""
    values = [exact_or_none(item) for item in node.args] if node.kind in ("list", "set", "tuple") else []
    if len(values) < 4 or node.args.count(DOTS) != 1 or None in values[:2]:
        return node
    at, (first, second) = node.args.index(DOTS), values[:2]
    step = second - first
    shown = [first + k * step for k in range(at)]
    last = values[-1] if at == len(values) - 2 else None
    if values[:at] != shown or not step or (last is None and at < len(values) - 1):
        return node
    if last is None:
        return Node(node.kind, (*node.args[:2], DOTS), node.value)
    count = (last - first) / step
    if count.denominator != 1 or not at <= count <= MAX_ITEMS:
        return node
    return Node(node.kind, tuple(number(first + k * step) for k in range(int(count) + 1)), node.value)


def _family(node: Node) -> Node:
    """A list of values and ``k \\in \\mathbb{Z}`` as the values for all k."""
    if node.kind != "list" and not (node.kind == "comma" and len(names_in(node)) == 2):
        return node
    whole = [item for item in node.args if item.value == ("∈",) and item.args[1].kind == "domain"]
    names = [item.args for item in whole if item.args[1].value[0] in "ZN"]
    values = [item for item in node.args if item not in whole]
    if len(names) != 1 or not values:
        return node
    name, domain = names[0]
    families = tuple(Node("family", (item, domain), name.value) if name in walk(item) else item for item in values)
    return families[0] if len(families) == 1 else Node("list", families)


def without_head(*values: Node) -> Iterator[Node]:
    """Yield values of families: ``a<x<b`` and ``x\\in(a,b)`` as intervals, and without ``x=`` if only one has it."""
    heads = [value.value == ("=",) and names_something(value.args[0]) for value in values]
    for value, has_head in zip(values, heads):
        if value.value == ("∈",) or (has_head and not all(heads)):
            yield value.args[1]
        elif value.kind == "relation" and len(value.args) == 3 and set(value.value) <= {"<", "<="}:
            yield Node("tuple", value.args[::2], "(["[value.value[0] == "<="] + ")]"[value.value[1] == "<="])
        else:
            yield value


def given_values(items: Sequence[Node], other: Node) -> Sequence[Node]:
    """``x=3, y=-2`` beside a tuple: its values, where the names are different and in their order."""
    named = all(item.kind == "relation" and item.value == ("=",) and item.args[0].kind == "name" for item in items)
    if not named or other.kind != "tuple":
        return items
    names = [item.args[0].value for item in items]
    return [item.args[1] for item in items] if names == sorted(set(names)) else items


def _spread_signs(node: Node) -> Node:
    r"""``a \pm b`` is the list of ``a+b`` and ``a-b``; also inside a list or set."""
    if node.kind in ("list", "set"):
        items = []
        for arg in node.args:
            spread = _spread_signs(arg)
            items += spread.args if spread.kind == "list" and arg.kind != "list" else [arg]
        return Node(node.kind, tuple(items), node.value)
    if node.kind == "relation" and node.value in (("=",), ("!=",)):
        value = _spread_signs(node.args[1])
        if value.kind != "list" or node.args[1].kind == "list":
            return Node("relation", (node.args[0], value), node.value)
        relations = tuple(Node("relation", (node.args[0], item), node.value) for item in value.args)
        return Node("list" if node.value == ("=",) else "and", relations)
    count = sum(part.kind == "pm" for part in walk(node))
    if not 0 < count <= _MAX_SIGNS:
        return node
    linked = any(part.kind == "pm" and part.value == -1 for part in walk(node))
    patterns = [(1,) * count, (-1,) * count] if linked else product((1, -1), repeat=count)
    return Node("list", tuple(_with_signs(node, list(pattern)) for pattern in patterns))


def _with_signs(node: Node, signs: list[int]) -> Node:
    if node.kind == "pm":
        sign = signs.pop(0) * node.value
        inner = _with_signs(node.args[0], signs)
        return inner if sign == 1 else negative(inner)
    return Node(node.kind, tuple(_with_signs(arg, signs) for arg in node.args), node.value)


def as_matrix(node: Node) -> Node:
    r"""``\frac12 M`` and ``-M`` as matrices of products; ``M^T`` with rows as columns."""
    if node.kind == "pow" and node.args[0].kind in ("matrix", "tuple") and node.args[1] == Node("name", value="T"):
        cells = node.args[0].args
        width = node.args[0].value if node.args[0].kind == "matrix" else len(cells)
        return Node("matrix", tuple(cell for k in range(width) for cell in cells[k::width]), len(cells) // width)
    if node.kind == "neg" and node.args[0].kind in ("matrix", "mul", "div"):
        inner = as_matrix(node.args[0])
        return Node("matrix", tuple(map(negative, inner.args)), inner.value) if inner.kind == "matrix" else node
    if node.kind in ("mul", "div") and "matrix" in (node.args[0].kind, node.args[1].kind):
        at = int(node.args[1].kind == "matrix")
        matrix, scalar = node.args[at], node.args[1 - at]
        if scalar.kind == "matrix" or (node.kind == "div" and at == 1):
            return node
        return Node(
            "matrix", tuple(tree.computed(Node(node.kind, (cell, scalar))) for cell in matrix.args), matrix.value
        )
    return node


def with_argument_of(ours: Sequence[Node], theirs: Sequence[Node]) -> tuple[Sequence[Node], tuple[Node, Node]]:
    """``f(n) = n+1`` with the variable of ``f(x) = …``, and the two left sides."""
    heads = ours[0], theirs[0]
    calls = all(head.kind == "call" and len(head.args) == 1 and head.args[0].kind == "name" for head in heads)
    if calls and heads[0].args != heads[1].args and heads[1].args[0] not in walk(ours[1]):
        ours = [replaced(side, heads[0].args[0], heads[1].args[0]) for side in ours]
    return ours, (ours[0], theirs[0])


def is_time(ratio: Node) -> bool:
    """``9:24`` may be a time: it is not 3:8."""
    parts = [exact_or_none(arg) for arg in ratio.args]
    whole = None not in parts and all(part.denominator == 1 for part in parts)
    return whole and parts[0] <= 24 and all(9 < part < 60 for part in parts[1:])


def minutes(time: Node) -> Fraction | None:
    """The minutes since midnight at a time, which has a sign of the half day or is behind noon; None for others."""
    parts = [exact_or_none(arg) for arg in time.args]
    if None in parts:
        return None
    hour = parts[0] % 12 + 12 * (time.value == "㏘") if time.value else parts[0]
    return sum((part / 60**k for k, part in enumerate(parts[1:])), hour * 60)


def exactly(node: Node) -> Node:
    return Node("relation", node.args, tuple("=" if sign == "≈" else sign for sign in node.value))


def turned(node: Node) -> Node:
    """``b > a`` as ``a < b``."""
    return Node("relation", node.args[::-1], tuple(_TURNED.get(sign, sign) for sign in reversed(node.value)))


def name_first(node: Node) -> Node:
    """``5 = x`` as ``x = 5``."""
    if len(node.args) == 2 and names_something(node.args[1]) and not names_something(node.args[0]):
        return Node("relation", node.args[::-1], node.value)
    return node


def names_something(node: Node) -> bool:
    r"""Whether ``node`` is a name or names put together (``x_1``, ``f(3)``, ``m+n``, ``AB^2``); not ``-x``."""
    kind, args = node.kind, node.args
    if kind in ("name", "word") or (kind == "constant" and node.value in ("e", "i")):
        return True
    if kind == "call":
        return is_unknown(node) or (bool(args) and all(map(names_something, args)))
    if kind == "pow":
        return names_something(args[0]) and tree.plain(args[1]) is not None
    if kind == "mul" and args[0].kind == "name" and args[0].value[0].isupper() and len(args) == 2:
        return True  # `P(X>1)`, `A(3)`
    if kind == "add":  # `a-b`
        args = (args[0], *(arg.args[0] if arg.kind == "neg" else arg for arg in args[1:]))
    joins = ("add", "mul", "div", "tuple", "root", "ratio", "union", "intersection", "difference")
    return kind in joins and all(map(names_something, args))


def spelled(node: Node) -> str:
    """The word that ``node`` is, the letters of a product, or of choices (``B and C``), in their order; else ""."""
    letters = []
    if node.kind == "list" and node.value != "or":
        letters = [item.value if item.kind in ("name", "word") else "" for item in node.args]
        return "".join(letters) if letters == sorted(set("ABCDEFGHIJ").intersection(letters)) else ""
    while node.kind == "mul":
        letters.append(str(node.args[1].value) if node.args[1].kind in ("name", "constant") else "")
        node = node.args[0]
    letters.append(str(node.value) if node.kind in ("name", "constant") and letters else "")
    return node.value if node.kind == "word" else "".join(reversed(letters)) if set(map(len, letters)) == {1} else ""


def is_word(node: Node) -> bool:
    """Whether ``node`` is a word, or letters in italics that may be one or the name of a figure: `odd`, `CAB`."""
    text = spelled(node)
    return node.kind == "word" or (bool(text) and (not text.islower() or (len(text) > 2 and bool(_VOWELS & set(text)))))


def without_condition(node: Node, other: Node) -> Node:
    """``x+1, x \\ne 2`` as ``x+1`` beside an answer without condition."""
    if node.kind != "list" or other.kind == "list" or is_order(node.args[0]) or not all(map(is_order, node.args[1:])):
        return node
    names = names_in(node.args[0])
    return node.args[0] if all(names_in(part) <= names for part in node.args[1:]) else node


def is_order(node: Node) -> bool:
    """Whether ``node`` says where a value is: an inequality or ``x \\in S``."""
    return node.kind == "relation" and not {"=", "≈"} & set(node.value)


def as_vector(node: Node, other: Node) -> Node:
    r"""``3\mathbf{i}-\mathbf{j}`` as ``(3,-1)`` beside a tuple or a matrix."""
    if other.kind not in ("tuple", "matrix") or node.kind not in ("add", "mul", "neg", "name", "constant"):
        return node
    cells = dict.fromkeys("ijk")
    for term in node.args if node.kind == "add" else (node,):
        factors, sign = [term.args[0] if term.kind == "neg" else term], term.kind == "neg"
        while factors[-1].kind == "mul":
            factors[-1:] = factors[-1].args
        base = factors.pop().value
        if base not in cells or cells[base] is not None:
            return node
        value = reduce(lambda one, two: Node("mul", (one, two)), factors) if factors else number(1)
        cells[base] = negative(value) if sign else value
    row = [number(0) if cell is None else cell for cell in cells.values()]
    size = len(other.args)
    return Node("tuple", tuple(row[:size]), "()") if size in (2, 3) and (size == 3 or cells["k"] is None) else node


_CONSTANT = re.compile(r"[A-DKck](_\d)?")


def up_to_constants(ours: Node, theirs: Node) -> Iterator[tuple[Node, Node]]:
    r"""Yield pairs of which one is equal if both are the same but for free constants: ``\ln x+C``, ``\ln 2x+K``."""
    yield ours, theirs
    names, their_names = ({part for part in walk(node) if part.kind == "name"} for node in (ours, theirs))
    own, gold = sorted(names - their_names, key=str), sorted(their_names - names, key=str)
    free = [name for name in (*own, *gold) if _CONSTANT.fullmatch(name.value)]
    if names & their_names and 0 < len(own) == len(gold) <= 2 and len(free) == 2 * len(own):
        for order in permutations(gold):
            yield reduce(lambda node, pair: replaced(node, *pair), zip(own, order), ours), theirs
    rests = [_without_constant(node) for node in (ours, theirs)]
    variables = sorted(set.union(*map(names_in, rests))) if None not in rests else ()
    if len(variables) == 1:
        gap, name = Node("add", (rests[0], negative(rests[1]))), Node("name", value=variables[0])
        yield gap, replaced(gap, name, Node("div", (name, number(2))))


def _without_constant(node: Node) -> Node | None:
    """``node`` without the ``C`` that is added to it; None if there is none."""
    terms = [arg for arg in node.args if not (arg.kind == "name" and re.fullmatch("[CcKk](_0)?", arg.value))]
    return Node("add", tuple(terms)) if node.kind == "add" and 0 < len(terms) == len(node.args) - 1 else None


def split_unit(node: Node) -> tuple[Node, units.Unit | None]:
    if node.kind == "mul" and node.args[1].kind == "quantity":  # `n\\cdot 360^\\circ`
        return Node("mul", (node.args[0], node.args[1].args[0])), node.args[1].value
    return (node.args[0], node.value) if node.kind == "quantity" else (node, None)
