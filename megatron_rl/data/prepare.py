"""Cleans a public dataset: one row per problem, one answer, no evaluation problems.

Problems are the same if they are equal after `normalise`. A training problem overlaps an evaluation problem if it is
the same or contains at least half of its runs of eight words. This finds copies; a restatement with other names passes.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.data.source import Message, Problem

RUN_WORDS = 8  # two unrelated competition problems rarely share a run of more than six words
NEAR = 0.5  # a training problem with this share of an evaluation problem's runs is a copy of it

# What DAPO-Math-17k and AIME-2024 wrap around every problem, in the files that verl's recipes read.
_WRAPPERS = (
    (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.",
        'Remember to put your answer on its own line after "Answer:".',
    ),
)
_SPACING = re.compile(r"\\[,;:!> ]|\\(?:left|right|quad|qquad|displaystyle)(?![A-Za-z])|~|\$")
_WORD = re.compile(r"[^\W_]+")


def bare_problem(text: str) -> tuple[str, bool]:
    """Return ``text`` without a known instruction around it, and whether there was one."""
    for before, after in _WRAPPERS:
        stripped = text.strip()
        if stripped.startswith(before) and stripped.endswith(after):
            return stripped[len(before) : -len(after)].strip(), True
    return text.strip(), False


def normalise(text: str) -> str:
    """Return ``text`` with normalised Unicode forms, case, white space and LaTeX spacing, equal for all copies."""
    text = _SPACING.sub(" ", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(text.split()).strip(" .")


def words_of(text: str) -> list[str]:
    return _WORD.findall(normalise(text))


@dataclass
class Unique:
    """A problem and all its copies."""

    question: str | list[Message]
    text: str  # the bare problem, which identifies copies
    data_source: str
    extra: dict[str, Any]
    where: str
    answers: Counter[str] = field(default_factory=Counter)  # as spelled
    keys: Counter[str] = field(default_factory=Counter)  # the same, in one spelling of each answer
    key_of: dict[str, str] = field(default_factory=dict)  # that spelling, by the answer's own

    @property
    def copies(self) -> int:
        return self.answers.total()

    @property
    def id(self) -> str:
        """A hash of the problem, the same in every run and file."""
        return hashlib.sha256(normalise(self.text).encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def answer(self) -> str:
        """Return the most frequent answer; among equally frequent ones, the first."""
        key = self.keys.most_common(1)[0][0]
        return next(answer for answer in self.answers if self.key_of[answer] == key)


def collect(
    problems: Iterable[Problem], keep_instructions: bool, answer_key: Callable[[str], str]
) -> tuple[list[Unique], Counter[str]]:
    """Return unique problems in order of first appearance, and counts of rows and of rows with an instruction.

    ``answer_key``: maps equal answers to one spelling.
    """
    uniques: dict[str, Unique] = {}
    counts: Counter[str] = Counter()
    for problem in problems:
        asked = problem.question if isinstance(problem.question, str) else _last_user(problem.question)
        text, stripped = bare_problem(asked)
        counts["rows"] += 1
        counts["instructions_stripped"] += stripped and not keep_instructions
        name = normalise(text)
        if name not in uniques:
            alone = isinstance(problem.question, str) or len(problem.question) == 1
            question = text if alone and not keep_instructions else problem.question
            uniques[name] = Unique(question, text, problem.data_source, problem.extra, problem.where)
        unique, answer = uniques[name], problem.answer
        if answer not in unique.key_of:
            unique.key_of[answer] = answer_key(answer)
        unique.answers[answer] += 1
        unique.keys[unique.key_of[answer]] += 1
    return list(uniques.values()), counts


def _last_user(messages: list[Message]) -> str:
    return next((m["content"] for m in reversed(messages) if m["role"] == "user"), messages[-1]["content"])


class OverlapIndex:
    """Finds problems of an evaluation set among training problems."""

    def __init__(self, texts: Iterable[str]):
        self.exact: set[str] = set()
        self.runs: dict[tuple[str, ...], set[int]] = defaultdict(set)
        self.sizes: list[int] = []
        for number, text in enumerate(texts):
            bare, _ = bare_problem(text)
            self.exact.add(normalise(bare))
            runs = _runs(words_of(bare))
            self.sizes.append(len(runs))
            for run in runs:
                self.runs[run].add(number)

    def kind_of(self, text: str) -> str | None:
        """Return ``exact``, ``near``, or None for a problem that is not in the evaluation set."""
        if normalise(text) in self.exact:
            return "exact"
        shared = Counter(number for run in _runs(words_of(text)) for number in self.runs.get(run, ()))
        return "near" if any(count >= NEAR * self.sizes[number] for number, count in shared.items()) else None


def _runs(words: list[str]) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + RUN_WORDS]) for i in range(len(words) - RUN_WORDS + 1)}


def output_row(unique: Unique) -> dict[str, Any]:
    """Return a row in the format of the data loader."""
    row: dict[str, Any] = {"id": unique.id}
    row["problem" if isinstance(unique.question, str) else "prompt"] = unique.question
    row |= {"answer": unique.answer(), "data_source": unique.data_source}
    return row | {"extra_info": {**unique.extra, "copies": unique.copies}}
