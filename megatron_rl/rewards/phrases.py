"""Reads answers that are not expressions: words, dates, choices with their letter, numerals of a base."""

from __future__ import annotations

import re
from functools import reduce

from megatron_rl.rewards.latex import COMMON_WORDS, FUNCTIONS, Token, Unread, words
from megatron_rl.rewards.tree import Node

_MATHEMATICS = FUNCTIONS | {"pi", "infinity", "inf", "oo", "sqrt", "mod"}
_PUNCTUATION = frozenset([".", "'", '"', "-", "(", ")", "?", "!", "`", "*"])
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
          "eleven": 11, "twelve": 12, "sixteen": 16, "binary": 2, "octal": 8, "hex": 16}  # fmt: skip
_ARTICLES = ("a", "an", "the")


_VERDICTS = ("yes", "no", "true", "false")
_MONTHS = words("january february march april may june july august september october november december")
_EMPTY = frozenset(
    words(
        "nosolution nosolutions nosolutionexists nosolutionsexist norealsolution norealsolutions nosuchvalue "
        "nosuchvalues norealnumber norealnumbers none emptyset nullset nullsolution noneexist noneexists inconsistent"
    )
)
_REALS = frozenset(words("allrealnumbers allreals allrealvalues realnumbers everyrealnumber anyrealnumber"
                         " setofrealnumbers allreal setofallrealnumbers allrealx anyrealx everyrealx"))  # fmt: skip
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
    if not tokens or not all(_may_be_in_phrase(token) for token in tokens):
        return None
    dated = [token.text.lower() for token in tokens if token.kind != "sign"]
    others = [word for word in dated if word not in _MONTHS]
    is_date = all(word.isdigit() or word in ("st", "nd", "rd", "th", "of") for word in others)
    if is_date and 1 < len(dated) < 5 and len(others) == len(dated) - 1:
        return Node("word", value=word_key(tokens))
    items: list[list[Token]] = [[]]
    for position, token in enumerate(tokens):
        connective = (
            token.kind == "letters" and token.text in ("or", "and") and position > 0 and (items[-1] or len(items) > 1)
        )
        if token.text in (",", ";") or connective:
            if items[-1] or not connective:
                items.append([])
        else:
            items[-1].append(token)
    nodes = [_phrase_item(item) for item in items]
    has_word = any(len(token.text) > 1 for token in tokens if token.kind == "letters")
    joined = "and" if any(token.text in ("and", "or") for token in tokens) else None  # in any order
    if any(node is None for node in nodes) or not (has_word or any(node.kind == "word" for node in nodes)):
        return None
    if nodes[0].value in _VERDICTS and not any(node.value in _VERDICTS for node in nodes[1:]):
        return nodes[0]  # `Yes, it converges`
    return nodes[0] if len(nodes) == 1 else Node("list", tuple(nodes), joined)


def _may_be_in_phrase(token: Token) -> bool:
    if token.kind == "letters":
        return token.text not in _MATHEMATICS
    return (token.kind == "number" and token.text.isdigit()) or token.text in _PUNCTUATION or token.text in (",", ";")


def _phrase_item(tokens: list[Token]) -> Node | None:
    bare = [token for token in tokens if token.kind in ("letters", "number")]
    if not bare or bare[0].kind != "letters" or bare[0].text.lower() in ("plus", "minus", "negative"):
        return None
    if len(bare) == 2 and bare[0].text.lower() in ("option", "choice", "answer") and len(bare[1].text) == 1:
        tokens = bare = bare[1:]
    if len(bare) == 1 and len(bare[0].text) == 1:
        return Node("name", value=bare[0].text) if len(tokens) <= 3 and "-" not in {t.text for t in tokens} else None
    if any(token.kind == "number" for token in bare) and not _reads_like_words(bare):
        return None
    if any(token.text in _PUNCTUATION - {".", '"', "`", "?"} for token in tokens):  # `f(x)`, `a-b`, `n!`
        long = [token for token in bare if len(token.text) > 2]
        enclosed = tokens[0].text == "(" and tokens[-1].text == ")" and len(bare) == len(tokens) - 2
        if not long or (not enclosed and any(t.text in "()*!" for t in tokens if t.kind == "sign")):
            return None
    key = word_key(bare)
    if key in _EMPTY or key in _REALS:
        return Node("empty") if key in _EMPTY else Node("domain", value="R")
    return Node("word", _product_of_letters(tokens), key)


