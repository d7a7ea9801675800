r"""Finds the final answer in a response. It only searches strings, in linear time, and evaluates nothing.

The search begins after the last ``</think>``; a response that ends inside its thinking has no answer. The first rule
that applies gives the answer: the last ``\boxed{…}``; the text after the last ``####``; the text after the last "answer
is" or "Answer:" on its line; the whole text if it is short. If a response has several answers, the last one counts. If
the last box is empty or never closed, there is no answer, even if there are earlier boxes.
"""

from __future__ import annotations

import re

MAX_ANSWER_CHARS = 2000  # a longer text is not an answer; this bounds all later work
MAX_BARE_CHARS = 400  # a response without any mark is taken whole as the answer up to this length
_TAIL_CHARS = 8000  # "Answer:" lines are looked for in this much of a response's end

_THINKING = ("<think>", "<thinking>", "[THINK]")
_THOUGHT = ("</think>", "</thinking>", "[/THINK]")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_ANSWER_MARK = re.compile(
    r"\banswers?\b[*_]{0,2}(?: (?:to|for|of) [^.\n:=$]{0,80}?)?[ \t]{0,4}(?:\bis\b|\bare\b|:|=)[*_]{0,2}[ \t]{0,4}:?",
    re.IGNORECASE,
)
_MARKDOWN = re.compile(r"(\*\*|`|__)([^*`]+)\1[.:]?")
_SENTENCE_END = re.compile(r"(?<!\\)[.!?](?=\s|$)")
_MATH = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))  # opening and closing of a formula
_WORDS = re.compile(r"[A-Za-z ]{0,80}")
_CLAUSE = re.compile(r"(?:,?\s+|^)(?:which|because|since|so|where|when|by|as|that|thus|hence|in total)\b")


def without_thinking(response: str) -> str:
    """Return the response after its thinking; "" if it ends inside its thinking."""
    opened = max(response.rfind(mark) for mark in _THINKING)
    closed, mark = max((response.rfind(mark), mark) for mark in _THOUGHT)
    if opened > closed:
        return ""
    return response if closed < 0 else response[closed + len(mark) :]


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed`` or ``\fbox``; "" if empty or unbalanced, None if there is none."""
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
    """Return the text after the last "answer is …" or "Answer: …": one formula and words, else the sentence or line."""
    text = text[-_TAIL_CHARS:]
    marks = list(_ANSWER_MARK.finditer(text))
    if not marks:
        return None
    tail = text[marks[-1].end() :].strip()
    for opening, closing in _MATH:
        end = tail.find(closing, len(opening)) if tail.startswith(opening) else -1
        if end >= 0 and _WORDS.fullmatch(_sentence(tail[end + len(closing) :])):
            behind = _CLAUSE.split(_sentence(tail[end + len(closing) :]), maxsplit=1)[0].strip()
            formula = tail[len(opening) : end].strip()
            return rf"{formula} \text{{ {behind}}}" if behind else formula
    return _CLAUSE.split(_sentence(tail), maxsplit=1)[0]


def _sentence(text: str) -> str:
    line = text.split("\n", 1)[0]
    read = depth = 0
    for end in _SENTENCE_END.finditer(line):  # not inside braces: `\text{ sq. units}`
        depth += line.count("{", read, end.start()) - line.count("}", read, end.start())
        read = end.start()
        if depth <= 0:
            line = line[:read]
            break
    return line.strip().strip("*").strip()


def final_answer(response: str) -> str | None:
    """Return the final answer of ``response`` as spelled there; None if it has none."""
    response = without_thinking(response)
    boxed = last_boxed(response)
    if boxed is not None:
        answer = boxed
    elif "####" in response:
        answer = response[response.rfind("####") + 4 :].lstrip().split("\n", 1)[0].strip()
    else:
        marked_text = _after_answer_mark(response)
        answer = response.strip() if marked_text is None and len(response) <= MAX_BARE_CHARS else (marked_text or "")
    marked = _MARKDOWN.fullmatch(answer)
    answer = marked[2] if marked else answer
    return answer if 0 < len(answer) <= MAX_ANSWER_CHARS else None


def gold_answer(gold: str) -> str:
    r"""Return the answer inside a gold entry that is a full solution (``\boxed{…}`` or ``#### …``), else the entry."""
    boxed = last_boxed(gold)
    if boxed:
        return boxed
    return gold[gold.rfind("####") + 4 :].strip() if "####" in gold else gold.strip()
