"""Units of measure, the words that may follow a number without changing it, and the reading of both in an answer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

from megatron_rl.rewards.latex import COMMON_WORDS, FUNCTIONS, Token, Unread, words
from megatron_rl.rewards.tree import Node, number

Dimensions = tuple[tuple[str, int], ...]

_BARE_SIGNS = frozenset(
    words("cm mm km kg ft in mL ml min hr hrs sec yd lb lbs oz kJ kW Hz kHz MHz GHz mph kph kmh deg")
)


@dataclass(frozen=True)
class Unit:
    """``factor`` times a product of powers of base units. A noun that is counted is a base; "units" has none."""

    factor: Fraction = Fraction(1)
    dimensions: Dimensions = ()

    def times(self, other: Unit, power: int = 1) -> Unit:
        powers = dict(self.dimensions)
        for base, exponent in other.dimensions:
            powers[base] = powers.get(base, 0) + exponent * power
        nonzero = tuple(sorted((base, exponent) for base, exponent in powers.items() if exponent))
        return Unit(self.factor * other.factor**power, nonzero)


_PREFIXES = (  # sign, word, power of ten
    ("", "", 0), ("T", "tera", 12), ("G", "giga", 9), ("M", "mega", 6), ("k", "kilo", 3), ("h", "hecto", 2),
    ("d", "deci", -1), ("c", "centi", -2), ("m", "milli", -3), ("μ", "micro", -6), ("n", "nano", -9),
    ("p", "pico", -12),
)  # fmt: skip

# sign, words, factor and base units with powers: those that take prefixes
_METRIC = (
    ("m", "meter metre", 1, "m"), ("g", "gram gramme", 1, "g"), ("s", "second", 1, "s"), ("K", "kelvin", 1, "K"),
    ("A", "ampere amp", 1, "A"), ("mol", "mole", 1, "mol"), ("L", "liter litre", "1e-3", "m3"),
    ("l", "", "1e-3", "m3"), ("N", "newton", 1000, "g m s-2"), ("J", "joule", 1000, "g m2 s-2"),
    ("W", "watt", 1000, "g m2 s-3"), ("Pa", "pascal", 1000, "g m-1 s-2"), ("Hz", "hertz", 1, "s-1"),
    ("C", "coulomb", 1, "A s"), ("V", "volt", 1000, "g m2 s-3 A-1"), ("Ω", "ohm", 1000, "g m2 s-3 A-2"),
    ("F", "farad", "1e-3", "A2 s4 g-1 m-2"), ("T", "tesla", 1000, "g s-2 A-1"), ("Wb", "weber", 1000, "g m2 s-2 A-1"),
    ("H", "henry", 1000, "g m2 s-2 A-2"), ("eV", "", 1, "eV"), ("bar", "", 100000000, "g m-1 s-2"),
    ("pc", "parsec", 1, "pc"), ("cal", "calorie", "4184", "g m2 s-2"), ("B", "byte", 8, "bit"),
)  # fmt: skip
# sign or words, factor, base units with powers; a pound of money is one of weight, for "pounds" are either
_OTHER = (
    ("degree degrees deg degs", 3600, "arcsec"), ("arcmin arcminute arcminutes", 60, "arcsec"),
    ("arcsec arcseconds", 1, "arcsec"), ("rad radian radians", 1, "radian"),
    ("cent cents ¢", 1, "cent"), ("dollar dollars usd buck bucks", 100, "cent"), ("euro euros eur", 1, "euro"),
    ("gbp quid", "453.59237", "g"), ("pence penny", "4.5359237", "g"), ("yen jpy", 1, "yen"),
    ("yuan rmb cny", 1, "yuan"), ("rupee rupees", 1, "rupee"),
    ("in inch inches", "0.0254", "m"), ("ft foot feet", "0.3048", "m"), ("yd yard yards", "0.9144", "m"),
    ("mi mile miles", "1609.344", "m"), ("min mins minute minutes", 60, "s"), ("sec secs", 1, "s"),
    ("h hr hrs hour hours", 3600, "s"), ("day days", 86400, "s"), ("week weeks wk wks", 604800, "s"),
    ("month months", 1, "month"), ("year years yr yrs", 12, "month"), ("lb lbs pound pounds", "453.59237", "g"),
    ("oz ounce ounces", "28.349523125", "g"), ("ton tons", 1, "ton"), ("tonne tonnes", 1000000, "g"),
    ("acre acres", "4046.8564224", "m2"), ("hectare hectares ha", 10000, "m2"),
    ("gal gallon gallons", 8, "pint"), ("qt qts quart quarts", 2, "pint"), ("pt pts pint pints", 1, "pint"),
    ("cup cups", "1/2", "pint"), ("cc ccs", "1e-6", "m3"),
    ("atm", 101325000, "g m-1 s-2"), ("celsius", 1, "celsius"), ("fahrenheit", 1, "fahrenheit"),
    ("erg ergs", 1, "erg"), ("dyne dynes dyn", 1, "dyne"), ("angstrom angstroms Å", "1e-10", "m"),
    ("ly", 1, "light year"), ("AU au", 1, "au"), ("rpm", 1, "rpm"), ("kn knot knots", 1, "knot"),
    ("bit bits", 1, "bit"), ("M", 1000, "mol m-3"), ("rev revs revolution revolutions", 1, "rev"), ("amu", 1, "amu"),
    ("G gauss", 1, "gauss"), ("kWh", 3600000000, "g m2 s-2"), ("kph kmh", "5/18", "m s-1"), ("mph", "0.44704", "m s-1"),
)  # fmt: skip


def _unit(factor: str | int | Fraction, bases: str) -> Unit:
    powers = [re.fullmatch(r"([^\d-]+)(-?\d*)", part) for part in ([bases] if bases == "light year" else bases.split())]
    return Unit(Fraction(factor), tuple(sorted((part[1], int(part[2] or 1)) for part in powers if part)))


def _table() -> tuple[dict[str, Unit], dict[str, Unit]]:
    """Return units by sign (case-sensitive) and by word."""
    signs, words = {}, {}
    for (sign, names, factor, bases), (prefix, long, power) in product(_METRIC, _PREFIXES):
        signs[prefix + sign] = unit = _unit(Fraction(factor) * Fraction(10) ** power, bases)
        words |= {long + name + end: unit for name in names.split() for end in ("", "s")}
    for names, factor, bases in _OTHER:
        for name in names.split():
            (words if name.islower() and len(name) > 2 else signs)[name] = _unit(factor, bases)
    return signs, words


_SIGN_UNITS, _WORD_UNITS = _table()
DEGREE = _WORD_UNITS["degree"]
RADIAN = _WORD_UNITS["radian"]
ARC_MINUTE, ARC_SECOND = _WORD_UNITS["arcmin"], _WORD_UNITS["arcsec"]
CURRENCIES = {sign: _WORD_UNITS[word] for sign, word in zip(
    words(r"$ \euro \pounds \yen \rupee USD EUR GBP CNY RMB"),
    words("dollar euro gbp yen rupee dollar euro gbp yuan yuan"))}  # fmt: skip
TEMPERATURES = {"C": _WORD_UNITS["celsius"], "F": _WORD_UNITS["fahrenheit"]}
COUNT = Unit()
MULTIPLIERS = {"dozen": 12, "hundred": 100, "thousand": 10**3, "myriad": 10**4, "million": 10**6,
               "hundredmillion": 10**8, "billion": 10**9, "trillion": 10**12}  # fmt: skip
_POWERS = {"squared": 2, "cubed": 3}
LEADING_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}

# Words that change or negate the number before them.
_CHANGING = COMMON_WORDS.union(FUNCTIONS, MULTIPLIERS, words(
    "squared cubed modulo divided multiplied into under about almost nearly just maybe wrong incorrect except per "
    "without percent ten score halves third quarter fourth fifth "
    "sixth seventh eighth ninth tenth eleventh twelfth hundredth thousandth millionth unless this thus perhaps "
    "always other versus modulus power square cube factorial does goes mean equal exceed plusminus decimal base"
))  # fmt: skip
_TRAILING = frozenset(words("left each long tall wide high deep old apart altogether away"))
# Nouns that say no more than the number, and nouns of several things: `6 pairs` are not 6.
_GENERIC = frozenset(words(
    "unit way number integer value solution possibility choice case item thing total time answer root piece digit"
))  # fmt: skip
_GROUPS = frozenset(words("pair group couple set batch bunch team dozen pack packet bundle row stack score"))
_SINGULAR = {"people": "person", "men": "man", "women": "woman", "children": "child", "vertices": "vertex",
             "mice": "mouse", "indices": "index", "matrices": "matrix", "geese": "goose"}  # fmt: skip


def counted_unit(words: list[str]) -> Unit | None:
    """Return the unit of things that are counted, ``distinct integers``, ``pairs of students left``; None for others.

    Any noun will do. The unit's base is the noun in the singular.
    """
    if "of" in words:
        at = words.index("of")
        words = words[:at] if is_substance(words[at + 1 :]) else []
    words = words[:-1] if len(words) > 1 and words[-1] in _TRAILING else words
    if not is_substance(words) or len(words[-1]) < 3:
        return None
    noun = _SINGULAR.get(words[-1], words[-1])
    noun = noun[:-3] + "y" if noun.endswith("ies") else noun.removesuffix("s")
    kind = "groups" if noun in _GROUPS else "things"
    return COUNT if noun in _GENERIC else Unit(Fraction(1), ((f"{kind} {noun}", 1),))


def is_substance(words: list[str]) -> bool:
    """Whether ``words`` may follow "of" behind a unit: ``liters of water``, ``pairs of integers``."""
    return 0 < len(words) <= 4 and all(
        word.isalpha() and word.islower() and not {word, word.removesuffix("s")} & _CHANGING for word in words
    )


def unit_of(word: str, roman: bool) -> Unit | None:
    """Return the unit ``word``. A sign of one letter counts only in roman type: ``5m`` is a product."""
    if word in _SIGN_UNITS and (roman or len(word) > 1):
        return _SIGN_UNITS[word]
    return _WORD_UNITS.get(word.lower()) or (COUNT if word.lower() in ("unit", "units") else None)


MAX_DEPTH = 40  # of brackets and arguments
END = Token("end", "")  # what stands behind the last token


class Cursor:
    """Takes tokens one by one. ``unit_letters``: a single letter in roman type may be a unit."""

    def __init__(self, tokens: tuple[Token, ...], unit_letters: bool = True) -> None:
        self._tokens = list(tokens)
        self._position = 0
        self._depth = 0
        self._unit_letters = unit_letters
        self._rows = 0  # environments that are open
        self._context = ""  # the bracket at hand, where a sign means something else there: "set", "bars", "french"

    def _peek(self, ahead: int = 0) -> Token:
        at = self._position + ahead
        return self._tokens[at] if at < len(self._tokens) else END

    def _at(self, *texts: str) -> bool:
        token = self._tokens[self._position] if self._position < len(self._tokens) else END
        return token.text in texts and token.kind != "letters"

    def _take(self, *texts: str) -> bool:
        count = self._at(*texts)
        self._position += count
        return count

    def _expect(self, text: str) -> None:
        if not self._take(text):
            raise Unread(f"{text} is missing")

    def _next(self) -> Token:
        token = self._peek()
        if token is END:
            raise Unread("the answer ends early")
        self._position += 1
        return token

    def _word_at(self, ahead: int = 0) -> str:
        token = self._peek(ahead)
        return token.text.lower() if token.kind == "letters" else ""

    def _text_at(self, ahead: int = 0) -> str:
        return self._peek(ahead).text

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
        word = self._text_at().lower()
        if word in ("%", "percent", "percents"):
            self._position += 1
            return Node("percent", (node,))
        if word in MULTIPLIERS and node.kind == "number":
            self._position += 1
            return number(node.value.value * MULTIPLIERS[word])
        if node.kind in ("quantity", "name", "word", "tuple", "set", "matrix"):
            return None
        unit = self._unit()
        return Node("quantity", (node,), unit) if unit is not None else None

    def _unit(self) -> Unit | None:
        """Take a unit: words and signs of units, with powers, ``/`` and "per" between them; or things counted."""
        start = self._position
        unit = self._unit_product()
        if unit is None:
            self._position = start
            return self._counted()
        unit = self._per(unit)
        self._take_word(*_TRAILING)
        substance = self._words_from(self._position + 1)
        if self._word_at() == "of" and is_substance([token.text for token in substance]):
            self._position += 1 + len(substance)
        return unit

    def _per(self, unit: Unit) -> Unit:
        """``unit`` divided by the units behind ``/`` and "per"."""
        while self._take("/") or self._take_word("per"):
            bracket = self._take("(")
            below = self._unit_product() or self._counted()
            if below is None:
                raise Unread("a unit ends with a division")
            if bracket:
                self._expect(")")
            unit = unit.times(below, -1)
        return unit

    def _unit_product(self) -> Unit | None:
        """Take consecutive units; None if there is none."""
        total = None
        while True:
            lead = LEADING_POWERS.get(self._word_at(), 0)
            ahead = (1 + (self._text_at(1) == ".")) if lead else 0
            unit, width = self._unit_word(ahead)
            if self._at(r"\frac"):
                unit, width = self._unit_fraction(), 0
            if unit is None:
                return total
            self._position += ahead + width
            self._take(".")
            total = (total or Unit()).times(unit, (lead or 1) * self._unit_power())
            if self._at("*") and self._unit_word(1)[0] is not None:
                self._position += 1

    def _unit_fraction(self) -> Unit | None:
        """``\\frac{\\text{m}}{\\text{s}}``; None if it is no fraction of units."""
        start, parts = self._position, []
        self._position += 1
        for _ in "ab":
            parts.append(self._unit_product() if self._take("{") else None)
            if parts[-1] is None or not self._take("}"):
                self._position = start
                return None
        return parts[0].times(parts[1], -1)

    def _take_word(self, *words: str) -> bool:
        is_next = self._word_at() in words
        self._position += is_next
        return is_next

    def _unit_word(self, ahead: int) -> tuple[Unit | None, int]:
        """The unit at a token, and how many tokens spell it: ``\\mu\\text{m}`` takes two."""
        token, follows = self._peek(ahead), self._peek(ahead + 1)
        if token.text in CURRENCIES:
            return CURRENCIES[token.text], 1
        if token.text == r"\Omega":
            return unit_of("Ω", True), 1
        if token.text == r"\mu" or follows.text == r"\Omega":
            return unit_of((token.text + follows.text).replace(r"\mu", "μ").replace(r"\Omega", "Ω"), True), 2
        if token.kind != "letters" or (len(token.text) == 1 and not (token.roman and self._unit_letters)):
            return None, 0
        is_bare = len(token.text) > 3 or token.text in _BARE_SIGNS  # `15cm`; `2mg` may be a product
        if not (token.roman or is_bare or (token.space and self._unit_letters)):
            return None, 0
        if token.text.lower().startswith("degree") and follows.text.title() in ("Celsius", "Fahrenheit"):
            return unit_of(follows.text, True), 2
        return unit_of(token.text, token.roman), 1

    def _unit_power(self) -> int:
        """The power behind a unit: ``^2``, ``^{-1}``, "squared"."""
        if self._word_at() in _POWERS:
            return _POWERS[self._next().text.lower()]
        if not self._take("^"):
            return 1
        braced, sign = self._take("{"), -1 if self._take("-") else 1
        token = self._next()
        if braced:
            self._expect("}")
        if token.kind != "number" or len(token.text) != 1 or not token.text.isdigit():
            raise Unread("the power of a unit is not a digit")
        return sign * int(token.text)

    def _counted(self) -> Unit | None:
        """Take words that name what was counted, up to the end of the item."""
        words = []
        for token in self._words_from(self._position):
            if token.text in ("or", "and") or not (token.roman or (token.space and len(token.text) > 2)):
                break
            words.append(token.text)
        unit = counted_unit(words)
        if unit is not None and self._text_at(len(words)) in ("", ",", ";", ")", "or", "and", "}"):
            self._position += len(words)
            return unit
        return None
