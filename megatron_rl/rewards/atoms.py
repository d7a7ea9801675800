r"""Reads the parts of an expression that do not depend on their neighbours: numbers, names, commands, brackets."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from megatron_rl.rewards import units
from megatron_rl.rewards.latex import COMMON_WORDS, FUNCTIONS, Token, Unread, synonyms, words
from megatron_rl.rewards.tree import Node, Number, exact, number, replaced, walk
from megatron_rl.rewards.units import MAX_DEPTH, UnitCursor

MAX_DIGITS = 2000

_ALIASES = synonyms(
    "asin→arcsin acos→arccos atan,arctg→arctan sgn→sign tg→tan ctg→cot arcctg→arccot arsinh→arcsinh arcosh→arccosh "
    "artanh→arctanh"
)
_ACCENTS = frozenset(words(
    "overline vec hat tilde dot ddot overleftrightarrow overarc widearc wideparen arc triangle angle "
    "measuredangle odot bigtriangleup square parallelogram underleftarrow check acute grave breve"
))  # fmt: skip
_GREEK = frozenset(words(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell hbar aleph partial nabla star complement"
))  # fmt: skip
_ENVIRONMENTS = frozenset(words(
    "aligned align gathered gather split eqnarray multline cases array matrix pmatrix bmatrix Bmatrix smallmatrix "
    "psmallmatrix"
))  # fmt: skip
RELATIONS = frozenset(["=", "<", ">", "<=", ">=", "!=", "≈", "≡", "∈", "∉"])
_IF = ("if", "for", "when", "where", "on")
_INFINITY = Node("constant", value="infinity")
_CONSTANTS = {"pi": Node("constant", value="pi"), "emptyset": Node("empty"), "ldots": Node("name", value="ldots")}
_CONSTANTS |= dict.fromkeys(("infty", "infinity", "inf", "oo"), _INFINITY)
_ALONE = ("matrix", "union", "list", "add", "mul", "div")  # what square brackets around it only group


class AtomParser(UnitCursor):
    """Reads numbers, names, commands and brackets. The subclass reads the content of brackets."""

    def _atom(self) -> Node:
        token, context = self._next(), self._context
        if token.kind == "number":
            return self._mixed(token)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unread("brackets are nested too deep")
        node = self._letters(token) if token.kind == "letters" else self._nested(token)
        self._depth -= 1
        self._context = context
        return node

    def _nested(self, token: Token) -> Node:
        if token.text in units.CURRENCIES:
            return self._money(units.CURRENCIES[token.text])
        if token.kind == "command":
            return self._command(token.text[1:])
        if token.text in ("(", "[", "]", r"\{"):
            return self._brackets(token.text)
        if token.text == "{":
            return self._group()
        if token.text == "|":
            return self._bars("|")
        raise Unread(f"{token.text} begins no value")

    def _money(self, currency: units.Unit) -> Node:
        """The amount behind a sign of currency: ``\$3``, ``\$3\text{ per hour}``, ``\$3 dollars``."""
        node = self._factor()
        while self._take("*"):
            node = Node("mul", (node, self._factor()))
        while (behind := self._behind(node)) is not None and behind.kind != "quantity":
            node = behind
        if behind is not None and behind.value not in (currency, units.COUNT):
            raise Unread("two units")
        return Node("quantity", (behind.args[0] if behind else node,), self._per(currency))

    def _number(self, token: Token) -> Node:
        return Node("number", value=read_number(token.text))

    def _mixed(self, token: Token) -> Node:
        r"""``3\frac12`` and ``3 1/2`` are sums; a lone number is itself."""
        node = self._number(token)
        if not token.text.isdigit():
            return node
        top, start = self._peek(), self._position
        if top.text == r"\frac":
            part = self._atom()
        elif top.kind == "number" and top.space and self._text_at(1) == "/":
            self._position += 2
            part = Node("div", (self._number(top), self._atom()))
        else:
            return node
        digits = [arg.value for arg in part.args]
        whole = all(isinstance(digit, Number) and digit.places is None for digit in digits)
        if whole and 0 < digits[0].value < digits[1].value:
            return number(node.value.value + digits[0].value / digits[1].value)
        self._position = start
        return node

    def _letters(self, token: Token) -> Node:
        run = token.text
        if run in units.CURRENCIES:
            return self._money(units.CURRENCIES[run])
        if run in _CONSTANTS:
            return _CONSTANTS[run]
        if run == "sqrt" or run in FUNCTIONS:
            return self._command(run)
        if len(run) > 1 and (token.roman or run in COMMON_WORDS):
            raise Unread(f"the word {run} in an expression")
        self._position -= 1
        return self._name(self._first().text)

    def _name(self, text: str) -> Node:
        """A variable with its subscript and primes, or a constant; ``f(…)`` is the value of an unknown function."""
        bare = text
        while self._at("_", "'"):
            if self._next().text == "'":
                text += "'"
            else:
                text += "_" + self._spelled_argument()
        if text in ("e", "i"):
            return Node("constant", value=text)
        if bare in "fghFGH" and self._at("("):
            self._position += 1
            inside = self._brackets("(")
            return Node("call", inside.args if inside.kind == "tuple" else (inside,), text)
        return Node("name", value=text)

    def _spelled_argument(self) -> str:
        """The subscript or accented letters, as text."""
        if not self._at("{"):
            token = self._peek()
            token = self._next() if token.kind == "number" else self._first()
            if token.kind == "sign":
                raise Unread("a sign as subscript")
            return token.text
        self._position += 1
        parts, depth = [], 1
        while True:
            token = self._next()
            depth += (token.text == "{") - (token.text == "}")
            if depth == 0:
                return "".join(parts)
            parts.append(token.text)

    def _command(self, name: str) -> Node:
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        if name in ("frac", "binom"):
            args = self._argument(), self._argument()
            return Node("div", args) if name == "frac" else Node("call", args, "binom")
        if name == "sqrt":
            index = number(2)
            if self._take("["):
                index = self._sum()
                self._expect("]")
            return Node("root", (self._argument(), index))
        if name == "langle":
            return self._brackets(r"\langle")
        if name in ("lvert", "lfloor", "lceil"):
            return self._bars(rf"\r{name[1:]}")
        if name in "RZNQC":
            while self._at("^", "_"):  # `\mathbb{Z}^+`, `\mathbb{R}_{>0}`
                sign = self._next().text
                name += sign + (self._next().text if self._at("+", "-", "*") else self._spelled_argument())
            return Node("domain", value=name)
        if name in FUNCTIONS:
            return self._function(_ALIASES.get(name, name))
        if name in _ACCENTS:
            letters = self._spelled_argument()
            if name in ("hat", "vec") and letters in ("i", "j", "k"):  # a unit vector in any type
                return Node("constant" if letters == "i" else "name", value=letters)
            return Node("name", value=f"{name} {letters}")
        if name == "begin":
            return self._environment()
        if name in ("sum", "prod", "int"):
            return self._bound(name)
        if name in _GREEK:
            return self._name(rf"\{name}")
        raise Unread(f"the command {name}")

    def _argument(self) -> Node:
        r"""An argument as TeX takes it: a group, one digit, one letter or one command."""
        if self._peek().kind not in ("number", "letters"):
            return self._atom()
        token = self._first()
        if token.kind == "number":
            return self._number(token)
        return Node("constant" if token.text in "ei" else "name", value=token.text)

    def _first(self) -> Token:
        """Take one letter or digit of those at hand, or another token."""
        token = self._next()
        if len(token.text) > 1 and (token.text.isdigit() or (token.kind == "letters" and not token.roman)):
            pieces = token.text if token.kind == "letters" else (token.text[0], token.text[1:])
            self._tokens[self._position - 1 : self._position] = [replace(token, text=piece) for piece in pieces]
        return self._tokens[self._position - 1]

    def _function(self, name: str) -> Node:
        r"""``\sin x``, ``\sin^2 x``, ``\log_2 8``, ``\log(x+1)``, ``\max(a, b)``."""
        power = base = None
        while self._at("^", "_"):
            if self._next().text == "^":
                power = self._exponent()
            else:
                base = self._argument()
        inside = self._atom() if self._at("(", "{") else self._bare_argument()
        args = inside.args if inside.kind == "tuple" else (inside,)
        if name == "exp":
            node = Node("pow", (Node("constant", value="e"), args[0]))
        elif name in ("log", "ln", "lg"):
            base = base or {"ln": Node("constant", value="e"), "lg": number(10)}.get(name)
            node = Node("call", (args[0], base) if base else args, "log")
        elif base is None:
            node = Node("call", args, name)
        else:
            raise Unread(f"{name} with an index")
        if power is not None and exact(power) == -1 and f"arc{name}" in FUNCTIONS:
            return Node("call", args, f"arc{name}")
        return Node("pow", (node, power)) if power is not None else node

    def _bare_argument(self) -> Node:
        """The product without signs that follows a function: ``2x`` of ``\\sin 2x\\cos x``."""
        node = self._power()
        while self._starts_factor() and not self._at("(", "["):
            token = self._peek()
            if token.text.removeprefix("\\") in FUNCTIONS or (token.kind == "letters" and token.roman):
                break
            node = Node("mul", (node, self._power()))
        return node

    # Brackets.

    def _group(self) -> Node:
        self._context = ""
        node = self._items_over()
        self._expect("}")
        return node

    def _items_over(self) -> Node:
        r"""Items, or two with ``\over`` or ``\choose`` between them."""
        node = self._items()
        if self._take(r"\over"):
            return Node("div", (node, self._items()))
        return Node("call", (node, self._items()), "binom") if self._take(r"\choose") else node

    def _bars(self, closing: str) -> Node:
        self._context = "bars" if closing == "|" else ""
        inside = self._side()
        self._expect(closing)
        return Node("call", (inside,), {r"\rfloor": "floor", r"\rceil": "ceil"}.get(closing, "abs"))

    def _brackets(self, opening: str) -> Node:
        r"""The bracket that was opened: a group, tuple, interval, set or set builder."""
        is_set = opening == r"\{"
        self._context = "set" if is_set else "french" if opening == "]" else ""
        items = []
        if not self._at(r"\}"):
            items.append(self._item())
        if is_set and items and self._take("|", ":", "∣"):
            self._context = ""
            condition = self._items()
            self._expect(r"\}")
            return Node("builder", (items[0], condition))
        while self._take(",", ";"):
            items.append(self._item())
        closing = self._next().text
        if is_set and closing == r"\}":
            return Node("set", tuple(items)) if items else Node("empty")
        brackets = {"]": "(", r"\langle": "("}.get(opening, opening) + {"[": ")", r"\rangle": ")"}.get(closing, closing)
        if brackets not in ("()", "(]", "[)", "[]"):
            raise Unread("a bracket is not closed")
        if len(items) == 1 and (brackets == "()" or items[0].kind in _ALONE):
            return items[0]
        rows = {(item.kind, item.value, len(item.args)) for item in items}
        if len(rows) == 1 and brackets == "[]" and items[0].kind == "tuple" and items[0].value == "[]":
            return Node("matrix", tuple(cell for item in items for cell in item.args), len(items[0].args))
        return Node("tuple", tuple(items), brackets)

    def _environment(self) -> Node:
        """A matrix, values with their conditions, or a list of formulas."""
        name = self._spelled_argument()
        if name.rstrip("*") not in _ENVIRONMENTS:
            raise Unread(f"the environment {name}")
        if name == "array" and self._at("{"):
            self._spelled_argument()
        self._join_rows()
        self._context, self._rows = "", self._rows + 1
        rows: list[list[Node]] = [[]]
        while not self._take(r"\end"):
            if self._take(r"\\"):
                rows.append([])
            elif not self._take("&", ",", ";", ".") and not self._take_word(*_IF):
                rows[-1].append(self._items() if name == "cases" and rows[-1] else self._item())
        self._rows -= 1
        rows = [row for row in rows if row]
        if self._spelled_argument() != name or not rows:
            raise Unread("an environment is not closed")
        cells = tuple(cell for row in rows for cell in row)
        if name == "cases" and not any(len(row) != 2 or row[0].kind == "relation" for row in rows):
            return Node("cases", tuple(Node("case", tuple(row)) for row in rows))
        if len(cells) == 1:
            return cells[0]
        if "matrix" not in name and (name != "array" or any(cell.kind == "relation" for cell in cells)):
            return Node("list", cells)
        if any(len(row) != len(rows[0]) for row in rows):
            raise Unread("rows of unequal length")
        return Node("matrix", cells, len(rows[0]))

    def _join_rows(self) -> None:
        """Let a row that begins with a sign such as "=" go on with what stands before it."""
        end = next((k for k, t in enumerate(self._tokens) if k >= self._position and t.text == r"\end"), None)
        kept: list[Token] = []
        for token in reversed(self._tokens[self._position : end]):
            if token.text not in ("&", r"\\") or not kept or kept[-1].text not in RELATIONS:
                kept.append(token)
        while kept and kept[-1].text == "=":
            kept.pop()
        self._tokens[self._position : end] = kept[::-1]

    # Sums and integrals: the bound variable has no name.

    def _bound(self, name: str) -> Node:
        low = high = variable = None
        for _ in range(2):
            if self._take("_"):
                low = self._argument()
            elif self._take("^"):
                high = self._exponent()
        if name == "int":
            variable = self._name(self._differential())
            body = self._sum()
            self._expect("differential")
        else:
            if low is None or low.kind != "relation" or low.value != ("=",) or low.args[0].args:
                raise Unread("a sum without its variable")
            (variable, low), body = low.args, self._product()
        nested = 1 + max((part.value for part in walk(body) if part.kind == "bound"), default=0)
        body = replaced(body, variable, Node("bound", value=nested))
        if low is None or high is None:
            raise Unread("an integral without ends")
        return Node("call", (low, high, body), name)

    def _differential(self) -> str:
        """Put a sign in the place of ``dx``, the next one, and return the variable."""
        for at in range(self._position, len(self._tokens)):
            letters = self._tokens[at].text if self._tokens[at].kind == "letters" else ""
            if letters[-2:-1] == "d" or (letters[-1:] == "d" and at + 1 < len(self._tokens)):
                variable = letters[-1] if letters[-2:-1] == "d" else self._tokens[at + 1].text
                factors = letters[:-2] if letters[-2:-1] == "d" else letters[:-1]
                size = 1 if letters[-2:-1] == "d" else 2
                self._tokens[at : at + size] = [*(Token("letters", x) for x in factors), Token("sign", "differential")]
                return variable
        raise Unread("an integral without its variable")


def read_number(text: str) -> Number:
    """The value of a number token."""
    if len(text) > MAX_DIGITS:
        raise Unread("too many digits")
    if "(" in text:
        digits, _, block = text[:-1].partition("(")
        integer_digits, _, places = digits.partition(".")
        shift = 10 ** len(places)
        repeated = Fraction(int(block), (10 ** len(block) - 1) * shift)
        return Number(Fraction(int((integer_digits + places) or "0"), shift) + repeated)
    mantissa, mark, exponent = text.lower().partition("e")
    if mark and abs(int(exponent)) > MAX_DIGITS:
        raise Unread("an exponent is too large")
    value = Fraction(mantissa) * Fraction(10) ** int(exponent or 0)
    integer_digits, point, places = mantissa.partition(".")
    shown = len(places) - int(exponent or 0) if point else 0
    significant = len((integer_digits + places).lstrip("0"))
    return Number(value, shown if point and places and shown > 0 else None, significant)