def _product_of_letters(tokens: list[Token]) -> tuple[Node, ...]:
    """Return the product that letters in italics may also mean, such as ``xy``; empty for other words."""
    letters = "".join(token.text for token in tokens)
    if not (letters.isascii() and letters.isalpha()):
        return ()
    if any(token.roman for token in tokens) or letters in COMMON_WORDS:
        return ()
    names = [Node("constant" if letter in "ei" else "name", value=letter) for letter in letters]
    return (reduce(lambda one, other: Node("mul", (one, other)), names),)


def _reads_like_words(bare: list[Token]) -> bool:
    """``October 30``, ``Room 12``; not ``x 3``."""
    return len(bare[0].text) > 2 and all(token.space or position == 0 for position, token in enumerate(bare))


def option_of(tokens: tuple[Token, ...]) -> tuple[str, tuple[Token, ...]] | None:
    """Return the letter of a multiple choice and its text, as in ``(C) 42``, ``C. 42``, ``E: some text``; else None."""
    texts = [token.text for token in tokens[:3]]
    if len(texts) == 3 and texts[0] == "(" and texts[2] == ")":
        letter, behind = tokens[1], tokens[3:]
    elif len(texts) >= 2 and texts[1] in (")", ".", ":"):
        letter, behind = tokens[0], tokens[2:]
    else:
        return None
    if letter.kind != "letters" or not re.fullmatch("[A-J]", letter.text) or not behind:
        return None
    first = behind[0]
    if first.kind == "sign" and first.text not in ("-", "(", "[", r"\{", "$", "{", "|"):
        return None
    if texts[1] == ":" and len(behind) == 1 and first.kind == "letters" and len(first.text) == 1:
        return None  # the ratio A:B
    if first.text.lower() in ("or", "and", "not", "is", "nor"):
        return None
    other = re.compile("[A-J]")
    for before, inside, after in zip(behind, behind[1:], behind[2:]):
        if before.text == "(" and after.text == ")" and other.fullmatch(inside.text):
            raise Unread("several choices")
    return letter.text, behind


def base_numeral(tokens: tuple[Token, ...]) -> Node | None:
    r"""``2102_3``, ``(2102)_{3}``, ``2102_{\text{three}}``, ``204 base 5``, with its sign; None where it is none."""
    sign = ""
    if tokens and tokens[0].text == "-":
        sign, tokens = "-", tokens[1:]
    mark = next((k for k, token in enumerate(tokens) if token.text == "_" or token.text.lower() == "base"), None)
    if not mark:
        return None
    digits, index = list(tokens[:mark]), list(tokens[mark + 1 :])
    if digits and digits[-1].text.lower() == "in":
        digits.pop()
    if len(digits) > 2 and digits[0].text == "(" and digits[-1].text == ")":
        digits = digits[1:-1]
    index = [token for token in index if token.text not in ("{", "}", "(", ")") and token.text.lower() != "base"]
    text = "".join(token.text for token in digits).upper()
    if len(index) != 1 or not re.fullmatch(r"[0-9][0-9A-Z]*|[A-Z]+[0-9][0-9A-Z]*", text):
        return None
    name = index[0].text.lower()
    base = int(name) if name.isdigit() and len(name) < 4 else _BASES.get(name)
    if base is None or not 2 <= base <= 36 or any(int(digit, 36) >= base for digit in text):
        return None
    return Node("based", value=(sign + (text.lstrip("0") or "0"), base))
