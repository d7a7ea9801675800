"""The command `prepare-data`, which cleans a public dataset: one row per problem, one answer, no evaluation problems.

Problems are the same if they are equal after `normalise`. A training problem overlaps an evaluation problem if it is
the same or contains at least half of its runs of eight words. This finds copies; a restatement with other names passes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.arguments import output_file
from megatron_rl.config.data import DataSourceConfig
from megatron_rl.data.source import Message, Problem, read_problems
from megatron_rl.errors import EXIT_DONE, InputError
from megatron_rl.rewards.math_task import KINDS, answer_key, classify

RUN_WORDS = 8  # two unrelated competition problems rarely share a run of more than six words
NEAR = 0.5  # a training problem with this share of an evaluation problem's runs is a copy of it

# What DAPO-Math-17k and AIME-2024 wrap around every problem, in the files that verl's recipes read.
_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem."
)
_AFTER = 'Remember to put your answer on its own line after "Answer:".'
_SPACING = re.compile(r"\\[,;:!> ]|\\(?:left|right|quad|qquad|displaystyle)(?![A-Za-z])|~|\$")
_WORD = re.compile(r"[^\W_]+")
SHOWN = 20  # examples of each kind in the report


def bare_problem(text: str) -> tuple[str, bool]:
    """Return ``text`` without a known instruction around it, and whether there was one."""
    text = text.strip()
    if text.startswith(_BEFORE) and text.endswith(_AFTER):
        return text[len(_BEFORE) : -len(_AFTER)].strip(), True
    return text, False


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
    tools: list[Any] | None
    answers: Counter[str] = field(default_factory=Counter)  # as spelled

    @property
    def copies(self) -> int:
        return self.answers.total()

    @property
    def id(self) -> str:
        """A hash of the problem, the same in every run and file."""
        return hashlib.sha256(normalise(self.text).encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def answer(self) -> str:
        """Return the answer as its first copy spells it."""
        return next(iter(self.answers))


def collect(problems: Iterable[Problem]) -> tuple[list[Unique], Counter[str]]:
    """Return unique problems in order of first appearance, and counts of rows and of rows with an instruction."""
    uniques: dict[str, Unique] = {}
    counts: Counter[str] = Counter()
    for problem in problems:
        text, stripped = bare_problem(_text(problem))
        counts["rows"] += 1
        counts["instructions_stripped"] += stripped
        name = normalise(text)
        if name not in uniques:
            alone = isinstance(problem.question, str) or len(problem.question) == 1
            question = text if alone else problem.question
            uniques[name] = Unique(question, text, problem.data_source, problem.extra, problem.where, problem.tools)
        uniques[name].answers[problem.answer] += 1
    return list(uniques.values()), counts


def _text(problem: Problem) -> str:
    if isinstance(problem.question, str):
        return problem.question
    return next(
        (m["content"] for m in reversed(problem.question) if m["role"] == "user"), problem.question[-1]["content"]
    )


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
    row |= {"tools": json.dumps(unique.tools)} if unique.tools else {}
    return row | {"extra_info": {**unique.extra, "copies": unique.copies}}


def add_prepare_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, help="Read these dataset files, .jsonl or .parquet.")
    parser.add_argument("--out", type=output_file, required=True, help="Write this file, .jsonl.")
    parser.add_argument(
        "--against", type=Path, nargs="*", default=[], help="Keep problems of these evaluation sets out."
    )


def run_prepare_data(options: argparse.Namespace) -> int:
    """Make training data from a public dataset: unique problems, checked answers, no problems of evaluation sets.

        megatron-rl prepare-data dapo-math-17k.parquet --against aime-2024.parquet --out dapo.jsonl

    The command reads the data loader's formats (.jsonl or .parquet; `problem`/`answer` or verl's columns). The public
    file of DAPO-Math-17k has each problem about a hundred times, inside an instruction; that of AIME-2024 has each 32
    times. These steps are done in order:

    1. Remove a known instruction around a problem, so that the recipe's `data.prompt.template` decides. Merge problems
       that are equal up to Unicode form, case, white space and LaTeX spacing.
    2. Leave out problems whose copies have different answers.
    3. Leave out gold answers that are empty or too long to ever be met. Answers that `math_reward` can compare only by
       spelling are kept and listed.
    4. Leave out problems of an --against file: the same problem, or one that shares half of an evaluation problem's
       runs of eight words.

    The same files give the same bytes; ids are hashes of the problems. The printed text and OUT.report.json list what
    was found and what was left out.
    """
    if options.out.suffix != ".jsonl":
        raise InputError(f"--out {options.out}: unknown kind of file; allowed: .jsonl")
    report = prepare(options)
    file = options.out.with_name(options.out.name + ".report.json")
    file.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(as_text(report))
    return EXIT_DONE


def problems_of(paths: Sequence[Path]) -> Iterator[Problem]:
    for path in paths:
        yield from read_problems(DataSourceConfig(path=str(path)))


def settle_conflicts(uniques: list[Unique]) -> tuple[list[Unique], dict[str, Any]]:
    """Return problems with one answer, and a report on the others."""
    spellings = {unique.id: {answer_key(answer) for answer in unique.answers} for unique in uniques}
    torn = [unique for unique in uniques if len(spellings[unique.id]) > 1]
    examples = [{"where": u.where, "problem": u.text[:200], "answers": dict(u.answers)} for u in torn[:SHOWN]]
    remaining = [unique for unique in uniques if len(spellings[unique.id]) == 1]
    return remaining, {"problems": len(torn), "examples": examples}


def check_golds(uniques: list[Unique]) -> tuple[list[Unique], dict[str, Any]]:
    """Return problems whose answer a response can meet, and a report on the kinds of answers."""
    kinds = classify(unique.answer() for unique in uniques)
    counts = Counter(kinds[unique.answer()] for unique in uniques)
    listed = {
        kind: [{"where": u.where, "answer": u.answer()[:200]} for u in uniques if kinds[u.answer()] == kind][:SHOWN]
        for kind in ("spelling", "invalid")
    }
    valid = [unique for unique in uniques if kinds[unique.answer()] != "invalid"]
    return valid, {"kinds": {kind: counts[kind] for kind in KINDS}, **listed}


def remove_overlap(uniques: list[Unique], against: Sequence[Path]) -> tuple[list[Unique], dict[str, Any]]:
    """Return problems that are in no evaluation file, and a report with the number per file."""
    by_file: dict[str, Any] = {}
    hit: set[str] = set()
    for path in against:
        texts = [_text(problem) for problem in problems_of([path])]
        index = OverlapIndex(texts)
        kinds = {unique.id: index.kind_of(unique.text) for unique in uniques}
        both = [unique for unique in uniques if kinds[unique.id]]
        hit |= {unique.id for unique in both}
        counts = Counter(kinds[unique.id] for unique in both)
        by_file[path.name] = {
            "problems": len(index.exact),
            "exact": counts["exact"],
            "near": counts["near"],
            "examples": [{"where": u.where, "kind": kinds[u.id], "problem": u.text[:200]} for u in both[:SHOWN]],
        }
    remaining = [unique for unique in uniques if unique.id not in hit]
    return remaining, {"problems": len(hit), "files": by_file}


def write_rows(file: Path, uniques: list[Unique]) -> dict[str, Any]:
    """Write ``uniques`` as JSON lines; return the number of rows and the file's hash."""
    rows = [output_row(unique) for unique in uniques]
    partial = file.with_name(f".partial-{file.name}")
    lines = (json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows)
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(file)
    return {"file": file.name, "rows": len(rows), "sha256": _sha256(file)}


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def prepare(options: argparse.Namespace) -> dict[str, Any]:
    """Do all steps and return the report."""
    uniques, counts = collect(problems_of(options.files))
    report: dict[str, Any] = {
        "inputs": [{"file": path.name, "sha256": _sha256(path)} for path in options.files],
        "rows": counts["rows"],
        "instructions_stripped": counts["instructions_stripped"],
        "unique": len(uniques),
        "most_copies": max(unique.copies for unique in uniques),
    }
    uniques, report["conflicts"] = settle_conflicts(uniques)
    uniques, report["golds"] = check_golds(uniques)
    uniques, report["overlap"] = remove_overlap(uniques, options.against)
    if not uniques:
        raise InputError(f"{options.files[0]}: no problem is left to write; the report: {json.dumps(report)}")
    report["output"] = write_rows(options.out, uniques)
    return report


def as_text(report: dict[str, Any]) -> str:
    """Return the report as text."""
    conflicts, golds, overlap = (report[key] for key in ("conflicts", "golds", "overlap"))
    lines = [
        f"rows        {report['rows']} ({report['instructions_stripped']} inside a known instruction)",
        f"unique      {report['unique']}; copies of one: at most {report['most_copies']}",
        f"conflicts   {conflicts['problems']} problems with several answers",
        "answers     " + ", ".join(f"{count} {kind}" for kind, count in golds["kinds"].items()),
    ]
    lines += [f"            {item['where']}: {item['answer']!r} counts only as spelled" for item in golds["spelling"]]
    lines += [
        f"overlap     {name}: {counts['exact']} the same, {counts['near']} nearly, of {counts['problems']} problems"
        for name, counts in overlap["files"].items()
    ]
    output = report["output"]
    return "\n".join([*lines, f"written     {output['rows']} rows, sha256 {output['sha256']}: {output['file']}"])
