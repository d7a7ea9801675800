"""docs/engines: each rule has a proof that is there, and what can be read of it here is read again."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

from megatron_rl.doctor.checks import CHECKS
from tests.support import te

ROOT = Path(__file__).parents[3]
PAGES = {"first-contact": 4, "rules": 3}
"""Page → its columns: rule, relied on in, proof; on the first page what a person does on a node."""
UNPROVEN = re.compile(r"\bunproven\b")
WHEEL = re.compile(r"(?:wheel|sdist) `([a-z0-9-]+ \d[\w.+]*)`")
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(test_\w+))?`")
PLACE = re.compile(
    r"`((?:megatron\.core|vllm|torch|transformer_engine)(?:\.\w+)+|(?!tests/)\w+/[\w./-]+\.(?:py|hpp|h|so\.2))`"
    r"(?:: ((?:`[^`]+`(?:, )?)+))?"
)
"""A function or a file of a package, and the words that stand there."""
OURS = re.compile(r"`((?:megatron_rl|slurm|tools|tests|patches)/[\w./-]+|Containerfile|requirements[\w-]*\.txt)`")
VARIABLE = re.compile(
    r"\b(?:NCCL|VLLM|FLASHINFER|NVTE|TRITON|CUBLAS|TORCH_NCCL|TORCH_FR|TORCHINDUCTOR|TORCH_EXTENSIONS|PYTORCH|NVIDIA|CUDA"
    r"|DG|TILELANG|QUACK|HUMMING)_[A-Z][A-Z0-9_]*[A-Z0-9]\b"
)
BACKENDS = {"TRITON_ATTN", "VLLM_DTYPE", "CUDA_FILE"}  # no variables
FOLDERS = [*map(Path, sys.path), te.FOLDER]


@dataclass(frozen=True)
class Row:
    line: int
    rule: str
    ours: str
    proof: str
    tick: str = "-"


def rows_of(page: str) -> list[Row]:
    rows = []
    for number, line in enumerate((ROOT / f"docs/engines/{page}.md").read_text(encoding="utf-8").splitlines(), 1):
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("|") and cells[0] != "rule" and not set(line) <= set("|- "):
            assert len(cells) == PAGES[page], f"line {number}: {len(cells)} cells: {line}"
            rows.append(Row(number, *cells))
    return rows


ROWS = [row for page in PAGES for row in rows_of(page)]


def names_in(nodes: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """What a module or class defines, also in the branches of an `if` or `try`."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
            continue
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        yield from ((target.id, node) for target in targets if isinstance(target, ast.Name))
        for part in ("body", "orelse", "handlers", "finalbody"):
            yield from names_in(getattr(node, part, []))


@cache
def text_at(place: str) -> str | None:
    """The text of a file of a package, or of what a module defines; None where it is not there. Nothing is imported."""
    for folder in FOLDERS:
        if "/" in place:
            if (folder / place).is_file():
                return (folder / place).read_bytes().decode(errors="replace")
            continue
        parts = place.split(".")
        for k in range(len(parts), 0, -1):
            path = folder.joinpath(*parts[:k])
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            if not file.is_file():
                continue
            text = file.read_text(encoding="utf-8")
            inside, lines = ast.parse(text).body, text.splitlines()
            for part in parts[k:]:
                if (node := dict(names_in(inside)).get(part)) is None:
                    break
                inside, lines = getattr(node, "body", []), text.splitlines()[node.lineno - 1 : node.end_lineno]
            else:
                return "\n".join(lines)
            break
    return None


def absent(place: str) -> bool:
    """Whether the package of a place is not installed."""
    package = re.split(r"[./]", place)[0]
    return not any((folder / package).is_dir() for folder in FOLDERS)


