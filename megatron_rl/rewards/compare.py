r"""Whether two canonical answers say the same: by shape here, by algebra only for the expressions inside.

Lists, tuples, intervals, unions, matrices, equations and words are taken apart as text, so that what must not be
confused never is: ``(1,2)`` and ``(2,1)``, ``[0,1)`` and ``[0,1]``, ``1,2,3`` and ``2``, *east* and *seat*. What is
left are single expressions; those that are not plain numbers go to ``algebra(candidate, gold)``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from megatron_rl.rewards.canonical import canonical, plain_equal, plain_number, split_quantity

Algebra = Callable[[str, str], bool]

MAX_ITEMS = 64  # a list longer than this is compared as a string only
MAX_OPERATIONS = 2  # of an expression offered for a plain number: more is the problem restated, not its answer
MAX_EXPRESSION_CHARS = 200  # of an expression given to algebra, or this many times the gold's length:
MAX_TIMES_GOLD = 3  # reading a longer one costs seconds, and it is not what the gold answer says
MAX_NESTING = 12  # brackets inside brackets of such an expression
_MAX_DEPTH = 6

_OPENING, _CLOSING = "([{", ")]}"
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_NAME = r"(?:\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\([A-Za-z]\))?)"
_MEMBER = re.compile(rf"{_NAME}\s?\\in(?![A-Za-z])\s?")
_EQUALS = re.compile(r"(?<![<>!\\:])=(?!=)|\\approx(?![A-Za-z])")
_ORDER = re.compile(r"<=|>=|<|>|\\le(?![A-Za-z])|\\ge(?![A-Za-z])")
_PM = re.compile(r"\\pm(?![A-Za-z])")
_BASED = re.compile(r"0*([0-9A-Z]+)_\{?(\d+)\}?")
_DEFERRED = re.compile(r"\\(?:sum|prod|int|lim|binom|det|gcd|max|min|b?mod|pmod|[cld]?dots)(?![a-z])|!")
_OPERATION = re.compile(r"[+*/^]|(?<=[^({,\s])-|\\(?:times|cdot|div|frac|sqrt)(?![A-Za-z])")


_COMMAND, _LETTER = re.compile(r"\\[A-Za-z]+"), re.compile(r"[A-Za-z]")


def split_top(text: str, separator: re.Pattern[str]) -> list[str]:
    """Pieces of ``text`` between the separators that stand outside every bracket."""
    pieces, depth, start, position = [], 0, 0, 0
    while position < len(text):
        match = separator.match(text, position) if depth == 0 else None
        if match and match.end() > match.start():
            pieces.append(text[start : match.start()].strip())
            position = start = match.end()
            continue
        depth = max(0, depth + (text[position] in _OPENING) - (text[position] in _CLOSING))
        position += 1
    return [*pieces, text[start:].strip()]


_COMMA, _UNION = re.compile(r"[,;]"), re.compile(r"\\cup(?![A-Za-z])")
_ROW, _CELL = re.compile(r"\\\\"), re.compile(r"&")


@dataclass(frozen=True)
class Shape:
    """An answer taken apart. ``kind``: scalar, list (any order), tuple, interval, union, matrix or equation."""

    kind: str
    items: tuple[str, ...]
    brackets: str = ""
    width: int = 0  # of a matrix


def shape_of(text: str) -> Shape:
    """Take one level of ``text`` apart."""
    text = _MEMBER.sub("", text, count=1) if _MEMBER.match(text) else text
    if text.startswith(r"\begin{pmatrix}") and text.endswith(r"\end{pmatrix}"):
        rows = split_top(text[len(r"\begin{pmatrix}") : -len(r"\end{pmatrix}")], _ROW)
        cells = [split_top(row, _CELL) for row in rows if row]
        flat = tuple(cell for row in cells for cell in row)
        return Shape("matrix", flat, width=len(cells[0]) if cells else 0)
    ordered = _interval_of(text)
    text = ordered or text
    members = split_top(text, _UNION)
    if len(members) > 1:
        return Shape("union", tuple(members))
    if text.startswith(r"\{") and text.endswith(r"\}"):
        return Shape("list", _signs(split_top(text[2:-2], _COMMA)), brackets="{}")
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]" and _closes_at_end(text):
        items = split_top(text[1:-1], _COMMA)
        if len(items) > 1:
            kind = "interval" if len(items) == 2 and text[0] + text[-1] != "()" else "tuple"
            return Shape(kind, tuple(items), brackets=text[0] + text[-1])
        return shape_of(text[1:-1]) if text[0] + text[-1] == "()" else Shape("scalar", (text,))
    if plain_number(text) is None:
        items = _signs(split_top(text, _COMMA))
        if len(items) > 1:
            intervals = [_interval_of(item) for item in items]
            return Shape("union", tuple(intervals)) if all(intervals) else Shape("list", items)
        sides = split_top(text, _EQUALS)
        if len(sides) > 1:
            return Shape("equation", tuple(sides))
    return Shape("scalar", (text,))


def _closes_at_end(text: str) -> bool:
    """Whether the bracket that opens ``text`` is closed by its last character."""
    depth = 0
    for position, char in enumerate(text):
        depth += (char in _OPENING) - (char in _CLOSING)
        if depth == 0:
            return position == len(text) - 1
    return False


def _signs(items: list[str]) -> tuple[str, ...]:
    r"""``a \pm b`` is two items, ``a+b`` and ``a-b``."""
    spread: list[str] = []
    for item in items:
        spread += [_PM.sub(sign, item).lstrip("+").replace("+ ", "+") for sign in "+-"] if _PM.search(item) else [item]
    return tuple(canonical(item) for item in spread) if len(spread) > len(items) else tuple(items)


def _interval_of(text: str) -> str | None:
    r"""``-2\le x<7`` as ``[-2,7)``, ``x>3`` as ``(3,\infty)``; None where ``text`` is no such chain."""
    signs = _ORDER.findall(text)
    sides = split_top(text, _ORDER)
    if not signs or len(sides) != len(signs) + 1 or not all(sides):
        return None
    down = [sign in (">", ">=", r"\ge") for sign in signs]
    closed = [sign not in "<>" for sign in signs]
    name = re.compile(_NAME)
    if len(signs) == 1:
        if name.fullmatch(sides[1]) and not name.fullmatch(sides[0]):
            sides, down = sides[::-1], [not down[0]]
        if not name.fullmatch(sides[0]) or (name.fullmatch(sides[1]) and not sides[1].startswith("\\")):
            return None
        if down[0]:
            return f"{'[' if closed[0] else '('}{sides[1]},\\infty)"
        return f"(-\\infty,{sides[1]}{']' if closed[0] else ')'}"
    if len(signs) == 2 and down[0] == down[1] and name.fullmatch(sides[1]):
        if down[0]:
            sides, closed = sides[::-1], closed[::-1]
        return f"{'[' if closed[0] else '('}{sides[0]},{sides[2]}{']' if closed[1] else ')'}"
    return None


def words_of(text: str) -> list[str] | None:
    r"""The words of an answer that is words (``\text{east}``, ``(C)``, ``4:51 p.m.``); None where it is mathematics."""
    bare = _TEXT.sub(lambda m: f" {m[1]} ", text)
    rest = _TEXT.sub("", text).strip("()., ")
    is_clock = re.fullmatch(r"\d{1,2}(?::\d{2}){1,2}\D{0,12}", bare.strip()) is not None
    if rest and not is_clock and not (re.fullmatch(r"[A-Za-z][A-Za-z' ]{3,}", rest) and rest == text.strip("()., ")):
        return None
    if not rest and not re.search(r"[A-Za-z]", bare):
        return None
    folded = re.sub(r"[.\"'()]", " ", bare) if not is_clock else re.sub(r"[\s.]", "", bare)
    items = [" ".join(item.split()) for item in folded.split(",")]
    return [item if len(item) == 1 else item.casefold() for item in items if item]


def _same_words(candidate: str, gold_words: list[str]) -> bool:
    found = words_of(candidate) or words_of(rf"\text{{{candidate}}}") or []
    letters = all(len(item) == 1 for item in gold_words)  # a set of choices; words in a row may be an order
    return sorted(found) == sorted(gold_words) if letters else found == gold_words


def same(candidate: str, gold: str, algebra: Algebra, depth: int = 0) -> bool:
    """Whether canonical ``candidate`` says what canonical ``gold`` says. Raises only what ``algebra`` raises."""
    if candidate == gold:
        return bool(gold)
    if not candidate or not gold or depth > _MAX_DEPTH:
        return False
    gold_words = words_of(gold)
    if gold_words is not None:
        return _same_words(candidate, gold_words)
    based = _BASED.fullmatch(gold)
    if based:
        found = _BASED.fullmatch(candidate)
        return found is not None and found.groups() == based.groups()
    ours, theirs = shape_of(candidate), shape_of(gold)
    if max(len(ours.items), len(theirs.items)) > MAX_ITEMS:
        return False
    if "equation" in (ours.kind, theirs.kind):
        return _same_equation(ours, theirs, algebra, depth)
    if ours.kind == theirs.kind == "scalar":
        return _same_scalar(ours.items[0], theirs.items[0], algebra)
    return _same_items(ours, theirs, lambda c, g: same(c, g, algebra, depth + 1))


def _same_items(ours: Shape, theirs: Shape, equal: Algebra) -> bool:
    if len(ours.items) != len(theirs.items) or not ours.items:
        return False
    in_order = all(equal(c, g) for c, g in zip(ours.items, theirs.items)) if theirs.kind != "union" else False
    kinds = (ours.kind, theirs.kind)
    if kinds in (("tuple", "list"), ("list", "tuple")):
        return in_order and "{}" not in (ours.brackets, theirs.brackets)  # a pair written without its brackets
    if ours.kind != theirs.kind:
        return False
    if theirs.kind in ("list", "union"):
        return in_order or _match_any_order(list(ours.items), theirs.items, equal)
    return in_order and ours.brackets == theirs.brackets and ours.width == theirs.width


def _match_any_order(candidates: list[str], golds: tuple[str, ...], equal: Algebra) -> bool:
    for gold in golds:
        partner = next((item for item in candidates if equal(item, gold)), None)
        if partner is None:
            return False
        candidates.remove(partner)
    return True


def _same_equation(ours: Shape, theirs: Shape, algebra: Algebra, depth: int) -> bool:
    """Two equations; or a value against ``name = value``, on either side."""

    def equal(c: str, g: str) -> bool:
        return same(c, g, algebra, depth + 1)

    if ours.kind == theirs.kind:
        if len(ours.items) != 2 or len(theirs.items) != 2:
            return False
        if re.fullmatch(_NAME, ours.items[0]) and re.fullmatch(_NAME, theirs.items[0]):
            return ours.items[0] == theirs.items[0] and equal(ours.items[1], theirs.items[1])
        return algebra("=".join(ours.items), "=".join(theirs.items))
    if theirs.kind == "equation":
        value = ours.items[0] if ours.kind == "scalar" else _written(ours)
        return len(theirs.items) == 2 and bool(re.fullmatch(_NAME, theirs.items[0])) and equal(value, theirs.items[1])
    gold = theirs.items[0] if theirs.kind == "scalar" else _written(theirs)
    *left, value = ours.items  # every other side must name something or be equal: `1=2` is no way to say 2
    return equal(value, gold) and all(_names_something(side) or equal(side, gold) for side in left)


def _written(shape: Shape) -> str:
    """A shape as text again."""
    if shape.kind == "union":
        return r"\cup ".join(shape.items)
    if shape.kind == "matrix":
        rows = [shape.items[i : i + shape.width] for i in range(0, len(shape.items), shape.width or 1)]
        return r"\begin{pmatrix}" + r"\\".join("&".join(row) for row in rows) + r"\end{pmatrix}"
    opening, closing = {"{}": (r"\{", r"\}"), "": ("", "")}.get(shape.brackets, tuple(shape.brackets))
    return opening + ",".join(shape.items) + closing


def _worth_parsing(candidate: str, gold: str) -> bool:
    """Whether ``candidate`` can be an expression like ``gold`` at all: not far longer, and its brackets balanced."""
    if len(candidate) > max(MAX_EXPRESSION_CHARS, MAX_TIMES_GOLD * len(gold)):
        return False
    depth = 0
    for char in candidate:
        depth += (char in _OPENING) - (char in _CLOSING)
        if not 0 <= depth <= MAX_NESTING:
            return False
    return depth == 0


def _names_something(side: str) -> bool:
    """Whether ``side`` is a name or names put together (``x_1``, ``f(3)``, ``m+n``); ``2x-5`` is not."""
    names = re.sub(r"_\{?\w+\}?|\([^()]*\)|\\(?:text|angle|triangle|frac|overline)(?![A-Za-z])|[{}|\\]", " ", side)
    return re.fullmatch(r"[A-Za-z+*/ -]*[A-Za-z][A-Za-z+*/ -]*", names) is not None


def _same_scalar(candidate: str, gold: str, algebra: Algebra) -> bool:
    ours, theirs = split_quantity(candidate), split_quantity(gold)
    if ours.unit and theirs.unit and ours.unit != theirs.unit:
        return False
    ours_number, theirs_number = plain_number(ours.value), plain_number(theirs.value)
    if ours_number and theirs_number:
        if plain_equal(ours_number, theirs_number):
            return True
        if ours.percent == theirs.percent:
            return False
        percent, plain = (ours_number, theirs_number) if ours.percent else (theirs_number, ours_number)
        return percent.value == plain.value * 100
    if ours.value == theirs.value:
        return True
    if set(_DEFERRED.findall(ours.value)) - set(_DEFERRED.findall(theirs.value)):
        return False  # a sum, limit or factorial left to be worked out is not yet an answer
    if theirs_number and len(_OPERATION.findall(ours.value)) > MAX_OPERATIONS:
        return False
    if not _worth_parsing(ours.value, theirs.value):
        return False
    letters = [set(_LETTER.findall(_COMMAND.sub("", value))) for value in (ours.value, theirs.value)]
    if letters[0] != letters[1] and {x.lower() for x in letters[0]} == {x.lower() for x in letters[1]}:
        return False  # math-verify reads r and R as one variable
    return algebra(ours.value, theirs.value)
