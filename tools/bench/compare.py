"""Compares the speed of two commits, side by side, round by round, in one run.

    python -m tools.bench.compare --rounds 15 --allow 1.10
    python -m tools.bench.compare OLDER NEWER --only update

OLDER is a commit (default: HEAD), NEWER another (default: the working tree). Each gets a process and a copy of its
files; the cases (tools/bench/lib/cases.py) are those of the working tree for both. Sides alternate within a round, and
a ratio is of one round: what slows the machine slows both. Processor time, so that other programs count little.

A case fails where even the lower quarter of its ratios is above --allow, or where a count is above the other side's.
Exit status 1 where a case fails. A commit against itself shows which differences can be seen.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.patching.upstream import SAFELY
from tools.bench.lib.timing import spread

REPOSITORY = Path(__file__).resolve().parents[2]
LIB = Path(__file__).with_name("lib")
WORKING_TREE = "working tree"


@dataclass
class Outcome:
    """A case on both sides, older first. ``problem``: why it fails, else ""."""

    name: str
    shown: tuple[str, str, str]
    problem: str = ""


class Side:
    """The process of one commit."""

    def __init__(self, tree: Path, cases: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(LIB / "side.py"), str(cases)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, env=environment, cwd=tree, text=True, **pipes)

    def round(self, name: str) -> dict[str, Any]:
        """Return one round of a case: `seconds`, `count` or `error`."""
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": f"its process ended with status {self._process.wait()}"}

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def files_of(commit: str, folder: Path, repository: Path = REPOSITORY) -> Path:
    """Unpack the files of ``commit`` below ``folder`` and return it; the working tree is used in place."""
    if commit == WORKING_TREE:
        return repository
    archived = subprocess.run(["git", "archive", commit], cwd=repository, capture_output=True, check=False)
    if archived.returncode:
        raise SystemExit(f"{commit}: {archived.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archived.stdout)) as archive:
        archive.extractall(folder, **SAFELY)
    return folder


def compare(sides: Sequence[Side], name: str, rounds: int, allow: float) -> Outcome:
    """One case, round by round. The first round warms up and does not count."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        answers: dict[int, dict[str, Any]] = {}
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            answers[side] = sides[side].round(name)
        errors = [
            f"{which}: {answers[i]['error']}" for i, which in enumerate(("older", "newer")) if "error" in answers[i]
        ]
        if errors:
            is_new = "error" not in answers[1]  # the older commit may lack what the case calls
            return Outcome(name, ("", "", "not compared: " + "; ".join(errors)), "" if is_new else errors[-1])
        if "count" in answers[0]:
            return compare_counts(name, answers[0]["count"], answers[1]["count"])
        if number:
            seconds[0].append(answers[0]["seconds"])
            seconds[1].append(answers[1]["seconds"])
    return compare_times(name, *seconds, allow)


def compare_counts(name: str, older: float, newer: float) -> Outcome:
    problem = f"{newer:,.0f}, {older:,.0f} on the older side" if newer > older else ""
    return Outcome(name, (f"{older:,.0f}", f"{newer:,.0f}", f"{newer / older:.4f}" if older else ""), problem)


def compare_times(name: str, older: Sequence[float], newer: Sequence[float], allow: float) -> Outcome:
    """Return the outcome; it fails if the lower quarter of the ratios newer / older is above ``allow``."""
    ratios = sorted(new / old for old, new in zip(older, newer, strict=True))
    low = ratios[len(ratios) // 4]
    shown = (f"{1e3 * sorted(older)[len(older) // 2]:.2f} ms", f"{1e3 * sorted(newer)[len(newer) // 2]:.2f} ms")
    problem = f"three of four rounds are more than {low:.2f} times as slow" if low > allow else ""
    return Outcome(name, (*shown, spread(newer, older)), problem)


def names_of(cases: Path) -> list[str]:
    spec = importlib.util.spec_from_file_location("cases", cases)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.CASES)


def measure(commits: tuple[str, str], cases: Path, names: Sequence[str], options: argparse.Namespace) -> list[Outcome]:
    """Every case of ``names`` on both commits; a line is printed as soon as it is known."""
    with tempfile.TemporaryDirectory() as folder:
        trees = [files_of(commit, Path(folder, str(i)), options.repository) for i, commit in enumerate(commits)]
        sides = [Side(tree, cases) for tree in trees]
        outcomes = []
        print(f"{'case':20}{'older':>14}{'newer':>14}  newer / older (middle half of the rounds)")
        for name in names:
            outcomes.append(compare(sides, name, options.rounds, options.allow))
            older, newer, ratio = outcomes[-1].shown
            print(f"{name:20}{older:>14}{newer:>14}  {ratio}", flush=True)
        for side in sides:
            side.close()
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs="*", metavar="COMMIT", help="older, then newer")
    parser.add_argument("--only", action="append", metavar="CASE", help="this case; may be repeated")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--allow", type=float, default=1.10, help="ratio up to which a case passes (default 1.10)")
    parser.add_argument("--cases", type=Path, default=LIB / "cases.py", help=argparse.SUPPRESS)
    parser.add_argument("--repository", type=Path, default=REPOSITORY, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if len(options.commits) > 2 or options.rounds < 1:
        parser.error("at most two commits, and at least one round")
    older, newer = (*options.commits, *("HEAD", WORKING_TREE)[len(options.commits) :])
    all_names = names_of(options.cases)
    if unknown := [name for name in options.only or () if name not in all_names]:
        parser.error(f"--only {unknown[0]}: one of {', '.join(all_names)}")
    print(f"older: {older}, newer: {newer}")
    failed = [
        outcome
        for outcome in measure((older, newer), options.cases, options.only or all_names, options)
        if outcome.problem
    ]
    for outcome in failed:
        print(f"FAILED {outcome.name}: {outcome.problem}")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
