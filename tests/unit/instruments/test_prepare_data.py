"""`megatron-rl prepare-data` on files in the public layout of DAPO-Math-17k and AIME-2024."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatron_rl.config.data import DataSourceConfig
from megatron_rl.data.source import read_problems
from megatron_rl.instruments.prepare_data import OverlapIndex, bare_problem, normalise
from megatron_rl.rewards.math_task import classify
from tests.support.patience import PATIENCE_S
from tests.support.tiny import REPOSITORY

SHARED = REPOSITORY.parent / "shared" / "data"
BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'

SUM = "Find the sum of all positive integers $n$ such that $n^2 - 19n + 99$ is a perfect square."
WALK = (
    "Every morning Aya goes for a $9$-kilometer-long walk and stops at a coffee shop afterwards, which takes her long."
)
TORN = "How many edges does a cube with one corner cut off have?"
ODD = "Name the smallest set that contains itself."


def row(problem: str, answer: str, index: str = "0") -> dict:
    """One row as verl's files have it."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": BEFORE + problem + AFTER, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


@pytest.fixture
def dapo(tmp_path) -> Path:
    rows = [row(SUM, "38", f"a{i}") for i in range(3)]
    rows += [row(WALK, "204"), row(TORN, "15"), row(TORN, "14"), row(TORN, "15.0")]
    # Copies that are spelled otherwise: white space, case, LaTeX spacing, a full-width digit.
    rows += [row(SUM.replace("$n$", r"$\, n \,$").replace(" such", "  SUCH").replace("19", "１9"), "38")]
    rows += [row(ODD, "x" * 3000)]
    file = tmp_path / "dapo.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


@pytest.fixture
def aime(tmp_path) -> Path:
    file = tmp_path / "aime.jsonl"
    near = WALK.replace("Every morning Aya", "Each day Ben")
    rows = [row(near, "204"), row("What is the value of the tens digit of 2024?", "2")]
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return file


def run(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "megatron_rl", "prepare-data", *map(str, arguments)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_S)


def test_public_file_becomes_unique_checked_problems(dapo, aime, tmp_path):
    out = tmp_path / "out.jsonl"
    done = run(dapo, "--against", aime, "--out", out)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    assert (report["rows"], report["instructions_stripped"], report["unique"]) == (9, 9, 4)
    assert report["most_copies"] == 4
    (torn,) = report["conflicts"]["examples"]
    assert torn["answers"] == {"15": 1, "14": 1, "15.0": 1}
    assert report["golds"]["kinds"] == {"number": 2, "expression": 0, "text": 0, "spelling": 0, "invalid": 1}
    assert report["overlap"]["files"]["aime.jsonl"] | {"examples": []} == {
        "problems": 2,
        "exact": 0,
        "near": 1,
        "examples": [],
    }
    assert report["output"]["rows"] == 1
    for line in ("9 inside a known instruction", "copies of one: at most 4", "0 the same, 1 nearly, of 2 problems"):
        assert line in done.stdout
    (problem,) = read_problems(DataSourceConfig(path=str(out)))
    assert (problem.question, problem.answer, problem.data_source) == (SUM, "38", "math_dapo")
    assert problem.extra == {"index": "a0", "copies": 4}


def test_the_same_bytes_again(dapo, tmp_path):
    for name in ("one.jsonl", "two.jsonl"):
        assert run(dapo, "--out", tmp_path / name).returncode == 0
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()
    problems = list(read_problems(DataSourceConfig(path=str(tmp_path / "one.jsonl"))))
    assert [(problem.question, problem.answer) for problem in problems] == [(SUM, "38"), (WALK, "204")]
    assert len({problem.id for problem in problems}) == 2


def test_another_kind_of_file_is_refused(dapo):
    done = run(dapo, "--out", "x.txt")
    assert done.returncode == 2
    assert "unknown kind of file; allowed: .jsonl" in done.stderr


def test_what_counts_as_the_same_problem():
    assert bare_problem(BEFORE + SUM + AFTER) == (SUM, True)
    assert bare_problem(f"{BEFORE}{SUM}") == ((BEFORE + SUM).strip(), False)
    assert normalise("Let $x \\le 2$.") != normalise("Let $x \\ge 2$.")
    assert normalise(r"\left( 1,\! 2 \right)") == normalise("( 1, 2 )")
    index = OverlapIndex([SUM, "Find x."])
    assert index.kind_of(SUM.upper()) == "exact"
    assert index.kind_of(f"Let m be the least prime. {SUM} Multiply it by m.") == "near"
    assert index.kind_of("Find the sum of all positive integers $n$ below 10.") is None
    assert index.kind_of("Find x. Then find y.") is None  # too short for runs of words: only the same counts


def test_gold_answers_are_told_apart():
    kinds = classify(
        ["38", "-1{,}234.5", r"\frac{\pi}{3}", r"(1, \sqrt{2})", r"\text{east}", "Evelyn", r"\lim_{n} a_n", ""]
    )
    assert [kinds[g] for g in ("38", "-1{,}234.5", r"\frac{\pi}{3}", r"(1, \sqrt{2})")] == [
        "number",
        "number",
        "expression",
        "expression",
    ]
    assert [kinds[g] for g in (r"\text{east}", "Evelyn", r"\lim_{n} a_n", "")] == [
        "text",
        "text",
        "spelling",
        "invalid",
    ]


@pytest.mark.skipif(not (SHARED / "aime24.jsonl").is_file(), reason="../shared/data/aime24.jsonl is absent")
def test_real_evaluation_sets_are_found_in_a_contaminated_file(tmp_path):
    problems = [json.loads(line) for line in (SHARED / "aime24.jsonl").read_text().splitlines()]
    file = tmp_path / "train.jsonl"
    rows = [row(p["problem"].replace("$", " $ "), p["answer"]) for p in problems] + [row(SUM, "38")]
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    done = run(file, "--against", SHARED / "aime24.jsonl", SHARED / "math500.jsonl", "--out", tmp_path / "out.jsonl")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    assert report["overlap"]["files"]["aime24.jsonl"]["exact"] == 30
    assert report["overlap"]["files"]["math500.jsonl"]["exact"] == 0
    assert report["output"]["rows"] == 1
