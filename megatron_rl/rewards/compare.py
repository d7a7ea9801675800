r"""Compares two answers: their shape here, the expressions inside by exact values or `Algebra`.

Answers that cannot be read completely are equal only if they consist of the same tokens. Answers that differ have
different trees: ``(1,2)`` and ``(2,1)``, ``[0,1)`` and ``[0,1]``, *east* and *seat*, 5 and ``5_8``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from itertools import product

from megatron_rl.rewards import forms, tree, units
from megatron_rl.rewards.grammar import readings
from megatron_rl.rewards.latex import Unread, tokenize
from megatron_rl.rewards.phrases import known_word
from megatron_rl.rewards.sets import DESCRIBE_SETS, same_set
from megatron_rl.rewards.tree import Algebra, Node, exact, is_unfinished, negative, number, walk

_NO_SCALARS = frozenset(["list", "tuple", "set", "matrix", "relation", "domain", "empty"])
_ONE_IN_BRACES = re.compile(r"([\^_]) \{ (\S+) \}")  # `x^{4}` is `x^4`
_PI = Node("constant", value="pi")
_ORDER = ("<", ">", "<=", ">=")


@lru_cache(maxsize=1024)
def spelling(text: str) -> str:
    """Return ``text`` without layout: equal for answers that differ only in fonts and spaces."""
    try:
        return _ONE_IN_BRACES.sub(r"\1 \2", " ".join(token.text for token in tokenize(text)))
    except Unread:
        return " ".join(text.split())


def same(candidate: str, gold: str, algebra: Algebra, accept_unevaluated: bool = False) -> bool:
    r"""Return whether ``candidate`` means the same as ``gold``. Raises only what ``algebra`` raises.

    Numbers too large to be written down, such as 2024!, are compared by their remainders.
    ``accept_unevaluated``: also accept an answer with a computation left to do, such as ``12\cdot 34`` for 408.
    """
    if not spelling(candidate) or not spelling(gold):
        return False
    if spelling(candidate) == spelling(gold):
        return True
    comparison = _Comparison(algebra, accept_unevaluated)
    for ours in readings(candidate):
        for theirs in readings(gold):
            with suppress(tree.TooLarge, ValueError):
                if comparison.equal(ours, theirs):
                    return True
    return False


class _Comparison:
    def __init__(self, algebra: Algebra, accept_unevaluated: bool) -> None:
        self._algebra = algebra
        self._accept_unevaluated = accept_unevaluated

    def equal(self, ours: Node, theirs: Node) -> bool:
        if ours == theirs:
            return True
        if "option" in (ours.kind, theirs.kind):
            return self._same_option(ours, theirs)
        ours, theirs = forms.canonical(self._without_middle(ours)), forms.canonical(theirs)
        if "list" in (ours.kind, theirs.kind):
            ours, theirs = forms.without_condition(ours, theirs), forms.without_condition(theirs, ours)
        if ours == theirs:
            return True
        kinds = {ours.kind, theirs.kind}
        if kinds & {"word", "mul"} and (forms.is_word(ours) or forms.is_word(theirs)):
            return self._same_word(ours, theirs)
        if "family" in kinds:
            return self._same_family(ours, theirs)
        as_written = forms.is_score(theirs) or (forms.is_score(ours) and not self._accept_unevaluated)
        if (as_written or "based" in kinds) and "relation" not in kinds:
            return kinds == {"based"} and ours.value == theirs.value
        if kinds & DESCRIBE_SETS and not (forms.is_equation(ours) or forms.is_equation(theirs)):
            verdict = same_set(ours, theirs, self._algebra)
            if verdict is not None:
                return verdict
        if "relation" in kinds:
            return self._same_relation(ours, theirs)
        ours, theirs = forms.as_vector(forms.as_matrix(ours), theirs), forms.as_vector(forms.as_matrix(theirs), ours)
        for some, rule in self._rules:
            if ours.kind in some or theirs.kind in some:
                return rule(self, ours, theirs)
        try:
            return self._same_value(ours, theirs)
        except tree.TooLarge:
            done = tree.exact_or_none(theirs) is not None and not is_unfinished(theirs)
            return (self._accept_unevaluated or not done) and tree.remainder(ours) == tree.remainder(theirs)

    # Kinds that are compared as written.

    def _same_option(self, ours: Node, theirs: Node) -> bool:
        if ours.kind == theirs.kind:
            insides = ours.args[:1], theirs.args[:1]
            return ours.value == theirs.value and (not all(insides) or self._in_order(*insides))
        option, other = (ours, theirs) if ours.kind == "option" else (theirs, ours)
        if other.kind == "name" and len(other.value) == 1 and other.value.isupper():
            return option.value == other.value
        inside = option.args[0] if option.args else Node("word", value="")
        return self.equal(*((inside, other) if option is ours else (other, inside)))

    def _same_word(self, ours: Node, theirs: Node) -> bool:
        texts = [forms.spelled(node) for node in (ours, theirs)]
        texts = [known_word(text) if text.islower() or text.istitle() or text.isupper() else text for text in texts]
        if "" in texts:
            return "relation" in (ours.kind, theirs.kind) and self._same_relation(ours, theirs)
        return texts[0] == texts[1]

    # Collections.

    def _same_items(self, ours: Node, theirs: Node) -> bool:
        kinds = (ours.kind, theirs.kind)
        if kinds in (("list", "tuple"), ("tuple", "list")):
            items = forms.given_values(ours.args, theirs), forms.given_values(theirs.args, ours)
            return "()" in (ours.value, theirs.value) and self._in_order(*items)
        if kinds[0] == kinds[1] == "tuple":
            return ours.value == theirs.value and self._in_order(ours.args, theirs.args)
        if kinds[0] != kinds[1] and set(kinds) != {"list", "set"}:
            sides = [node.args[0] if node.kind == "set" and len(node.args) == 1 else node for node in (ours, theirs)]
            return not any(node.kind in DESCRIBE_SETS | _NO_SCALARS for node in sides) and self.equal(*sides)
        if kinds[0] in ("difference", "builder"):
            return self._in_order(ours.args, theirs.args)
        if theirs.value is None and any(map(forms.is_word, theirs.args)):
            return self._in_order(ours.args, theirs.args)  # words in a row may be an order
        return self._any_order(ours.args, theirs.args)

    def _same_matrix(self, ours: Node, theirs: Node) -> bool:
        if {ours.kind, theirs.kind} == {"matrix", "tuple"}:
            matrix, row = (ours, theirs) if ours.kind == "matrix" else (theirs, ours)
            one_line = matrix.value == 1 or matrix.value == len(matrix.args)
            return one_line and row.value in ("()", "[]") and self._in_order(ours.args, theirs.args)
        return ours.kind == theirs.kind and ours.value == theirs.value and self._in_order(ours.args, theirs.args)

    def _same_ratio(self, ours: Node, theirs: Node) -> bool:
        if ours.kind != theirs.kind:
            ratio = ours if ours.kind == "ratio" else theirs
            quotients = (Node("div", node.args) if node is ratio else node for node in (ours, theirs))
            is_number = len(ratio.args) == 2 and not ratio.value and not forms.is_time(ratio)
            return is_number and self._same_number(*quotients)
        if ours.value or theirs.value:
            return forms.minutes(ours) is not None and forms.minutes(ours) == forms.minutes(theirs)
        if len(ours.args) != len(theirs.args):
            return False
        if self._in_order(ours.args, theirs.args):
            return True
        parts = [exact(arg) for node in (ours, theirs) for arg in node.args]
        if forms.is_time(theirs) or any(value is not None and value <= 0 for value in parts):
            return False
        products = [Node("mul", pair) for pair in product(ours.args[1:], theirs.args[:1])]
        return all(map(self._same_scalar, products, [Node("mul", p) for p in product(theirs.args[1:], ours.args[:1])]))

    def _same_cases(self, ours: Node, theirs: Node) -> bool:
        """Compare values with their conditions; one condition on a side may be "otherwise"."""
        if ours.kind != theirs.kind or len(ours.args) != len(theirs.args):
            return False
        left, open_cases = list(theirs.args), 0
        for value, condition in (case.args for case in ours.args):
            alike = [other for other in left if self.equal(value, other.args[0])]
            partner = next((other for other in alike if self.equal(condition, other.args[1])), None)
            if partner is None:
                open_cases += 1
                partner = next((o for o in alike if "otherwise" in (condition.value, o.args[1].value)), None)
            if partner is None or open_cases > 1:
                return False
            left.remove(partner)
        return True

    def _same_family(self, ours: Node, theirs: Node) -> bool:
        """Compare ``a+k\\pi, k\\in\\mathbb{Z}`` with its like, or with an expression with a name such as n."""
        if "list" in (ours.kind, theirs.kind):
            return ours.kind == theirs.kind and self._any_order(ours.args, theirs.args)
        domains = [node.args[1] for node in (ours, theirs) if node.kind == "family"]
        if len(domains) == 2 and not self.equal(*domains):
            return False
        value, their_value = forms.without_head(*(n.args[0] if n.kind == "family" else n for n in (ours, theirs)))
        own = [{node.value} if node.kind == "family" else tree.names_in(node) & set("kmnlj") for node in (ours, theirs)]
        if [len(names) for names in own] != [1, 1]:
            return False
        old, new = (Node("name", value=name) for names in own for name in names)
        shifts = (0, 1, -1, 2, -2) if all(domain.value == "Z" for domain in domains) else ()
        shifted = [new, *(Node("add", (k, number(shift))) for k in (new, negative(new)) for shift in shifts)]
        shapes = [(node.kind, node.value, len(node.args)) for node in (value, their_value)]
        is_row = shapes[0] == shapes[1] and value.kind in ("tuple", "relation")
        pairs = list(zip(value.args, their_value.args)) if is_row else [(value, their_value)]
        return any(all(self._algebra.equal(tree.replaced(one, old, k), two) for one, two in pairs) for k in shifted)

    def _same_congruence(self, ours: Node, theirs: Node) -> bool:
        if ours.kind != theirs.kind or not self.equal(ours.args[-1], theirs.args[-1]):
            return False
        if len(ours.args) == len(theirs.args) == 3 and not self.equal(ours.args[0], theirs.args[0]):
            return False
        residues, modulus = [exact(node.args[-2]) for node in (ours, theirs)], exact(theirs.args[-1])
        if None in residues or not modulus:
            return self.equal(ours.args[-2], theirs.args[-2])
        return (residues[0] - residues[1]) % modulus == 0

    def _in_order(self, ours: Sequence[Node], theirs: Sequence[Node]) -> bool:
        return len(ours) == len(theirs) and all(map(self.equal, ours, theirs))

    def _any_order(self, ours: Sequence[Node], theirs: Sequence[Node]) -> bool:
        if len(ours) != len(theirs) or len(ours) > forms.MAX_ITEMS:
            return False
        left = list(ours)
        for gold in theirs:
            partner = next((k for k, item in enumerate(left) if self.equal(item, gold)), None)
            if partner is None:
                return False
            del left[partner]
        return True

    _rules: tuple[tuple[frozenset[str], Callable], ...] = (
        (frozenset(["ratio"]), _same_ratio),
        (frozenset(["congruence"]), _same_congruence),
        (frozenset(["matrix"]), _same_matrix),
        (frozenset(["cases"]), _same_cases),
        (DESCRIBE_SETS | {"list", "tuple", "set"}, _same_items),
    )

    # Relations.

    def _without_middle(self, node: Node) -> Node:
        """``x = 10-3 = 7`` as ``x = 7`` where all sides behind the first are equal."""
        if node.kind != "relation" or len(node.args) < 3 or set(node.value) != {"="}:
            return node
        first, *middle, last = node.args
        # a side in other letters is a formula for the last: `a^2+b^2=(a+b)^2-2ab=25`
        if not all(tree.names_in(side) - tree.names_in(last) or self._loosely_equal(side, last) for side in middle):
            return node
        is_formula = not forms.names_something(first) and tree.names_in(first) and self._loosely_equal(middle[0], first)
        return Node("relation", (forms.DOTS if is_formula else first, last), ("=",))

    def _loosely_equal(self, ours: Node, theirs: Node) -> bool:
        """Whether two sides are equal, whatever ``ours`` leaves to compute."""
        return _Comparison(self._algebra, True).equal(ours, theirs)

    def _same_relation(self, ours: Node, theirs: Node) -> bool:
        """Compare two relations, or a value with ``name = value`` on either side."""
        if ours.kind == theirs.kind:
            theirs = forms.exactly(theirs)
            for relation in (forms.exactly(ours), forms.turned(forms.exactly(ours))):
                if relation.value == theirs.value == ("=",):
                    return self._same_equation(forms.name_first(relation).args, forms.name_first(theirs).args)
                if relation.value == theirs.value and self._in_order(relation.args, theirs.args):
                    return True
                if relation.value == theirs.value and len(theirs.value) == 1 and theirs.value[0] in _ORDER:
                    return self._same_difference(relation, theirs)
            return False
        if theirs.kind == "relation":
            *left, value = forms.name_first(theirs).args
            named = all(forms.names_something(side) or not tree.names_in(side) for side in left)
            return named and set(theirs.value) <= {"=", "≈"} and self.equal(ours, value)
        if any(sign not in ("=", "≈") for sign in ours.value):
            return False
        chain = forms.name_first(ours)
        *left, value = chain.args
        if chain.value[-1] == "≈" and not forms.names_something(left[-1]):
            near, rounded = self._algebra.value(left[-1]), self._algebra.value(value)
            if None in (near, rounded) or abs(near - rounded) > abs(near) / 100:
                return False
            *left, exact_value = left
            value = value if self.equal(value, theirs) else exact_value
        return self.equal(value, theirs) and all(
            forms.names_something(side) or forms.DOTS in walk(side) or self._loosely_equal(side, value) for side in left
        )

    def _same_difference(self, ours: Node, theirs: Node) -> bool:
        differences = (Node("add", (node.args[0], negative(node.args[1]))) for node in (ours, theirs))
        return self._algebra.same_solutions(*differences, inequality=ours.value != ("=",))

    def _same_equation(self, ours: Sequence[Node], theirs: Sequence[Node]) -> bool:
        heads = ours[0], theirs[0]
        if all(head.kind in ("name", "word", "tuple") or tree.is_unknown(head) for head in heads):
            ours, heads = forms.with_argument_of(ours, theirs)
            one_is_y = {head.kind for head in heads} == {"name", "call"} and "y" in (heads[0].value, heads[1].value)
            if heads[0] == heads[1] or one_is_y:
                return self.equal(ours[1], theirs[1])
        return self._same_difference(*(Node("relation", tuple(both), ("=",)) for both in (ours, theirs)))

    # Values.

    def _same_value(self, ours: Node, theirs: Node) -> bool:
        (ours, our_unit), (theirs, their_unit) = forms.split_unit(ours), forms.split_unit(theirs)
        found = [unit for unit in (our_unit, their_unit) if unit and unit.dimensions]
        if found and "percent" in (ours.kind, theirs.kind):
            return False
        if len(found) == 1 and found[0].dimensions[0][0].startswith("groups"):
            return False  # `6 pairs` are not 6
        sides = (ours, our_unit), (theirs, their_unit)
        radians = [Node("quantity", (node,), unit) if unit == units.DEGREE else node for node, unit in sides]
        if len(found) == 2:
            if {our_unit, their_unit} == {units.DEGREE, units.RADIAN}:
                return self._same_number(*radians)
            same = our_unit.dimensions == their_unit.dimensions
            return same and self._same_number(ours, theirs, our_unit.factor / their_unit.factor)
        if self._same_number(ours, theirs):
            return True
        plain_number = theirs if our_unit else ours  # 60° is \pi/3
        return units.DEGREE in found and _PI in walk(plain_number) and self._same_number(*radians)

    def _same_number(self, ours: Node, theirs: Node, factor: Fraction = Fraction(1)) -> bool:
        """Whether two scalars are equal; ``factor``: of our unit in terms of theirs."""
        ours_percent, theirs_percent = ours.kind == "percent", theirs.kind == "percent"
        ours, theirs = (node.args[0] if node.kind == "percent" else node for node in (ours, theirs))
        if ours_percent != theirs_percent and factor == 1:
            percent, bare = (ours, theirs) if ours_percent else (theirs, ours)
            hundredfold = tree.exact_or_none(Node("mul", (number(100), bare)))
            if hundredfold is not None and tree.exact_or_none(percent) == hundredfold:
                return not self._refused(ours, theirs)
        if self._refused(ours, theirs):
            return False
        scaled = ours if factor == 1 else Node("mul", (number(factor), ours))
        return self._same_scalar(scaled, theirs)

    def _refused(self, ours: Node, theirs: Node) -> bool:
        """Return whether ``ours`` leaves a computation undone that ``theirs`` has done."""
        return not self._accept_unevaluated and is_unfinished(ours) and not is_unfinished(theirs)

    def _same_scalar(self, ours: Node, theirs: Node) -> bool:
        if ours.kind in _NO_SCALARS or theirs.kind in _NO_SCALARS:
            return False
        our_value, their_value = exact(ours), exact(theirs)
        if our_value is not None and their_value is not None:
            decimals = [tree.plain(node) for node in (ours, theirs)]
            shown = [decimal is not None and decimal.places is not None for decimal in decimals]
            if our_value == their_value or all(shown):
                return our_value == their_value
            return tree.rounds_to(their_value, decimals[0]) or tree.rounds_to(our_value, decimals[1])
        if tree.names_in(ours) or tree.names_in(theirs):
            if any(self._algebra.equal(*pair) for pair in forms.up_to_constants(ours, theirs)):
                return True
            return all(_PI in walk(node) for node in (ours, theirs)) and self._same_family(ours, theirs)
        if our_value is not None or their_value is not None:  # the other has roots, functions or constants in it
            rational, other = (ours, theirs) if their_value is None else (theirs, ours)
            written = tree.plain(rational)
            if written is not None and written.places is not None and written.significant >= tree.MIN_ROUNDED_DIGITS:
                value = self._algebra.value(other)
                return value is not None and (tree.rounds_to(value, written) or value == written.value)
            if rational is theirs and not self._accept_unevaluated and not is_unfinished(theirs):
                return False  # `e^{\ln 5}` for 5: a rational value must be written as a rational number
        return self._algebra.equal(ours, theirs)
