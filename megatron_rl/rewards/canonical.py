r"""One spelling for answers that differ in spelling only, and exact values for plain numbers.

``canonical`` changes how an answer is written, never what it says: ``\dfrac 3 8`` and ``\frac{3}{8}``, ``10,\!080`` and
``10080``. It runs in the trainer's process on text that a model wrote, so it is string work in time linear in a
bounded length; nothing is evaluated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_SYMBOLS = str.maketrans(
    {
        "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ",
        "√": r"\sqrt ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "°": r"^\circ ", "∪": r"\cup ", "∩": r"\cap ",
        "±": r"\pm ", "²": "^2", "³": "^3", "∈": r"\in ", "’": "'", "\u00a0": " ", "\u202f": " ", "\u2009": " ",
    }
)  # fmt: skip
_INVISIBLE = re.compile(
    r"\\(?:displaystyle|textstyle|limits|bigl|bigr|Bigl|Bigr|biggl|biggr|big|Big|left|right)(?![A-Za-z])"
    r"|\\q?quad(?![A-Za-z])|(?<!\\)\\(?:!\s*|[,;:> ])|~"
)
_RENAMED = (
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:leq|leqslant)(?![A-Za-z])"), r"\\le "),
    (re.compile(r"\\(?:geq|geqslant)(?![A-Za-z])"), r"\\ge "),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\(?:lbrace|rbrace)(?![A-Za-z])"), lambda m: r"\{" if m[0] == r"\lbrace" else r"\}"),
    (re.compile(r"\\(?:mathrm|mathbf|mathit|textbf|textit|textrm|textnormal|mbox|hbox|operatorname)\s*\{"), r"\\text{"),
    (re.compile(r"\\text\{\s*(?:or|and)\s*\}|,?\s+(?:or|and)\s+"), ","),
    (re.compile(r"\\begin\{[bvBV]?(?:small)?matrix\}|\\begin\{array\}\{[lcr|]*\}"), r"\\begin{pmatrix}"),
    (re.compile(r"\\end\{(?:[bvBV]?(?:small)?matrix|array)\}"), r"\\end{pmatrix}"),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])"), r"\\text{degree}"),
    (re.compile(r"(?<=\d)\{,\}(?=\d{3})|(?<=\d),\s*\\!\s*(?=\d{3})"), ""),
)
_SPACE = re.compile(r"\s+")
_IDLE_SPACE = re.compile(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])|(?<=\d) (?=[A-Za-z])")
_SHORT_SCRIPT = re.compile(r"([\^_])\{([A-Za-z0-9])\}")
_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))


def canonical(text: str) -> str:
    r"""``text`` in one spelling: no invisible commands, ``\frac{a}{b}`` and ``\sqrt{a}`` braced, no idle space."""
    text = text.translate(_SYMBOLS).strip()
    for opening, closing in _WRAPPERS:
        if text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening) + len(closing):
            text = text[len(opening) : len(text) - len(closing)].strip()
    text = text.replace(r"\$", "").replace("$", "")
    for pattern, spelling in _RENAMED:
        text = pattern.sub(spelling, text)
    text = _INVISIBLE.sub(lambda m: "" if m[0].startswith(("\\!", "\\left", "\\right")) else " ", text)
    text = _brace_arguments(text)
    text = _IDLE_SPACE.sub("", _SPACE.sub(" ", text).strip())
    return _SHORT_SCRIPT.sub(r"\1\2", text).rstrip(".,;").strip()


_TOKEN = re.compile(r"\\[A-Za-z]+|[A-Za-z0-9]")


def _closing_brace(text: str, opening: int) -> int:
    """Position of the brace that closes the one at ``opening``; the end of ``text`` where none does."""
    depth = 0
    for position in range(opening, len(text)):
        if text[position] in "{}" and text[position - 1 : position] != "\\":
            depth += 1 if text[position] == "{" else -1
            if depth == 0:
                return position
    return len(text)


def _argument(text: str, start: int) -> tuple[str, int] | None:
    """The argument that TeX would take at ``start``, braced, and the position after it; None where there is none."""
    start += len(text[start:]) - len(text[start:].lstrip(" "))
    if text.startswith("{", start):
        end = _closing_brace(text, start) + 1
        return text[start:end], end
    token = _TOKEN.match(text, start)
    if token is None:
        return None
    end = token.end()
    for _ in range({r"\frac": 2, r"\sqrt": 1}.get(token[0], 0)):  # its own arguments, braced already
        end = _closing_brace(text, end) + 1 if text.startswith("{", end) else end
    return "{" + text[start:end] + "}", end


def _brace_arguments(text: str) -> str:
    r"""``\frac 34`` → ``\frac{3}{4}``, ``\sqrt2`` → ``\sqrt{2}``: TeX takes one token where a brace is missing."""
    for command in reversed(list(re.finditer(r"\\(frac|sqrt)(?![A-Za-z])", text))):
        position, braced = command.end(), ""
        for _ in range(2 if command[1] == "frac" else 1):
            taken = _argument(text, position)
            if taken is None:
                break
            braced, position = braced + taken[0], taken[1]
        text = text[: command.end()] + braced + text[position:]
    return text


UNIT_NAMES = {
    "degree": "degree degrees deg",
    "cent": "cent cents",
    "dollar": "dollar dollars usd",
    "mm": "mm millimeter millimeters",
    "cm": "cm centimeter centimeters",
    "m": "meter meters metre metres",
    "km": "km kilometer kilometers",
    "inch": "inch inches",
    "foot": "foot feet ft",
    "yard": "yard yards yd",
    "mile": "mile miles",
    "second": "second seconds sec",
    "minute": "minute minutes min",
    "hour": "hour hours hr hrs",
    "day": "day days",
    "week": "week weeks",
    "year": "year years",
    "mph": "mph",
    "g": "gram grams",
    "kg": "kg kilogram kilograms",
    "pound": "pound pounds lb lbs",
    "acre": "acre acres",
    "unit": "unit units",
}
_UNIT_OF = {spelling: name for name, spellings in UNIT_NAMES.items() for spelling in spellings.split()}
_UNIT_OF_TEXT = _UNIT_OF | {"m": "m", "g": "g", "s": "second", "h": "hour"}  # bare, these are variables
_POWER_WORDS = ("square", "sq", "squared", "cubic", "cubed")
_TEXT_UNIT = re.compile(r"\\text\{([^{}]*)\}(?:\^\{?\d\}?)?$")
_WORD_UNIT = re.compile(r"(?<=[0-9})])\s?((?:[A-Za-z]+\.?\s?){1,4})(?:\^\{?\d\}?)?$")


@dataclass(frozen=True)
class Quantity:
    """A value with what stands behind it. ``unit``: its name where it is a known one, else None."""

    value: str
    unit: str | None = None
    percent: bool = False


def _words(text: str) -> list[str]:
    return text.lower().replace(".", " ").split()


def split_quantity(text: str) -> Quantity:
    r"""Take a percent sign or a unit off the end of a canonical answer.

    Anything in ``\text{…}`` behind a value counts as a unit; bare words do only where each is a unit's name, since
    ``2xy`` is a product. A unit's power is not kept: ``cm`` for ``cm^2`` is a slip of writing.
    """
    for sign in (r"\%", "%", r"\text{percent}", "percent"):
        if text.endswith(sign) and len(text) > len(sign):
            return Quantity(text[: -len(sign)].rstrip(), percent=True)
    match = _TEXT_UNIT.search(text)
    if match and match.start() > 0:
        names = [_UNIT_OF_TEXT[word] for word in _words(match[1]) if word in _UNIT_OF_TEXT]
        return Quantity(text[: match.start()].rstrip(), names[0] if len(names) == 1 else None)
    match = _WORD_UNIT.search(text[-80:])
    if match:
        names = [_UNIT_OF.get(word) for word in _words(match[1]) if word not in _POWER_WORDS]
        if None not in names:
            return Quantity(text[: len(text) - len(match[0])].rstrip(), names[0] if len(names) == 1 else None)
    return Quantity(text)


_INT, _DEC = r"\d{1,300}", r"(?:\d{0,300}\.\d{1,300}|\d{1,300}\.?)"
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:[, ]\d{3}){1,20}(?:\.\d{1,20})?")
_PLAIN = re.compile(
    rf"(?P<sign>[+-]?)(?:"
    rf"\\frac\{{(?P<num_sign>-?)(?P<num>{_DEC})\}}\{{(?P<den_sign>-?)(?P<den>{_DEC})\}}"
    rf"|(?P<slash_num>{_INT})/(?P<slash_den>{_INT})"
    rf"|(?P<whole>{_INT})\s?(?:\\frac\{{(?P<mixed_num>{_INT})\}}\{{(?P<mixed_den>{_INT})\}}"
    rf"|(?<=\s)(?P<mixed_slash_num>{_INT})/(?P<mixed_slash_den>{_INT}))"
    rf"|(?P<sci>{_DEC})(?:\\times|\\cdot|\*)\s?10\^\{{?(?P<power>-?\d{{1,3}})\}}?"
    rf"|(?P<decimal>{_DEC}))"
)
_GROUPED_ARGUMENT = re.compile(r"(?<=\{)\d{1,3}(?:,\d{3}){1,20}(?=\})")


@dataclass(frozen=True)
class PlainNumber:
    """An exact value, and how it was written. ``places``: digits after the point of a decimal, else None."""

    value: Fraction
    places: int | None = None
    significant: int = 0  # significant digits of a decimal


def plain_number(text: str) -> PlainNumber | None:
    r"""Exact value of an integer, decimal, fraction, mixed number or ``a \times 10^b``; None for anything else."""
    text = _GROUPED_ARGUMENT.sub(lambda m: m[0].replace(",", ""), text)
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "").replace(" ", "")
    match = _PLAIN.fullmatch(text)
    if match is None:
        return None
    part = match.groupdict()
    sign = -1 if part["sign"] == "-" else 1
    try:
        if part["num"]:
            sign *= (-1 if part["num_sign"] else 1) * (-1 if part["den_sign"] else 1)
            return PlainNumber(sign * Fraction(part["num"]) / Fraction(part["den"]))
        if part["slash_num"]:
            return PlainNumber(sign * Fraction(int(part["slash_num"]), int(part["slash_den"])))
        if part["whole"]:
            num, den = part["mixed_num"] or part["mixed_slash_num"], part["mixed_den"] or part["mixed_slash_den"]
            return PlainNumber(sign * (int(part["whole"]) + Fraction(int(num), int(den))))
    except ZeroDivisionError:
        return None
    if part["sci"]:
        return PlainNumber(sign * Fraction(part["sci"]) * Fraction(10) ** int(part["power"]))
    digits = part["decimal"]
    places = len(digits) - digits.index(".") - 1 if "." in digits else None
    return PlainNumber(sign * Fraction(digits), places or None, len(digits.replace(".", "").lstrip("0")))


MIN_ROUNDED_DIGITS = 6  # a decimal with fewer significant digits does not stand for a number that it rounds


def plain_equal(one: PlainNumber, other: PlainNumber) -> bool:
    """Equal values; or one is a decimal of at least six digits that the other, no decimal itself, rounds to."""
    if one.value == other.value:
        return True
    if (one.places is None) == (other.places is None):
        return False
    decimal, exact = (one, other) if one.places is not None else (other, one)
    return rounds_to(exact.value, decimal)


def rounds_to(exact: Fraction, decimal: PlainNumber) -> bool:
    """Whether ``exact`` rounds to ``decimal`` at the places it shows, and these are enough to mean it."""
    assert decimal.places is not None
    half_a_place = Fraction(1, 2 * 10**decimal.places)
    return decimal.significant >= MIN_ROUNDED_DIGITS and abs(exact - decimal.value) <= half_a_place
