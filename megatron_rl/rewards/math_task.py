r"""``math_reward``: whether a response's final answer equals the gold answer as mathematics.

Most answers are decided here in a few hundred microseconds: equal spellings, rational numbers, words, and combinations
of these. A worker process compares the rest by values with many digits, under hard limits in addition to the bounds of
the comparison.

The final answer is found by searching strings, in linear time. The search begins after the last ``</think>``, and
inside the last ``<answer>`` if there is one; a response that ends inside its thinking has no answer. The first rule
that applies gives the answer: the last ``\boxed{…}`` that is not empty; the text after the last ``####``; the text
after the last "answer is", "答案：" or heading "Answer"; what the last sentence gives in bold or behind "so … is"; the
whole text if it is short. Boxes with only "and", "or", names or punctuation between them are one answer: their list. A
sign in front of a box belongs to it. A last box that is never closed is no answer, even if there are earlier boxes.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import threading
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from megatron_rl.rewards.compare import same, spelling
from megatron_rl.rewards.forms import is_score, is_word
from megatron_rl.rewards.grammar import readings
from megatron_rl.rewards.pool import WorkerPool
from megatron_rl.rewards.tree import Algebra, NeedsWorker, Node, exact_or_none

logger = logging.getLogger(__name__)

MAX_ANSWER_CHARS = 2000  # a longer text is not an answer; this bounds all later work
MAX_BARE_CHARS = 400  # a response without any mark is taken whole as the answer up to this length
_TAIL_CHARS = 8000  # "Answer:" lines are looked for in this much of a response's end

THINKING = ("<think>", "<thinking>", "[THINK]")
_THOUGHT = ("</think>", "</thinking>", "[/THINK]")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is a character of the answer
_MAX_BOXES = 16
_NAME = r"(?:[A-Za-z]|\\[a-z]+)(?:_\{?\w{1,9}\}?)?\s{0,9}+(?:=|\\in)\s{0,9}+"
_BETWEEN_BOXES = re.compile(  # `\boxed{3} or x=\boxed{-5}`
    rf"(?:\n\s{{0,9}}+[-*]\s|[\s,;&$~]|\\[(),;:!\[\] \\]|\\q?quad|and\b|or\b"
    rf"|\\text *\{{[ ,]*(?:and|or)?[ ,]*\}}|\b{_NAME})*+"
)
_SIGN = re.compile(r"(?:(?:[=≈$&]|\\[(\[]|\\approx|\b(?:is|are)\b)\s*)([-−+]|\\pm|\\mp)\s*$")
_NAME_BEFORE = re.compile(rf"(?<![A-Za-z\\]){_NAME}$")
_ANSWER_MARK = re.compile(
    r"(?:\b(?:answers?|results?)\b[*_]{0,2}(?: (?:to|for|of) [^.\n:=$]{0,80}?)?|\b(?:option|choice)\b)[ \t]{0,4}"
    r"(?:\b(?:is|are|equals|(?:should|must|will|would) be)\b(?: (?:therefore|thus|hence|then|simply)\b)?|:|=)"
    r"[*_]{0,2}[ \t]{0,4}:?"
    r"|(?:答案|结果|选项)(?:应?[为是]|[】*]{0,3}[:：]|】)[:：*]{0,3}|(?:故|应|因此|所以)选择?[:：]?"
    r"|^[#*_ \t]{0,9}(?:the )?(?:final )?answers?[*_:. \t]{0,9}\n",
    re.IGNORECASE | re.MULTILINE,
)
_CONCLUSION = re.compile(r"\b(?:therefore|thus|hence|so)\b[^.\n]{0,200}?\b(?:is|are|equals)\b:?\s*", re.IGNORECASE)
_BOLD_END = re.compile(r"\*\*([^*\n]{1,200})\*\*(?:[.!\s]*| (?!is\b|are\b)[a-z][^*\n=]{0,80})\Z")
_MARKDOWN = re.compile(r"(\*\*|`|__)([^*`]+)\1[.:]?")
_SENTENCE_END = re.compile(r"(?<!\\)[.!?](?=\s|$)|[。！．]")
_MATH = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))  # opening and closing of a formula
_WORDS = re.compile(r"[A-Za-z ]{0,80}")
_CLAUSE = re.compile(r"(?:,?\s+|^)(?:which|because|since|so|where|when|by|as|that|thus|hence|in total)\b|,\s+not\b")
_SUBJECT = re.compile(  # `it would take 180 days`, not `it is less than 6`
    r"(?:it|there|they|we|you)\b(?: (?!(?:not|never|less|more|greater|fewer|least|most|over|under)\b)[a-z]+){1,5} "
    r"(?=[\d$])",
    re.IGNORECASE,
)
_DOUBLED, _SINGLE = re.compile(r"\\\\[A-Za-z{}]"), re.compile(r"(?<!\\)\\[A-Za-z{}]")
_AROUND = (("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), (r"\boxed{", "}"), ('"', '"'), ("`", "`"), ("**", "**"))
_SMALLER = {r"\frac": r"\dfrac", r"\dfrac": r"\frac", r"\left": "", r"\right": "", r"\,": "", r"\!": ""}
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}\b)")
DEFAULT_TIMEOUT_S, DEFAULT_MEMORY_MIB = 5.0, 1024
MathTask = dict[str, Any]
_EXACT = Algebra()
_lock = threading.Lock()
KINDS = ("number", "expression", "text", "spelling", "invalid")


def without_thinking(response: str) -> str:
    """Return the response after its thinking; "" if it ends inside its thinking."""
    opened = max(response.rfind(mark) for mark in THINKING)
    closed, mark = max((response.rfind(mark), mark) for mark in _THOUGHT)
    if opened > closed:
        return ""
    return response if closed < 0 else response[closed + len(mark) :]


def boxed_answer(text: str) -> str | None:
    r"""Return the last boxed answer, with its sign, or the list that the last boxes are; None if there is no box.

    It is "" if the last box is not closed or all are empty.
    """
    boxes: list[tuple[int, int, str]] = []  # start, end and content of boxes that are not inside another
    unclosed = -1
    for command in list(_BOX.finditer(text))[-_MAX_BOXES:]:
        if not boxes or command.start() >= boxes[-1][1]:
            end = _end_of_argument(text, command.end())
            if end:
                content = text[command.end() : end].strip()
                boxes.append((command.start(), end, content[1:-1].strip() if content[:1] == "{" else content))
            else:
                unclosed = command.start()
    if not boxes or unclosed > boxes[-1][0]:
        return None if not boxes and unclosed < 0 else ""
    full = [box for box in boxes if box[2]]
    if not full:
        return ""
    first = len(full) - 1
    while first and _BETWEEN_BOXES.fullmatch(text, full[first - 1][1], full[first][0]):
        first -= 1
    start, _, content = full[first]
    before = text[max(0, start - 40) : start]
    sign = _SIGN.search(before)
    if len({content for _, _, content in full[first:]}) == 1:
        return f"{sign[1]}{{{content}}}" if sign else content
    name = _NAME_BEFORE.search(before[: sign.start(1)] if sign else before)
    return (name[0] if name else "") + (sign[1] if sign else "") + text[start : full[-1][1]]


def _end_of_argument(text: str, start: int) -> int:
    """Return the end of the argument that begins at ``start``; 0 if it is not closed."""
    if text[start : start + 1] != "{":
        return start + len(re.split(r"[\s$]", text[start : start + MAX_ANSWER_CHARS], maxsplit=1)[0])
    depth = 0
    for mark in _BRACE.finditer(text, start, start + MAX_ANSWER_CHARS + 16):
        depth += {"{": 1, "}": -1}.get(mark[0], 0)
        if depth == 0:
            return mark.end()
    return 0


def _after_answer_mark(text: str) -> str | None:
    """Return the text after the last "answer is …" or "Answer: …": one formula and words, else the sentence or line."""
    text = text[-_TAIL_CHARS:]
    marks = list(_ANSWER_MARK.finditer(text))
    if not marks:
        last_line = max(text.rstrip().rfind("\n"), 0)
        bold = _BOLD_END.search(text, last_line)
        marks = list(_CONCLUSION.finditer(text, last_line))
        if bold or not marks:
            return bold[1] if bold else None
    tail = _SUBJECT.sub("", text[marks[-1].end() :].strip(), count=1)
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
    response = without_thinking(response).rpartition("<answer>")[2].partition("</answer>")[0]
    boxed = boxed_answer(response)
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
    r"""Return the answer inside a gold entry that is a full solution (``\boxed{…}`` or ``#### …``), else the entry.

    Backslashes are single where the entry has only doubled ones, as data that was escaped twice does.
    """
    if _DOUBLED.search(gold) and not _SINGLE.search(gold):
        gold = gold.replace("\\\\", "\\")
    return boxed_answer(gold) or gold.rpartition("####")[2].strip()


def math_verdict(response: str, gold: str, accept_unevaluated: bool = False) -> float | MathTask:
    """Return 1.0 or 0.0 if fractions decide, else the task for a worker."""
    answer, reference = final_answer(response), gold_answer(gold)
    if answer is None or not reference:
        return 0.0
    if len(reference) > MAX_ANSWER_CHARS:
        return float(answer == reference)
    try:
        return float(same(answer, reference, _EXACT, accept_unevaluated))
    except NeedsWorker:
        return {"kind": "math", "candidate": answer, "gold": reference, "accept_unevaluated": accept_unevaluated}


@lru_cache(maxsize=1)
def _shared_pool(pid: int) -> WorkerPool:
    """Return the pool of one worker of the process ``pid``, started when first needed; a forked child gets its own."""
    pool = WorkerPool(1, timeout_s=DEFAULT_TIMEOUT_S, memory_limit_mib=DEFAULT_MEMORY_MIB)
    atexit.register(pool.close)
    return pool


def math_reward(response: str, gold_answer: str, *, accept_unevaluated: bool = False) -> float:
    r"""Return 1.0 if the final answer of ``response`` equals ``gold_answer``, else 0.0.

    ``accept_unevaluated``: also accept an answer with a computation left to do (``1234\times 5678`` for its value).
    Never raises; takes at most ``DEFAULT_TIMEOUT_S`` of processor time. For many responses use ``Rewarder``.
    """
    texts = ["" if value is None else str(value) for value in (response, gold_answer)]
    try:
        verdict = math_verdict(*texts, accept_unevaluated)
        if isinstance(verdict, float):
            return verdict
        with _lock:
            pool = _shared_pool(os.getpid())
        return pool.run([verdict])[0].value
    except Exception as error:  # noqa: BLE001  no text ends a program, nor does a worker that cannot start
        logger.warning("math_reward: not judged, scoring 0: %s: %s", type(error).__name__, error)
        return 0.0


def answer_key(gold: str) -> str:
    """Return a key that is equal for gold answers that differ only in spelling."""
    trees = readings(gold_answer(gold))
    value = exact_or_none(trees[0]) if trees and trees[0].kind == "number" else None
    return spelling(gold_answer(gold)) if value is None else f"{value.numerator:x}/{value.denominator:x}"


def classify(golds: Iterable[str]) -> dict[str, str]:
    """Return the kind of each gold answer.

    ``number``; ``expression``: read as mathematics, so that other spellings are recognised; ``text``: a word or name;
    ``spelling``: cannot be read, so that right answers must have (nearly) the same spelling; ``invalid``: empty or too
    long, so that no response is right.
    """
    return {gold: _kind(gold_answer(gold)) for gold in dict.fromkeys(golds)}


def _kind(reference: str) -> str:
    if not reference or len(reference) > MAX_ANSWER_CHARS or not spelling(reference):
        return "invalid"
    trees = readings(reference)
    if not trees:
        return "spelling"
    if _is_text(trees[0]):
        return "text"
    value = exact_or_none(trees[0].args[0] if trees[0].kind in ("quantity", "percent") else trees[0])
    return "expression" if value is None or is_score(trees[0]) else "number"


def _is_text(tree: Node) -> bool:
    return is_word(tree) or (tree.kind == "list" and all(map(_is_text, tree.args)))


def respellings(gold: str) -> Iterator[str]:
    """Yield spellings that a response may well have and ``gold`` has not, most of them of one cause each."""
    text = gold.strip()
    for opens, closes in _AROUND:
        inner = text[len(opens) : len(text) - len(closes)]
        if text.startswith(opens) and text.endswith(closes) and inner.strip() and closes not in inner:
            yield inner
    yield from _of_a_list(text)
    changes = [
        text.replace("\\\\", "\\") if _DOUBLED.search(text) else text,
        _THOUSANDS.sub("", text) if _THOUSANDS.sub("", text).replace(".", "").isdigit() else text,
        text.removesuffix("."),
        *(re.sub(re.escape(old) + r"(?![A-Za-z.])", lambda _, new=new: new, text) for old, new in _SMALLER.items()),
    ]
    yield from (changed for changed in dict.fromkeys(changes) if changed.strip() and changed != gold)


def _of_a_list(text: str) -> Iterator[str]:
    """Yield the elements of a list that is written as JSON text, as a person would."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return
    texts = [part for part in value if isinstance(part, str)] if isinstance(value, list) else []
    if texts and len(texts) == len(value):
        yield ", ".join(texts)
