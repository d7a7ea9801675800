"""Reads the tokens of an answer into a tree, all of them or none.

It is a recursive descent parser for final answers: lists, sets, intervals, relations and expressions, each in a method.
A token that no rule accepts raises `Unread`. No token is skipped, so that a tree represents the complete answer. Depth
is bounded, and time is linear except for the few searches for a closing bracket.
"""

from __future__ import annotations

import re
from contextlib import suppress
from functools import lru_cache, reduce
from itertools import pairwise

from megatron_rl.rewards import tree, units
from megatron_rl.rewards.atoms import RELATIONS, AtomParser
from megatron_rl.rewards.forms import split_unit
from megatron_rl.rewards.latex import Token, Unread, join_thousands, tokenize, words
from megatron_rl.rewards.phrases import base_numeral, option_of, phrase
from megatron_rl.rewards.tree import Node, computed, depth, negative, number

MAX_TREE_DEPTH = 100  # depth of a tree; a product of n factors has depth n
_CACHED_CHARS = 200  # trees of longer answers are not cached: they may be large

_NO_FACTOR = frozenset(words(r"\rvert \rfloor \rceil \rangle \end \pmod \mod \bmod \over \choose"))
_NO_START = frozenset(["", ",", ";", "∪", "∩", "or", "and", ")"])  # behind `[`, which then closes an interval
_BEHIND = frozenset("^!°'\"")
_ENDS = frozenset([",", ";", "or", "and", "&", r"\\", r"\end"])
_EULER = re.compile(r"(?<![\d.])(\d+)e([+-]\d)(?!\d)")
_HALF_DAYS = ("㏂", "㏘")
_PRODUCTS = {"*": "mul", "/": "div", "÷": "divide"}
_CLOSING = {"(": ")", "[": "]", r"\{": r"\}", "{": "}"}


