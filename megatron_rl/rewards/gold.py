"""Checks before a run how `math_reward` reads gold answers."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_rl.rewards.compare import exact_or_none, spelling
from megatron_rl.rewards.extract import MAX_ANSWER_CHARS, gold_answer
from megatron_rl.rewards.grammar import readings
from megatron_rl.rewards.tree import Node

KINDS = ("number", "expression", "text", "spelling", "invalid")


def answer_key(gold: str) -> str:
    """Return a key that is equal for gold answers that differ only in spelling."""
    trees = readings(gold_answer(gold))
    value = exact_or_none(trees[0]) if trees and trees[0].kind == "number" else None
    return spelling(gold_answer(gold)) if value is None else str(value)


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
