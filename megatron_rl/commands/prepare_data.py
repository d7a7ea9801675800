"""The command `prepare-data`."""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config.data import DataSourceConfig
from megatron_rl.data import load_tokenizer
from megatron_rl.data.prepare import OverlapIndex, Unique, collect, output_row
from megatron_rl.data.source import Problem, read_problems
from megatron_rl.errors import EXIT_DONE, InputError
from megatron_rl.rewards.gold import KINDS, answer_key, classify

SHOWN = 20  # examples of each kind in the report


def add_prepare_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, help="Read these dataset files, .jsonl or .parquet.")
    parser.add_argument("--out", type=Path, required=True, help="Write this file, .jsonl or .parquet.")
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
        "--max-length", type=int, help="Leave out problems with more tokens than this (needs --tokenizer)."
    )
    parser.add_argument("--limit", type=int, help="Read only the first rows of each file, this many.")
    parser.add_argument("--report", type=Path, help="Write the report to this file (default: OUT.report.json).")


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