def problems(row: Row) -> list[str]:
    tests, places, complaints = TEST.findall(row.proof), PLACE.findall(row.proof), []
    if not (tests or places or WHEEL.search(row.proof) or UNPROVEN.search(row.proof)):
        complaints.append('no test, no name of a package, no wheel and not the word "unproven"')
    for file, function in tests:
        if not (ROOT / file).is_file():
            complaints.append(f"no file {file}")
        elif function and f"def {function}(" not in (ROOT / file).read_text():
            complaints.append(f"{file} has no {function}")
    here = {place: text_at(place) for place, _ in places if not absent(place)}
    complaints += [f"no {place} in the installed packages" for place, text in here.items() if text is None]
    for place, words in places:
        wanted = re.findall(r"`([^`]+)`", words) if here.get(place) else []
        complaints += [f"{place} has not {word}" for word in wanted if word not in here[place]]
    if len(here) == len(places) > 0:
        everything = "\n".join(filter(None, here.values()))
        complaints += [f"no {name} there" for name in VARIABLE.findall(row.rule) if name not in everything]
    if not (files := OURS.findall(row.ours)):
        complaints.append("no file of ours")
    complaints += [f"no file {file}" for file in files if not (ROOT / file).exists()]
    if not row.tick:
        complaints.append("nothing to tick off")
    known = {check.name for check in CHECKS}
    for names in re.findall(r"doctor: ((?:`[a-z0-9-]+`(?:, )?)+)", row.tick):
        complaints += [
            f"the doctor has no check {name}" for name in re.findall(r"[a-z0-9-]+", names) if name not in known
        ]
    return complaints


@pytest.mark.parametrize("row", ROWS, ids=lambda row: re.sub(r"\W+", "-", row.rule)[:60])
def test_a_rule_stands_where_it_was_read(row):
    assert problems(row) == []


def test_no_rule_stands_twice():
    assert len({row.rule for row in ROWS}) == len(ROWS)


def test_every_variable_of_theirs_that_the_code_names_has_a_rule():
    named = set()
    listed = subprocess.run(["git", "ls-files", "megatron_rl", "slurm"], cwd=ROOT, capture_output=True, text=True)
    for file in map(Path, listed.stdout.split()):
        text = (ROOT / file).read_text() if file.suffix in (".py", ".sh") else ""
        if file.suffix == ".py":  # what it says, not how its constants are called
            nodes = ast.walk(ast.parse(text))
            text = " ".join(n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))
        named |= set(VARIABLE.findall(text))
    assert len(named) > 30
    ruled = {name for row in ROWS for name in VARIABLE.findall(f"{row.rule} {row.proof}")}
    assert sorted(named - ruled - BACKENDS) == []


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
        ({"proof": "`torch.cuda.graphs.CUDAGraph`: `capture_begin`"}, None),
        ({"proof": "wheel `nobody 1.0`, `nobody/lib/that_is_absent.so.2`: `x`"}, None),
        ({"proof": "it is well known"}, "no test, no name"),
        ({"proof": "`tests/unit/docs/test_first_contact.py::test_that_is_gone`"}, "has no test_that_is_gone"),
        ({"proof": "`tests/unit/docs/test_that_is_gone.py`"}, "no file tests"),
        ({"proof": "`torch.cuda.graphs.that_is_gone`"}, "no torch.cuda.graphs.that_is_gone"),
        ({"proof": "`torch.cuda.graphs.CUDAGraph`: `words that are gone`"}, "has not words that are gone"),
        ({"proof": "`torch/that_is_gone.py`"}, "no torch/that_is_gone.py"),
        ({"proof": "`torch/cuda/graphs.py`", "rule": "VLLM_GONE is read"}, "no VLLM_GONE there"),
        ({"ours": "`megatron_rl/that_is_gone.py`"}, "no file megatron_rl"),
        ({"ours": "nowhere"}, "no file of ours"),
        ({"tick": ""}, "nothing to tick off"),
        ({"tick": "doctor: `fp32`, `that-is-gone`"}, "no check that-is-gone"),
    ],
)
def test_a_row_that_does_not_hold_is_seen(changes, problem):
    complaints = problems(replace(GOOD, **changes))
    assert len(complaints) == (problem is not None), complaints
    assert problem is None or problem in complaints[0]