class Parser(AtomParser):
    """Reads a whole answer."""

    # Answers, lists and logic.

    def answer(self) -> Node:
        node = self._items_over()
        if self._peek() is not units.END:
            raise Unread(f"{self._next().text} was not read")
        return node

    def _separator(self) -> str:
        """Take and return one separator of items; "" if there is none. ``, and`` is "and"."""
        comma = ""
        if (not self._rows or self._text_at(1) not in (r"\\", r"\end")) and self._take(",", ";"):
            comma = ","
        if not self._rows and self._take(r"\\"):
            comma = ","
        token = self._peek()
        if token.text in ("or", "and") and (token.kind != "letters" or token.roman or token.space or comma):
            self._position += 1
            return token.text
        return comma

    def _items(self) -> Node:
        """Read items separated by commas, "and" or "or"; return a single item as it is."""
        items, separators, formal = [self._item()], set(), False
        while True:
            formal |= self._at("or", "and")
            separator = self._separator()
            if not separator:
                break
            separators.add(separator)
            items.append(self._item())
        if len(items) == 1:
            return items[0]
        if all(item.kind == "relation" and set(item.value) <= {"<", ">", "<=", ">=", "!=", "∈"} for item in items):
            kind = "or" if "or" in separators else "and" if "and" in separators else "comma"
            if "or" in separators and "and" in separators:
                raise Unread("and and or together")
            return Node(kind, tuple(items))
        if formal and not all(item.kind == "relation" for item in items):
            raise Unread("a formula of logic")
        if separators <= {"and", ","} and all(_is_part(*pair) for pair in pairwise(items)):
            return reduce(_with_part, items)
        return Node("list", tuple(items), next((word for word in ("or", "and") if word in separators), None))

    def _item(self) -> Node:
        """Read a relation, congruence, ratio or value."""
        unnamed = Node("name", value="") if self._at("<", ">", "<=", ">=") else None  # `at least 5`
        sides, signs = [unnamed or self._as_written() or self._side()], []
        while self._at(*RELATIONS):
            signs.append(self._next().text)
            sides.append(self._as_written() or self._side())
        modulus = self._modulus()
        if modulus is not None:
            return Node("congruence", (*sides, modulus))
        return Node("relation", tuple(sides), tuple(signs)) if signs else sides[0]

    def _as_written(self) -> Node | None:
        """Read an item that is a numeral of a base, or words; None for others."""
        end, depth = self._position, 0
        while end < len(self._tokens):
            text = self._tokens[end].text
            depth += (text in _CLOSING) - (text in _CLOSING.values())
            if depth < 0 or (depth == 0 and (text in RELATIONS or text in _ENDS)):
                break
            end += 1
        tokens = tuple(self._tokens[self._position : end])
        node = base_numeral(tokens) or phrase(tokens)
        self._position = end if node else self._position
        return node

    def _modulus(self) -> Node | None:
        bracket = self._word_at(1) == "mod" and self._take("(")
        if not self._take(r"\pmod", r"\mod", r"\bmod") and not self._take_word("mod"):
            return None
        modulus = self._sum()
        if bracket:
            self._expect(")")
        return modulus

    def _side(self) -> Node:
        """Read sets joined by ∪, ∩ and ∖; a ratio; or a sum."""
        node = self._sum()
        if self._at(":", *_HALF_DAYS) and self._context != "set":
            parts = [node]
            while self._take(":"):
                parts.append(self._sum())
            return Node("ratio", tuple(parts), self._next().text if self._at(*_HALF_DAYS) else "")
        names = {"∪": "union", "∩": "intersection", "∖": "difference"}
        while self._at(*names):
            node = Node(names[self._next().text], (node, self._sum()))
        return node

    # Sums, products and powers.

    def _sum(self) -> Node:
        terms = [self._signed()]
        while self._at("+", "-", "±", "∓"):
            terms.append(self._signed())
        if len(terms) == 1:
            return terms[0]
        if terms[0].kind == "domain" and all(t.kind == "neg" and t.args[0].kind == "set" for t in terms[1:]):
            return reduce(lambda one, other: Node("difference", (one, other.args[0])), terms)  # `\mathbb{R}-\{0\}`
        unit = split_unit(terms[-1])[1]
        if unit is not None:  # `3 + 2\sqrt2 cm`, `180^\circ - 120^\circ`
            bare, found = zip(*map(split_unit, terms))
            if {*found} <= {None, unit} and (None not in found or unit != units.DEGREE):
                return Node("quantity", (Node("add", bare),), unit)
        return Node("add", tuple(terms))

    def _signed(self) -> Node:
        sign = self._next().text if self._at("+", "-", "±", "∓") else "+"
        if sign == "+":
            return self._product()
        node = self._signed() if self._at("+", "-") else self._product()
        return negative(node) if sign == "-" else Node("pm", (node,), 1 if sign == "±" else -1)

    def _product(self) -> Node:
        node = self._power()
        while True:
            if self._at(*_PRODUCTS):
                node = Node(_PRODUCTS[self._next().text], (node, self._factor()))
            elif (behind := self._behind(node)) is not None:
                node = behind
            elif node.kind == "quantity" and node.value == units.DEGREE and len(self._word_at()) == 1:
                node = Node("quantity", (Node("mul", (node.args[0], self._power())),), node.value)  # `360^\circ n`
            elif node.kind != "quantity" and self._starts_factor(node):
                node = Node("mul", (node, self._power()))
            elif node.kind == "quantity" and (whole := self._with_smaller_unit(node)) is not None:
                node = whole
            else:
                return node

    def _with_smaller_unit(self, node: Node) -> Node | None:
        """``5 ft`` with the inches behind it; None if there are none."""
        start = self._position
        if self._peek().kind != "number":
            return None
        part = self._power()
        part = part if part.kind == "quantity" else self._behind(part)
        if part is not None and _is_part(node, part):
            return _with_part(node, part)
        self._position = start
        return None

    def _factor(self) -> Node:
        """Read a factor after an operator; the factor may have a sign."""
        return negative(self._factor()) if self._take("-") else self._power()

    def _starts_factor(self, node: Node | None = None) -> bool:
        """Whether the next token multiplies ``node``, which is before it: a number does in ``3!7!``, ``2^3 5^2``."""
        token = self._peek()
        if token.kind == "number" and node is not None:
            last = node.args[1] if node.kind == "mul" else node
            return last.kind == "pow" or last.value == "factorial"
        if token.kind == "letters":
            return token.text not in ("or", "and", "mod") or not (token.roman or token.space)
        if token.kind == "command":
            return token.text not in _NO_FACTOR
        if token.text == "(" and self._word_at(1) == "mod":
            return False
        return (
            token.text in ("(", "{")
            or (token.text == "[" and self._context != "french" and self._text_at(1) not in _NO_START)
            or (token.text == "|" and self._context not in ("bars", "set"))
        )

    def _power(self) -> Node:
        start, node = self._position, self._atom()
        if self._text_at() == "_" and tree.names_in(node):  # `(xy)_{\\max}`
            self._position += 1
            spelled = "".join(token.text for token in self._tokens[start : self._position])
            node = Node("name", value=spelled + self._spelled_argument())
        while self._text_at() in _BEHIND:
            if self._take("^"):
                node = Node("pow", (node, self._exponent()))
            elif self._take("!"):
                node = Node("call", (node,), "factorial")
            elif self._take("°"):
                scale = units.TEMPERATURES.get(self._text_at())
                self._position += scale is not None
                node = Node("quantity", (node,), scale or units.DEGREE)
            elif node.kind == "number":
                seconds = self._next().text == '"' or self._take("'")
                node = Node("quantity", (node,), units.ARC_SECOND if seconds else units.ARC_MINUTE)
            else:
                break
        return node

    def _exponent(self) -> Node:
        """Read an exponent: a group, or plain text such as ``2^10``, ``x^-1``, ``2^(n+1)``."""
        if self._take("-"):
            return negative(self._exponent())
        return self._number(self._next()) if self._peek().kind == "number" else self._argument()


