"""Compares the speed of two commits, side by side, round by round, in one run.

    python -m tools.bench.compare --rounds 15 --allow 1.10
    python -m tools.bench.compare OLDER NEWER --only update
    python -m tools.bench.compare --noise         # HEAD against itself: which differences can be seen here?
    python -m tools.bench.compare --accept        # the counts and the commit of HEAD become the baseline

OLDER is a commit (default: that of tools/bench/baseline.json), NEWER another (default: the working tree). Each gets a
process and a copy of its files; the cases (tools/bench/lib/cases.py) are those of the working tree for both. Sides
alternate within a round, and a ratio is of one round: what slows the machine slows both. Processor time, so that other
programs count little.

A case fails where even the lower quarter of its ratios is above --allow, or where a count is above the other side's.
With the baseline as the older side, counts are also compared with the file. Exit status 1 where a case fails.
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
BASELINE = Path(__file__).with_name("baseline.json")
LIB = Path(__file__).with_name("lib")
WORKING_TREE = "working tree"


@dataclass
class Outcome:
    """A case on both sides, older first. ``problem``: why it fails, else ""."""

    name: str
    shown: tuple[str, str, str]
    problem: str = ""
    count: float | None = None
    band: tuple[float, float] | None = None  # middle half of the ratios newer / older


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
    return Outcome(name, (f"{older:,.0f}", f"{newer:,.0f}", f"{newer / older:.4f}" if older else ""), problem, newer)


def compare_times(name: str, older: Sequence[float], newer: Sequence[float], allow: float) -> Outcome:
    """Return the outcome; it fails if the lower quarter of the ratios newer / older is above ``allow``."""
    ratios = sorted(new / old for old, new in zip(older, newer, strict=True))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    shown = (f"{1e3 * sorted(older)[len(older) // 2]:.2f} ms", f"{1e3 * sorted(newer)[len(newer) // 2]:.2f} ms")
    problem = f"three of four rounds are more than {low:.2f} times as slow" if low > allow else ""
    return Outcome(name, (*shown, spread(newer, older)), problem, band=(low, high))


def noise(outcomes: Sequence[Outcome], allow: float) -> list[str]:
    """Return a line per case from a comparison of a commit with itself.

    A slowdown by s multiplies every ratio by s, so that the case fails from s = ``allow`` / (lower quarter) on.
    """
    return [
        f"{outcome.name:20}{outcome.band[0]:.3f} to {outcome.band[1]:.3f} without a difference; fails from "
        f"{allow / outcome.band[0]:.3f} times as slow"
        for outcome in outcomes
        if outcome.band is not None
    ]


def against_baseline(outcomes: Sequence[Outcome], counts: dict[str, float]) -> None:
    """Mark a case as failed if its count is above that in the file."""
    for outcome in outcomes:
        if outcome.count is not None and outcome.count > counts.get(outcome.name, outcome.count):
            outcome.problem = f"{outcome.count:,.0f}, {counts[outcome.name]:,.0f} in {BASELINE.name}"


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
    parser.add_argument("--accept", action="store_true", help="write the baseline")
    parser.add_argument("--noise", action="store_true", help="compare a commit (default: HEAD) with itself")
    parser.add_argument("--cases", type=Path, default=LIB / "cases.py", help=argparse.SUPPRESS)
    parser.add_argument("--repository", type=Path, default=REPOSITORY, help=argparse.SUPPRESS)
    parser.add_argument("--baseline", type=Path, default=BASELINE, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if len(options.commits) > (1 if options.noise else 2) or options.rounds < 1:
        parser.error("at most two commits (with --noise one), and at least one round")
    if options.noise and options.accept:
        parser.error("--noise measures, --accept writes the baseline; give one of them")
    baseline = (
        json.loads(options.baseline.read_text()) if options.baseline.exists() else {"commit": "HEAD", "counts": {}}
    )
    commit_names = options.commits
    if options.accept or options.noise:
        commit_names = 2 * (commit_names if options.noise and commit_names else ["HEAD"])
    commits = (
        commit_names[0] if commit_names else baseline["commit"],
        commit_names[1] if len(commit_names) > 1 else WORKING_TREE,
    )
    all_names = names_of(options.cases)
    if unknown := [name for name in options.only or () if name not in all_names]:
        parser.error(f"--only {unknown[0]}: one of {', '.join(all_names)}")
    print(f"older: {commits[0]}, newer: {commits[1]}")
    outcomes = measure(commits, options.cases, options.only or all_names, options)
    if options.accept:
        return accept(options, outcomes)
    if not commit_names:
        against_baseline(outcomes, baseline["counts"])
    if options.noise:
        print("\n".join(["", *noise(outcomes, options.allow)]))
    failed = [outcome for outcome in outcomes if outcome.problem]
    for outcome in failed:
        print(f"FAILED {outcome.name}: {outcome.problem}")
    return int(bool(failed))


def accept(options: argparse.Namespace, outcomes: Sequence[Outcome]) -> int:
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=options.repository, capture_output=True, text=True, check=True
    )
    counts = {outcome.name: outcome.count for outcome in outcomes if outcome.count is not None}
    options.baseline.write_text(json.dumps({"commit": head.stdout.strip(), "counts": counts}, indent=1) + "\n")
    print(f"wrote {options.baseline}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
