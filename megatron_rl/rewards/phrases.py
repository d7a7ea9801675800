"""Reads answers that are not expressions: words, dates, choices with their letter, numerals of a base."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_rl.rewards.latex import COMMON_WORDS, FUNCTIONS, Token, Unread, synonyms, words
from megatron_rl.rewards.tree import Node

_MATHEMATICS = FUNCTIONS | {"pi", "infinity", "inf", "oo", "sqrt", "mod", "or", "and"}
_PUNCTUATION = frozenset(".'\"-()?!`*")
_BASES = {"binary": 2, "octal": 8, "hex": 16}
# Texts of tokens with a space between them: a choice and what stands behind it, and a numeral of a base.
_CHOICE = re.compile(r"\( [A-J] \)")
_OPTION = re.compile(
    r"(?:\( ([A-J]) \)|([A-J]) (?:[).]|:(?! [A-Za-z]$))) ?(?:$|(?=[\w\\(\[{$|.-])(?!(?i:or|and|not|is|nor)\b))"
)
_BASED = re.compile(
    r"(- )?(\( )?((?=[A-Z ]*\d)[0-9A-Z]++(?: [0-9A-Z]++)*?) (?(2)\) )(?:IN )?"
    r"[{( ]*(?:_|BASE) [{( ]*(?:BASE )?(\w+)[ })]*"
)
_MONTHS = words("january february march april may june july august september october november december")
_BY_ABBREVIATION = {month[:3]: month for month in _MONTHS}
_DAYS = re.compile(r"\d+|st|nd|rd|th|of|the")
# Words that may go where others are left: of `The series is convergent`, `an even function`.
_FILLERS = frozenset(
    words("the an it is are has have on angled function series sequence graph number numbers one point triangle")
)
_EMPTY = re.compile(
    r"no(?:such|real|value|solution|x)+s?(?:exists?)?|none(?:exists?)?|empty(?:set)?|null(?:set|solution)|inconsistent"
    r"|doesnota?(?:real)?solutions?"
)
_REALS = re.compile(r"(?:setof)?(?:all|every|any|(?=.*s$))(positive|negative|nonzero)?reals?(?:values?|x)?")
_SIGNS = {"positive": "^+", "negative": "^-", "nonzero": "^*", None: ""}
_SAME_WORDS = synonyms(
    "else,elsewhere→otherwise dne,undefined,limitdoesnotexist→doesnotexist true,correct→yes false,incorrect→no "
    "infinite,infinitelymanysolutions,infinitenumberofsolutions→infinitelymany convergent,converge→converges "
    "divergent,diverge,notconvergent,doesnotconverge→diverges"
)


def known_word(text: str) -> str:
    """``text`` in small letters, or the usual word for it: ``true`` is ``yes``."""
    small = text.casefold()
    return _SAME_WORDS.get(small, small)


def _month(word: str) -> str:
    """The month that ``word`` names, also in three letters; "" for others."""
    month = _BY_ABBREVIATION.get(word[:3], "")
    return month if word in (month, month[:3]) else ""


def word_key(tokens: Sequence[Token]) -> str:
    """Return words as a key of lower-case letters and digits, without those that say nothing.

    ``The sequence is convergent`` is ``converges``, ``There is no solution`` is ``no solution``.
    """
    known = [token.text.casefold() for token in tokens if token.kind in ("letters", "number")]
    if any(map(_month, known)):  # `5 March 2023`
        known = sorted(_month(word) or word for word in known if word.isdigit() or not _DAYS.fullmatch(word))
    at = max((k for k, word in enumerate(known[:-1]) if word in ("is", "are", "has", "have", "be")), default=-1)
    if at > 0 and known[0] in ("the", "it", "there", "this", "they") and "not" not in known[:at]:
        known = known[at + 1 :]
    kept = [word for word in known if word not in _FILLERS]
    while len(kept) > 1 and kept[0] == "a" and len(kept[1]) > 1:
        del kept[0]
    return known_word("".join(kept or known[-1:]))


def phrase(tokens: tuple[Token, ...]) -> Node | None:
    """Return the words, the date or the letter that ``tokens`` are; None if they are mathematics or a list."""
    if not any(token.kind == "letters" for token in tokens) or any(token.kind == "command" for token in tokens):
        return None
    bare = [token for token in tokens if token.kind != "sign"]
    signs = {token.text for token in tokens if token.kind == "sign"}
    texts = [token.text.casefold() for token in bare]
    if 1 < len(texts) < 6 and signs <= {",", "."}:
        others = [text for text in texts if not _month(text)]
        if len(others) == len(texts) - 1 and all(map(_DAYS.fullmatch, others)):
            return Node("word", value=word_key(bare))
    if bare[0].kind != "letters" or not signs <= _PUNCTUATION or any(t.text in _MATHEMATICS for t in bare):
        return None
    if bare[1:] and texts[0] in ("plus", "minus", "negative"):
        return None
    if tokens[0].text == "(" and tokens[-1].text == ")":
        signs -= {"(", ")"}
    if signs & set("()*!") or (signs & {"-", "'"} and all(len(text) < 3 for text in texts)):
        return None  # `f(x)`, `a-b`, `n!`
    has_number = any(token.kind == "number" for token in bare)
    if (len(texts[0]) <= 2 and has_number) or (len(bare) == 1 and len(texts[0]) == 1):  # `x 3`, not `Room 12`
        return None
    key = word_key(bare)
    if _EMPTY.fullmatch(key):
        return Node("empty")
    if reals := _REALS.fullmatch(key):
        return Node("domain", value="R" + _SIGNS[reals[1]])
    plain = (
        key == "".join(texts) and not has_number and not any(t.roman or t.text.lower() in COMMON_WORDS for t in bare)
    )
    if plain and (len(bare) == 1 or all(len(text) < 3 for text in texts)):
        return None  # letters in italics are a product, which may be compared as a word
    return Node("word", value=key)


def option_of(tokens: tuple[Token, ...]) -> tuple[str, tuple[Token, ...]] | None:
    """Return the letter of a multiple choice and its text, as in ``(C) 42``, ``C. 42``, ``E: some text``; else None."""
    text = " ".join(token.text for token in tokens)
    match = _OPTION.match(text)
    if match is None:
        return None
    if _CHOICE.search(text, match.end()):
        raise Unread("several choices")
    return match[1] or match[2], tokens[3 if match[1] else 2 :]


def base_numeral(tokens: tuple[Token, ...]) -> Node | None:
    r"""``2102_3``, ``(2102)_{3}``, ``2102_{\text{three}}``, ``204 base 5``, with its sign; None where it is none."""
    if not any(token.text == "_" or token.text.lower() == "base" for token in tokens):
        return None
    match = _BASED.fullmatch(" ".join(token.text for token in tokens).upper())
    if match is None:
        return None
    digits, name = match[3].replace(" ", ""), match[4].lower()
    base = int(name) if name.isdigit() and len(name) < 4 else _BASES.get(name, 0)
    if not 2 <= base <= 36 or any(int(digit, 36) >= base for digit in digits):
        return None
    return Node("based", value=((match[1] or "").strip() + (digits.lstrip("0") or "0"), base))
