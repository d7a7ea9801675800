"""The position in an answer's tokens, and the reading of units there."""

from __future__ import annotations

from megatron_rl.rewards import units
from megatron_rl.rewards.latex import Token, Unread
from megatron_rl.rewards.tree import Node, number

MAX_DEPTH = 40  # of brackets and arguments


class Cursor:
    """Takes tokens one by one. ``unit_letters``: a single letter in roman type may be a unit."""

    def __init__(self, tokens: tuple[Token, ...], unit_letters: bool = True) -> None:
        self._tokens = list(tokens)
        self._position = 0
        self._depth = 0
        self._unit_letters = unit_letters

    def _peek(self, ahead: int = 0) -> Token | None:
        at = self._position + ahead
        return self._tokens[at] if at < len(self._tokens) else None

    def _at(self, *texts: str) -> bool:
        token = self._peek()
        return token is not None and token.kind != "letters" and token.text in texts

    def _take(self, *texts: str) -> bool:
        count = self._at(*texts)
        self._position += count
        return count

    def _expect(self, text: str) -> None:
        if not self._take(text):
            raise Unread(f"{text} is missing")

    def _next(self) -> Token:
        token = self._peek()
        if token is None:
            raise Unread("the answer ends early")
        self._position += 1
        return token

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unread("brackets are nested too deep")

    def _word_at(self, ahead: int = 0) -> str:
        token = self._peek(ahead)
        return token.text.lower() if token is not None and token.kind == "letters" else ""

    def _text_at(self, ahead: int = 0) -> str:
        token = self._peek(ahead)
        return token.text if token is not None else ""

    def _words_from(self, start: int) -> list[Token]:
        """The run of letter tokens that begins at ``start``."""
        end = start
        while end < len(self._tokens) and self._tokens[end].kind == "letters":
            end += 1
        return self._tokens[start:end]


class UnitCursor(Cursor):
    """Reads what follows a value: a percent sign, a number word, a unit, or counted things."""

    def _behind(self, node: Node) -> Node | None:
        """Return ``node`` with the percent sign, number word or unit that follows it; None if none follows."""
        if self._take("%"):
            return Node("percent", (node,))
        word = self._word_at()
        if word in ("percent", "percents"):
            self._position += 1
            return Node("percent", (node,))
        if word in units.MULTIPLIERS:
            self._position += 1
            if node.kind == "number":
                return number(node.value.value * units.MULTIPLIERS[word])
            return Node("mul", (node, number(units.MULTIPLIERS[word])))
        if node.kind in ("quantity", "name", "word", "tuple", "set", "matrix"):
            return None
        if word in ("am", "pm") and self._position > 1 and self._tokens[self._position - 2].text == ":":
            return None
        unit = self._unit()
        return Node("quantity", (node,), unit) if unit is not None else None

    def _unit(self) -> units.Unit | None:
        """Take a unit: words and signs of units, with powers, ``/`` and "per" between them; or things counted."""
        start = self._position
        unit = self._unit_product()
        if unit is None:
            self._position = start
            return self._counted()
        while self._take("/") or self._take_word("per"):
            bracket = self._take("(")
            below = self._unit_product()
            if below is None:
                raise Unread("a unit ends with a division")
            if bracket:
                self._expect(")")
            unit = unit.times(below, -1)
        substance = self._words_from(self._position + 1)
        if self._word_at() == "of" and units.is_substance([token.text for token in substance]):
            self._position += 1 + len(substance)
        return unit

    def _unit_product(self) -> units.Unit | None:
        """Take consecutive units; None if there is none."""
        total = None
        while True:
            lead = units.LEADING_POWERS.get(self._word_at(), 0)
            ahead = (1 + (self._text_at(1) == ".")) if lead else 0
            unit, width = self._unit_word(ahead)
            if unit is None:
                return total
            self._position += ahead + width
            if self._text_at(1) != "m":  # not the dot of "p.m."
                self._take(".")
            total = (total or units.Unit()).times(unit, (lead or 1) * self._unit_power())
            if self._at("*") and self._unit_word(1)[0] is not None:
                self._position += 1

    def _take_word(self, word: str) -> bool:
        is_next = self._word_at() == word
        self._position += is_next
        return is_next

    def _unit_word(self, ahead: int) -> tuple[units.Unit | None, int]:
        """The unit at a token, and how many tokens spell it: ``\\mu\\text{m}`` takes two."""
        token = self._peek(ahead)
        if token is None:
            return None, 0
        if token.kind == "command" and token.text in (r"\mu", r"\Omega"):
            follows = self._peek(ahead + 1)
            if token.text == r"\Omega":
                return units.unit_of("Ω", True), 1
            unit = units.unit_of("μ" + follows.text, True) if follows and follows.kind == "letters" else None
            return unit, 2
        if token.kind == "sign" and token.text == "°":
            return units.DEGREE, 1
        follows = self._peek(ahead + 1)
        if token.kind == "letters" and follows is not None and follows.text == r"\Omega":
            return units.unit_of(token.text + "Ω", True), 2
        if token.kind != "letters" or (len(token.text) == 1 and not (token.roman and self._unit_letters)):
            return None, 0
        if not (token.roman or units.may_stand_bare(token.text) or (token.space and self._unit_letters)):
            return None, 0
        return units.unit_of(token.text, token.roman), 1

    def _unit_power(self) -> int:
        """The power behind a unit: ``^2``, ``^{-1}``, "squared"."""
        for word in ("squared", "cubed"):
            if self._take_word(word):
                return 2 if word == "squared" else 3
        if not self._take("^"):
            return 1
        braced, sign = self._take("{"), -1 if self._take("-") else 1
        token = self._next()
        if braced:
            self._expect("}")
        if token.kind != "number" or len(token.text) != 1 or not token.text.isdigit():
            raise Unread("the power of a unit is no digit")
        return sign * int(token.text)

    def _counted(self) -> units.Unit | None:
        """Take words that name what was counted, up to the end of the item."""
        words = []
        for token in self._words_from(self._position):
            if token.text in ("or", "and") or not (token.roman or (token.space and len(token.text) > 2)):
                break
            words.append(token.text)
        end = self._text_at(len(words))
        if end not in ("", ",", ";", ")", "or", "and", "}") or not units.is_counted(words):
            return None
        self._position += len(words)
        return units.COUNT
