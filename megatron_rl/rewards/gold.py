"""What `math_reward` can make of gold answers, before a run is spent on them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from megatron_rl.rewards.canonical import canonical, plain_number
from megatron_rl.rewards.compare import shape_of
from megatron_rl.rewards.extract import MAX_ANSWER_CHARS, gold_answer
from megatron_rl.rewards.pool import WorkerPool

KINDS = ("number", "expression", "text", "spelling", "invalid")
_TEXT = re.compile(r"(?:\\text\{[^{}]*\}|[A-Za-z][A-Za-z ,'-]*)")
_TIMEOUT_S, _MEMORY_MIB = 5.0, 1024


def answer_key(gold: str) -> str:
    """One spelling for gold answers that differ in spelling alone."""
    return canonical(gold_answer(gold))


def classify(golds: Iterable[str]) -> dict[str, str]:
    """Gold answer → its kind:

    ``number``; ``expression``: every part is read as mathematics, so other spellings of it are recognised; ``text``: a
    word or name; ``spelling``: mathematics that cannot be read, right answers count only in (nearly) the same
    spelling; ``invalid``: empty or too long, no response is ever right.
    """
    kinds: dict[str, str] = {}
    parts: dict[str, list[str]] = {}
    for gold in dict.fromkeys(golds):
        reference = gold_answer(gold)
        text = canonical(reference)
        if not reference or len(reference) > MAX_ANSWER_CHARS:
            kinds[gold] = "invalid"
        elif plain_number(text) is not None:
            kinds[gold] = "number"
        elif _TEXT.fullmatch(text) and len(text) > 1:
            kinds[gold] = "text"
        else:
            items = [item for item in shape_of(text).items if plain_number(item) is None and not _is_word(item)]
            parts[gold] = list(items)
    if parts:
        readable = _readable({item for items in parts.values() for item in items})
        kinds |= {g: "expression" if all(readable[i] for i in items) else "spelling" for g, items in parts.items()}
    return kinds


def _is_word(item: str) -> bool:
    return len(item) > 1 and _TEXT.fullmatch(item) is not None


def _readable(items: set[str]) -> dict[str, bool]:
    """Whether algebra finds an expression equal to itself: it does if it can read it in time."""
    ordered = sorted(items)
    pool = WorkerPool(1, timeout_s=_TIMEOUT_S, memory_limit_mib=_MEMORY_MIB)
    try:
        verdicts = pool.run([{"kind": "algebra", "candidate": item, "gold": item} for item in ordered])
    finally:
        pool.close()
    return {item: verdict.value == 1.0 for item, verdict in zip(ordered, verdicts, strict=True)}
