"""docs/engines: each rule has a proof that is there, or the word "unproven", and
something to tick off."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from megatron_rl.doctor.checks import CHECKS
from tests.support import te

ROOT = Path(__file__).parents[3]
PAGES = (
    ROOT / "docs" / "engines" / "first-contact.md",
    ROOT / "docs" / "engines" / "rules.md",
)  # by a person, by the doctor
HEADERS = [["rule", "relied on in", "proof", last] for last in ("on the first node", "doctor")]
UNPROVEN = re.compile(r"\bunproven\b")
WHEEL = re.compile(r"(?:wheel|sdist) `[a-z0-9-]+ \d[\w.+]*`")
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(test_\w+))?`")
OBJECT = re.compile(r"`((?:megatron\.core|vllm|torch|transformer_engine)(?:\.\w+)+)`")
OURS = re.compile(r"`((?:megatron_rl|slurm|tools|tests|patches)/[\w./-]+|Containerfile|requirements[\w-]*\.txt)`")
CHECKED = re.compile(r"`(?:megatron-rl doctor --only )?([a-z0-9,-]+)`")


BY_DOCTOR = re.compile(r"(?:doctor: )?(?:`[a-z0-9-]+`(?:, )?)+")


@dataclass(frozen=True)
class Row:
    line: int
    rule: str
    ours: str
    proof: str
    tick: str


def rows_of(text: str) -> list[Row]:
    complaints = []
    for number, line in enumerate(text.splitlines(), 1):
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if not line.startswith("|") or cells in HEADERS or set(line) <= set("|- "):
            continue
        assert len(cells) == len(HEADERS[0]), f"line {number}: {len(cells)} cells: {line}"
        complaints.append(Row(number, *cells))
    return complaints


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def names_in(nodes: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """What a module or class defines, also in the branches of an `if` or `try`."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((target.id, node) for target in targets if isinstance(target, ast.Name))
        for part in ("body", "orelse", "handlers", "finalbody"):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from names_in(getattr(node, part, []))


def is_there(name: str, folders: list[Path]) -> bool:
    """Whether a module, or what one defines, is in one of ``folders``. Nothing is imported."""
    parts = name.split(".")
    for folder in folders:
        for k in range(len(parts), 0, -1):
            path = folder.joinpath(*parts[:k])
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            if not file.is_file():
                continue
            inside: list[ast.stmt] = tree(file).body
            for part in parts[k:]:
                node = dict(names_in(inside)).get(part)
                if node is None:
                    break
                inside = getattr(node, "body", [])
            else:
                return True
            break
    return False


def problems(row: Row, folders: list[Path]) -> list[str]:
    tests, objects = TEST.findall(row.proof), OBJECT.findall(row.proof)
    complaints = []
    if not (tests or objects or WHEEL.search(row.proof) or UNPROVEN.search(row.proof)):
        complaints.append('no test, no name of a package, no wheel and not the word "unproven"')
    for file, function in tests:
        if not (ROOT / file).is_file():
            complaints.append(f"no file {file}")
        elif function and function not in {
            n.name for n in ast.walk(tree(ROOT / file)) if isinstance(n, ast.FunctionDef)
        }:
            complaints.append(f"{file} has no {function}")
    for name in objects:
        if name.startswith("transformer_engine") and te.MISSING:
            continue
        if not is_there(name, folders):
            complaints.append(f"no {name} in the installed packages")
    if not (files := OURS.findall(row.ours)):
        complaints.append("no file of ours")
    complaints += [f"no file {file}" for file in files if not (ROOT / file).exists()]
    if not row.tick:
        complaints.append("nothing to tick off")
    alone = BY_DOCTOR.fullmatch(row.tick)
    for names in [row.tick] if alone else re.findall(r"doctor: ((?:`[a-z0-9-]+`(?:, )?)+)", row.tick):
        known = {check.name for check in CHECKS}
        complaints += [f"the doctor has no check {name}" for name in CHECKED.findall(names) if name not in known]
    for names in re.findall(r"doctor --only ([a-z0-9,-]+)", row.tick):
        complaints += [f"the doctor has no check {n}" for n in names.split(",") if n not in {c.name for c in CHECKS}]
    return complaints


FOLDERS = [*map(Path, sys.path), te.FOLDER]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_rule_has_a_proof_and_something_to_tick_off(page):
    rows = rows_of(page.read_text(encoding="utf-8"))
    assert len(rows) > 10, "nothing was looked at"
    assert [(row.line, row.rule, problem) for row in rows for problem in problems(row, FOLDERS)] == []


def test_a_rule_is_on_the_page_of_who_checks_it():
    by_person, by_doctor = ([row.tick for row in rows_of(page.read_text(encoding="utf-8"))] for page in PAGES)
    assert [tick for tick in by_person if BY_DOCTOR.fullmatch(tick)] == []
    assert [tick for tick in by_doctor if not BY_DOCTOR.fullmatch(tick)] == []


def test_no_rule_stands_twice():
    rules = [row.rule for page in PAGES for row in rows_of(page.read_text(encoding="utf-8"))]
    assert len(set(rules)) == len(rules)


GOOD = Row(
    1,
    "r",
    "`slurm/lib/rank.sh`",
    "`tests/unit/docs/test_first_contact.py::test_no_rule_stands_twice`",
    "doctor: `fp32`",
)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"proof": "unproven"}, None),
        ({"proof": "`torch.cuda.graphs.CUDAGraph`"}, None),
        ({"proof": "disassembled in the wheel `torch 2.13.0+cu130`"}, None),
        ({"proof": "it is well known"}, "no test, no name"),
        ({"proof": "`tests/unit/docs/test_first_contact.py::test_that_is_gone`"}, "has no test_that_is_gone"),
        ({"proof": "`tests/unit/docs/test_that_is_gone.py`"}, "no file tests"),
        ({"proof": "`torch.cuda.graphs.that_is_gone`"}, "no torch.cuda.graphs.that_is_gone"),
        ({"proof": "`torch.that_is_gone.function`"}, "no torch.that_is_gone.function"),
        ({"ours": "`megatron_rl/that_is_gone.py`"}, "no file megatron_rl"),
        ({"ours": "nowhere"}, "no file of ours"),
        ({"tick": ""}, "nothing to tick off"),
        ({"tick": "doctor: `fp32`, `that-is-gone`"}, "no check that-is-gone"),
        ({"tick": "`megatron-rl doctor --only fp32,gone`"}, "no check gone"),
    ],
)
def test_a_row_that_does_not_hold_is_seen(changes, problem):
    complaints = problems(Row(**(GOOD.__dict__ | changes)), FOLDERS)
    assert len(complaints) == (problem is not None)
    assert problem is None or problem in complaints[0]
