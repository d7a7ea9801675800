r"""Where in a response the final answer stands. String work only: bounded, and nothing is evaluated.

One answer is read, by the first rule that applies: the last ``\boxed{…}``; what follows the last ``####``; what follows
the last "answer is" or "Answer:" on its line; the whole response where it is short. A response that offers several
answers has said the last one; a last box that is empty or never closed is no answer, whatever stood before it.
"""

from __future__ import annotations

import re

MAX_ANSWER_CHARS = 2000  # a final answer longer than this is not one; bounds all later work
MAX_BARE_CHARS = 400  # a response without any mark is taken whole as the answer up to this length
_TAIL_CHARS = 8000  # "Answer:" lines are looked for in this much of a response's end

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_ANSWER_MARK = re.compile(
    r"\banswers?\b[*_]{0,2}(?: (?:to|for|of) [^.\n:=$]{0,80}?)?[ \t]{0,4}(?:\bis\b|\bare\b|:|=)[*_]{0,2}[ \t]{0,4}:?",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)")
_MATH = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))  # opening and closing of a formula
_WORDS = re.compile(r"[A-Za-z ]{0,80}")


def last_boxed(text: str) -> str | None:
    r"""Content of the last ``\boxed`` or ``\fbox``; "" where it is empty or unbalanced, None where there is none."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    window = text[start : start + MAX_ANSWER_CHARS + 16]
    command = _BOX.match(window)
    if command is None:
        return None
    content = window[command.end() :].lstrip()
    if not content.startswith("{"):
        return re.split(r"[\s$]", content, maxsplit=1)[0]
    depth, position = 0, 0
    while position < len(content):
        char = content[position]
        if char == "\\":
            position += 2  # an escaped brace is a character of the answer
            continue
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return content[1:position].strip()
        position += 1
    return ""


def _after_answer_mark(text: str) -> str | None:
    """What the last "answer is …" or "Answer: …" says: one formula and words at most, else the sentence or line."""
    text = text[-_TAIL_CHARS:]
    marks = list(_ANSWER_MARK.finditer(text))
    if not marks:
        return None
    rest = text[marks[-1].end() :].strip()
    for opening, closing in _MATH:
        end = rest.find(closing, len(opening)) if rest.startswith(opening) else -1
        if end >= 0 and _WORDS.fullmatch(_sentence(rest[end + len(closing) :])):
            return rest[len(opening) : end].strip()
    return _sentence(rest)


def _sentence(text: str) -> str:
    line = text.split("\n", 1)[0]
    end = _SENTENCE_END.search(line)
    return (line[: end.start()] if end else line).strip().strip("*").strip()


def final_answer(response: str) -> str | None:
    """The answer that ``response`` ends with, as the response spells it; None where it gives none."""
    boxed = last_boxed(response)
    if boxed is not None:
        found = boxed
    elif "####" in response:
        found = response[response.rfind("####") + 4 :].lstrip().split("\n", 1)[0].strip()
    else:
        said = _after_answer_mark(response)
        found = response.strip() if said is None and len(response) <= MAX_BARE_CHARS else (said or "")
    return found if 0 < len(found) <= MAX_ANSWER_CHARS else None


def gold_answer(gold: str) -> str:
    r"""The answer inside a gold entry that is a whole solution (``\boxed{…}`` or ``#### …``), else the entry itself."""
    boxed = last_boxed(gold)
    if boxed:
        return boxed
    return gold[gold.rfind("####") + 4 :].strip() if "####" in gold else gold.strip()
