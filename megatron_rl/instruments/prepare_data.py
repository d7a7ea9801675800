"""The command `prepare-data`, which cleans a public dataset: one row per problem, one answer, no evaluation problems.

Problems are the same if they are equal after `normalise`. A training problem overlaps an evaluation problem if it is
the same or contains at least half of its runs of eight words. This finds copies; a restatement with other names passes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import statistics
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.arguments import COUNT, output_file
from megatron_rl.config.data import DataSourceConfig
from megatron_rl.data import load_tokenizer
from megatron_rl.data.source import Message, Problem, read_problems
from megatron_rl.errors import EXIT_DONE, InputError
from megatron_rl.rewards.math_task import KINDS, answer_key, classify

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
SHOWN = 20  # examples of each kind in the report


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
    tools: list[Any] | None
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
            uniques[name] = Unique(question, text, problem.data_source, problem.extra, problem.where, problem.tools)
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
    row |= {"tools": json.dumps(unique.tools)} if unique.tools else {}  # as text: parquet would mix their keys
    return row | {"extra_info": {**unique.extra, "copies": unique.copies}}


def add_prepare_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, help="Read these dataset files, .jsonl or .parquet.")
    parser.add_argument("--out", type=output_file, required=True, help="Write this file, .jsonl or .parquet.")
    parser.add_argument(
        "--against", type=Path, nargs="*", default=[], help="Keep problems of these evaluation sets out."
    )
    parser.add_argument(
        "--overlap",
        choices=("drop", "report"),
        default="drop",
        help="Choose what happens to problems of an evaluation set (default: drop).",
    )
    parser.add_argument(
        "--conflicts",
        choices=("drop", "majority"),
        default="drop",
        help="Choose what happens to problems with several answers (default: drop).",
    )
    parser.add_argument("--keep-instructions", action="store_true", help="Keep the text around problems.")
    parser.add_argument("--tokenizer", type=Path, help="Count tokens with the tokenizer of this model folder.")
    parser.add_argument(
        "--max-length", type=COUNT, help="Leave out problems with more tokens than this (needs --tokenizer)."
    )
    parser.add_argument("--limit", type=COUNT, help="Read only the first rows of each file, this many.")
    parser.add_argument("--report", type=output_file, help="Write the report to this file (default: OUT.report.json).")


def run_prepare_data(options: argparse.Namespace) -> int:
    """Make training data from a public dataset: unique problems, checked answers, no problems of evaluation sets.

        megatron-rl prepare-data dapo-math-17k.parquet --against aime-2024.parquet --out dapo.jsonl [--tokenizer MODEL]

    The command reads the data loader's formats (.jsonl or .parquet; `problem`/`answer` or verl's columns). The public
    file of DAPO-Math-17k has each problem about a hundred times, inside an instruction; that of AIME-2024 has each 32
    times. These steps are done in order:

    1. Remove a known instruction around a problem (--keep-instructions keeps it), so that the recipe's
       `data.prompt.template` decides. Merge problems that are equal up to Unicode form, case, white space and LaTeX
       spacing.
    2. Leave out problems whose copies have different answers (--conflicts majority: take the most frequent answer).
    3. Leave out gold answers that are empty or too long to ever be met. Answers that `math_reward` can compare only by
       spelling are kept and listed.
    4. Leave out problems of an --against file: the same problem, or one that shares half of an evaluation problem's
       runs of eight words (--overlap report: only count them).
    5. With --tokenizer and --max-length, leave out longer problems (measured without template).

    The same files and options give the same bytes; ids are hashes of the problems. The printed text and OUT.report.json
    (--report FILE) list what was found and what was left out.
    """
    if options.out.suffix not in (".jsonl", ".parquet"):
        raise InputError(f"--out {options.out}: unknown kind of file; allowed: .jsonl, .parquet")
    if options.max_length is not None and options.tokenizer is None:
        raise InputError("--max-length: needs a tokenizer to count tokens; add --tokenizer")
    report = prepare(options)
    file = options.report or options.out.with_name(options.out.name + ".report.json")
    file.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(as_text(report))
    return EXIT_DONE


def problems_of(paths: Sequence[Path], limit: int | None = None) -> Iterator[Problem]:
    for path in paths:
        yield from read_problems(DataSourceConfig(path=str(path), limit=limit))


def settle_conflicts(uniques: list[Unique], policy: str) -> tuple[list[Unique], dict[str, Any]]:
    """Return problems with one answer (or a most frequent one), and a report on the others."""
    torn = [unique for unique in uniques if len(unique.keys) > 1]
    examples = [{"where": u.where, "problem": u.text[:200], "answers": dict(u.answers)} for u in torn[:SHOWN]]
    remaining = uniques if policy == "majority" else [unique for unique in uniques if len(unique.keys) == 1]
    return remaining, {"problems": len(torn), "policy": policy, "examples": examples}


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


def remove_overlap(uniques: list[Unique], against: Sequence[Path], policy: str) -> tuple[list[Unique], dict[str, Any]]:
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
    remaining = uniques if policy == "report" else [unique for unique in uniques if unique.id not in hit]
    return remaining, {"policy": policy, "problems": len(hit), "files": by_file}


def _text(problem: Problem) -> str:
    if isinstance(problem.question, str):
        return problem.question
    return next(message["content"] for message in reversed(problem.question) if message["role"] == "user")


def measure_lengths(
    uniques: list[Unique], tokenizer_path: Path, max_length: int | None
) -> tuple[list[Unique], dict[str, Any]]:
    """Return problems of at most ``max_length`` tokens, and a report with the distribution of lengths."""
    tokenizer = load_tokenizer(str(tokenizer_path))
    texts = [unique.text for unique in uniques]
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    lengths = sorted(len(tokens) for tokens in ids)
    fitting = [u for u, tokens in zip(uniques, ids, strict=True) if max_length is None or len(tokens) <= max_length]
    figures: dict[str, Any] = {"max_length": max_length, "longer": len(uniques) - len(fitting)}
    if lengths:
        at = {f"p{q}": lengths[min(len(lengths) - 1, len(lengths) * q // 100)] for q in (50, 90, 99)}
        figures |= {"mean": round(statistics.fmean(lengths), 2), "min": lengths[0], **at, "max": lengths[-1]}
    return fitting, figures


def write_rows(file: Path, uniques: list[Unique]) -> dict[str, Any]:
    """Write ``uniques`` in the format of ``file``'s ending; return the number of rows and the file's hash."""
    rows = [output_row(unique) for unique in uniques]
    partial = file.with_name(f".partial-{file.name}")
    if file.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), partial)
    else:
        lines = (json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows)
        partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(file)
    return {"file": file.name, "rows": len(rows), "sha256": _sha256(file)}


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def prepare(options: argparse.Namespace) -> dict[str, Any]:
    """Do all steps and return the report."""
    uniques, counts = collect(problems_of(options.files, options.limit), options.keep_instructions, answer_key)
    copies = sorted(unique.copies for unique in uniques)
    report: dict[str, Any] = {
        "inputs": [{"file": path.name, "sha256": _sha256(path)} for path in options.files],
        "rows": counts["rows"],
        "instructions_stripped": counts["instructions_stripped"],
        "unique": len(uniques),
        "copies": {"min": copies[0], "median": statistics.median_low(copies), "max": copies[-1]},
    }
    uniques, report["conflicts"] = settle_conflicts(uniques, options.conflicts)
    uniques, report["golds"] = check_golds(uniques)
    uniques, report["overlap"] = remove_overlap(uniques, options.against, options.overlap)
    if options.tokenizer is not None:
        uniques, report["tokens"] = measure_lengths(uniques, options.tokenizer, options.max_length)
    if not uniques:
        raise InputError(f"{options.files[0]}: no problem is left to write; the report: {json.dumps(report)}")
    report["output"] = write_rows(options.out, uniques)
    return report


def as_text(report: dict[str, Any]) -> str:
    """Return the report as text."""
    copies, conflicts, golds, overlap = (report[key] for key in ("copies", "conflicts", "golds", "overlap"))
    lines = [
        f"rows        {report['rows']} ({report['instructions_stripped']} inside a known instruction)",
        f"unique      {report['unique']}; copies of one: {copies['min']} to {copies['max']}, median {copies['median']}",
        f"conflicts   {conflicts['problems']} problems with several answers ({conflicts['policy']})",
        "answers     " + ", ".join(f"{count} {kind}" for kind, count in golds["kinds"].items()),
    ]
    lines += [f"            {item['where']}: {item['answer']!r} counts only as spelled" for item in golds["spelling"]]
    lines += [
        f"overlap     {name}: {counts['exact']} the same, {counts['near']} nearly, of {counts['problems']} problems "
        f"({overlap['policy']})"
        for name, counts in overlap["files"].items()
    ]
    if "tokens" in report:
        shown = ", ".join(f"{key} {value}" for key, value in report["tokens"].items())
        lines.append(f"tokens      {shown}")
    output = report["output"]
    return "\n".join([*lines, f"written     {output['rows']} rows, sha256 {output['sha256']}: {output['file']}"])
