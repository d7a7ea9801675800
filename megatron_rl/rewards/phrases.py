"""Reads answers that are not expressions: words, dates, choices with their letter, numerals of a base."""

from __future__ import annotations

import re
from functools import reduce

from megatron_rl.rewards.latex import COMMON_WORDS, FUNCTIONS, Token, Unread, words
from megatron_rl.rewards.tree import Node

_MATHEMATICS = FUNCTIONS | {"pi", "infinity", "inf", "oo", "sqrt", "mod"}
_PUNCTUATION = frozenset([".", "'", '"', "-", "(", ")", "?", "!", "`", "*", ",", ";"])
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
          "eleven": 11, "twelve": 12, "sixteen": 16, "binary": 2, "octal": 8, "hex": 16}  # fmt: skip
_ARTICLES = ("a", "an", "the")
# Texts of tokens with a space between them: a choice and what stands behind it, and a numeral of a base.
_CHOICE = re.compile(r"\( [A-J] \)")
_OPTION = re.compile(
    r"(?:\( ([A-J]) \)|([A-J]) (?:[).]|:(?! [A-Za-z]$))) (?=[\w\\(\[{$|.-])(?!(?i:or|and|not|is|nor)\b)"
)
_BASED = re.compile(
    r"(- )?(\( )?((?=[A-Z ]*\d)[0-9A-Z]++(?: [0-9A-Z]++)*?) (?(2)\) )(?:IN )?(?:_|BASE) [{( ]*(?:BASE )?(\w+)[ })]*"
)


_VERDICTS = ("yes", "no", "true", "false")
_MONTHS = words("january february march april may june july august september october november december")
_EMPTY = re.compile(
    r"no(?:such|real)?(?:solution|value|number)s?(?:exists?)?|none(?:exists?)?|emptyset|null(?:set|solution)|inconsistent"
)
_REALS = re.compile(r"(?:setof)?(?:(?:all|every|any)reals?(?:numbers?|values?|x)?|realnumbers)")
_SAME_WORDS = {"else": "otherwise", "elsewhere": "otherwise", "dne": "doesnotexist",
               "limitdoesnotexist": "doesnotexist", "correct": "true", "incorrect": "false",
               "infinitelymanysolutions": "infinitelymany", "infinitenumberofsolutions": "infinitelymany"}  # fmt: skip


def word_key(tokens: list[Token] | tuple[Token, ...]) -> str:
    """Return words as a key of lower-case letters and digits, without the article or the subject that they begin with.

    ``The sequence is convergent`` is ``convergent``, ``There is no solution`` is ``no solution``.
    """
    words = [token.text.casefold() for token in tokens if token.kind in ("letters", "number")]
    at = max((k for k, word in enumerate(words[:-1]) if word in ("is", "are", "has", "have")), default=-1)
    if at > 0 and words[0] in ("the", "it", "there", "this", "they") and "not" not in words[:at]:
        words = words[at + 1 :]
    words = words[1:] if len(words) > 1 and words[0] in _ARTICLES and len(words[1]) > 1 else words
    if any(word in _MONTHS for word in words):  # `5 March 2023`
        words = sorted(
            (word for word in words if word not in ("st", "nd", "rd", "th", "of")), key=lambda word: (len(word), word)
        )
    key = "".join(words)
    return _SAME_WORDS.get(key, key)


def phrase(tokens: tuple[Token, ...]) -> Node | None:
    """Return words, or a list of words and letters; None if the tokens are mathematics."""
    known = (t.text in _MATHEMATICS if t.kind == "letters" else t.text not in _PUNCTUATION for t in tokens)
    if not tokens or any(is_known and not t.text.isdigit() for t, is_known in zip(tokens, known)):
        return None
    dated = [token.text.lower() for token in tokens if token.kind != "sign"]
    others = [word for word in dated if word not in _MONTHS]
    is_date = all(word.isdigit() or word in ("st", "nd", "rd", "th", "of") for word in others)
    if is_date and 1 < len(dated) < 5 and len(others) == len(dated) - 1:
        return Node("word", value=word_key(tokens))
    items: list[list[Token]] = [[]]
    for token in tokens:
        if token.text in (",", ";", "or", "and"):
            items.append([])
        else:
            items[-1].append(token)
    nodes = [_phrase_item(item) for item in items if item]
    has_word = any(len(token.text) > 1 for token in tokens if token.kind == "letters")
    if None in nodes or not nodes or not (has_word or any(node.kind == "word" for node in nodes)):
        return None
    if nodes[0].value in _VERDICTS and not any(node.value in _VERDICTS for node in nodes[1:]):
        return nodes[0]  # `Yes, it converges`
    joined = "and" if any(token.text in ("and", "or") for token in tokens) else None  # in any order
    return nodes[0] if len(nodes) == 1 else Node("list", tuple(nodes), joined)


def _phrase_item(tokens: list[Token]) -> Node | None:
    tokens = tokens[1:-1] if tokens[0].text == "(" and tokens[-1].text == ")" else tokens
    bare = [token for token in tokens if token.kind in ("letters", "number")]
    if not bare or bare[0].kind != "letters" or bare[0].text.lower() in ("plus", "minus", "negative"):
        return None
    if len(bare) == 2 and bare[0].text.lower() in ("option", "choice", "answer") and len(bare[1].text) == 1:
        tokens = bare = bare[1:]
    signs = {token.text for token in tokens if token.kind == "sign"}
    if signs & set("()*!") or (signs & {"-", "'"} and not any(len(token.text) > 2 for token in bare)):
        return None  # `f(x)`, `a-b`, `n!`
    if len(bare) == 1 and len(bare[0].text) == 1:
        return Node("name", value=bare[0].text)
    if len(bare[0].text) <= 2 and any(token.kind == "number" for token in bare):  # `x 3`, not `Room 12`
        return None
    key = word_key(bare)
    if _EMPTY.fullmatch(key):
        return Node("empty")
    if _REALS.fullmatch(key):
        return Node("domain", value="R")
    letters = "".join(token.text for token in tokens)
    if not (letters.isascii() and letters.isalpha()) or letters in COMMON_WORDS or any(t.roman for t in tokens):
        return Node("word", value=key)
    names = [Node("constant" if letter in "ei" else "name", value=letter) for letter in letters]
    return Node("word", (reduce(lambda one, other: Node("mul", (one, other)), names),), key)  # `xy` may be a product


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