def _is_part(whole: Node, part: Node) -> bool:
    """Whether ``part`` counts in a smaller unit of the same kind: the inches of ``5 ft 6 in``."""
    if whole.kind != "quantity" or part.kind != "quantity":
        return False
    return whole.value.dimensions == part.value.dimensions and whole.value.factor > part.value.factor


def _with_part(whole: Node, part: Node) -> Node:
    share = number(part.value.factor / whole.value.factor)
    return Node("quantity", (computed(Node("add", (whole.args[0], Node("mul", (part.args[0], share))))),), whole.value)


def readings(text: str) -> tuple[Node, ...]:
    """Return the possible trees of ``text``: none if it cannot be read completely, several if it is ambiguous.

    Ambiguous are ``1,234`` (one number or two), ``2e-1``, and roman letters that are both units and names.
    """
    return _cached_readings(text) if len(text) <= _CACHED_CHARS else _readings(text)


def _readings(text: str) -> tuple[Node, ...]:
    trees: list[Node] = []
    for spelling in dict.fromkeys((text, _EULER.sub(r"\1 e \2", text))):
        with suppress(Unread):
            tokens = tokenize(spelling)
            may_be_unit = any(t.kind == "letters" and len(t.text) <= 1 + 2 * (not t.roman) for t in tokens)
            commas = (True, False)[: 1 + any(token.text == "," for token in tokens)]
            for joined in dict.fromkeys(join_thousands(tokens, at_top) for at_top in commas):
                for unit_letters in (True, False)[: 1 + may_be_unit]:
                    trees += _one_reading(joined, unit_letters)
    return tuple(dict.fromkeys(tree for tree in trees if depth(tree) <= MAX_TREE_DEPTH))


_cached_readings = lru_cache(maxsize=4096)(_readings)


def _one_reading(tokens: tuple[Token, ...], unit_letters: bool) -> list[Node]:
    try:
        option = option_of(tokens)
        if option is not None:
            letter, behind_letter = option
            inner = _one_reading(behind_letter, unit_letters)
            return [Node("option", tuple(inner[:1]), letter)]
        return [base_numeral(tokens) or phrase(tokens) or Parser(tokens, unit_letters).answer()]
    except (Unread, RecursionError):
        return []
