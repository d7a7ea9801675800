"""Two commits side by side: each side runs its own package, and what got worse fails."""

import subprocess
from pathlib import Path

import pytest

from tools.bench.compare import compare_times, main

CASES = """
import importlib
print("libraries print")
def of(name):
    value = getattr(importlib.import_module("megatron_rl"), name)
    return lambda: value
CASES = {"cost": lambda: of("COST"), "noise": lambda: of("NOISE"), "new": lambda: of("later")}
CASES["timed"] = lambda: lambda: None
"""


@pytest.fixture
def repository(tmp_path) -> Path:
    """Three commits of a package that costs 5, then 7, then cannot be asked."""
    folder = tmp_path / "repository"
    (folder / "megatron_rl").mkdir(parents=True)

    def git(*arguments: str) -> None:
        author = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *author, *arguments], cwd=folder, check=True, capture_output=True)

    git("init", "-b", "main")
    for text in ("COST, NOISE, later = 5, 3, 1", "COST, NOISE, later = 7, 3, 1", "COST, NOISE = 7, 3"):
        (folder / "megatron_rl" / "__init__.py").write_text(f"{text}\n")
        git("add", ".")
        git("commit", "-m", text)
    (tmp_path / "cases.py").write_text(CASES)
    return folder


def compare(repository: Path, *arguments: str) -> int:
    folder = repository.parent
    fixed = ["--cases", str(folder / "cases.py"), "--repository", str(repository), "--rounds", "1"]
    return main([*arguments, *fixed, "--allow", "inf"])


@pytest.mark.parametrize(
    ("commits", "case", "status", "said"),
    [
        (("HEAD~2", "HEAD~1"), "cost", 1, "FAILED cost: 7, 5 on the older side"),
        (("HEAD~1", "HEAD~2"), "cost", 0, "0.7143"),
        (("HEAD~2", "HEAD~1"), "noise", 0, "1.0000"),
        (("HEAD~1", "HEAD"), "new", 1, "FAILED new: newer: AttributeError"),
        (("HEAD", "HEAD~1"), "new", 0, "not compared: older: AttributeError"),
        (("HEAD~1",), "cost", 0, "newer: working tree"),
        (("HEAD~1", "HEAD"), "timed", 0, " ms"),
    ],
)
def test_what_got_worse_fails(repository, capsys, commits, case, status, said):
    assert compare(repository, *commits, "--only", case) == status
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("newer", "fails"),
    [([1.0] * 8, False), ([1.2] * 8, True), ([1.0] * 3 + [1.5] * 5, False), ([1.0] + [1.5] * 7, True)],
)
def test_a_case_is_slower_where_three_of_four_rounds_are(newer, fails):
    outcome = compare_times("case", [1.0] * 8, newer, allow=1.1)
    assert bool(outcome.problem) == fails


def test_a_commit_or_a_case_that_there_is_not(repository, capsys):
    with pytest.raises(SystemExit, match="nowhere"):
        compare(repository, "nowhere")
    with pytest.raises(SystemExit):
        compare(repository, "HEAD", "--only", "nothing")
    assert "--only nothing: one of cost, noise, new, timed" in capsys.readouterr().err
