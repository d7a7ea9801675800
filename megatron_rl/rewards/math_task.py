r"""``math_reward``: whether a response's final answer equals the gold answer as mathematics.

Most answers are decided here in a few hundred microseconds: equal spellings, rational numbers, words, and combinations
of these. A worker process compares the rest by values with many digits, under hard limits in addition to the bounds of
the comparison.

The final answer is found by searching strings, in linear time. The search begins after the last ``</think>``; a
response that ends inside its thinking has no answer. The first rule that applies gives the answer: the last
``\boxed{…}``; the text after the last ``####``; the text after the last "answer is" or "Answer:" on its line; the whole
text if it is short. If a response has several answers, the last one counts. If the last box is empty or never closed,
there is no answer, even if there are earlier boxes.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import threading
from collections.abc import Iterable
from typing import Any

from megatron_rl.rewards.compare import exact_or_none, same, spelling
from megatron_rl.rewards.grammar import readings
from megatron_rl.rewards.pool import WorkerPool
from megatron_rl.rewards.tree import Algebra, NeedsWorker, Node

logger = logging.getLogger(__name__)

MAX_ANSWER_CHARS = 2000  # a longer text is not an answer; this bounds all later work
MAX_BARE_CHARS = 400  # a response without any mark is taken whole as the answer up to this length
_TAIL_CHARS = 8000  # "Answer:" lines are looked for in this much of a response's end

THINKING = ("<think>", "<thinking>", "[THINK]")
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
DEFAULT_TIMEOUT_S, DEFAULT_MEMORY_MIB = 5.0, 1024
MathTask = dict[str, Any]
_EXACT = Algebra()
_lock = threading.Lock()
_pool: tuple[int, WorkerPool] | None = None  # (process that owns it, the pool)
KINDS = ("number", "expression", "text", "spelling", "invalid")


def without_thinking(response: str) -> str:
    """Return the response after its thinking; "" if it ends inside its thinking."""
    opened = max(response.rfind(mark) for mark in THINKING)
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


def _shared_pool() -> WorkerPool:
    """Return this process's pool of one worker, started when first needed; a forked child gets its own."""
    global _pool
    with _lock:
        if _pool is None or _pool[0] != os.getpid():
            pool = WorkerPool(1, timeout_s=DEFAULT_TIMEOUT_S, memory_limit_mib=DEFAULT_MEMORY_MIB)
            _pool = (os.getpid(), pool)
            atexit.register(pool.close)
        return _pool[1]


def math_reward(response: str, gold_answer: str, *, accept_unevaluated: bool = False) -> float:
    r"""Return 1.0 if the final answer of ``response`` equals ``gold_answer``, else 0.0.

    The final answer is the last ``\boxed{…}`` after the last ``</think>``, else the text after the last ``####``, else
    after the last "answer is …", else the whole of a short response. ``accept_unevaluated``: also accept an answer with
    a computation left to do (``1234\times 5678`` or ``\log_2 1024`` for their values). Never raises; takes at most
    ``DEFAULT_TIMEOUT_S`` of processor time. To score many responses use ``Rewarder``, which spreads them over workers.
    """
    texts = ["" if value is None else str(value) for value in (response, gold_answer)]
    try:
        verdict = math_verdict(*texts, accept_unevaluated)
        if isinstance(verdict, float):
            return verdict
        return _shared_pool().run([verdict])[0].value
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
    return "expression" if value is None or trees[0].kind == "dash" else "number"


def _is_text(tree: Node) -> bool:
    return (tree.kind == "word" and not tree.args) or (tree.kind == "list" and all(map(_is_text, tree.args)))
