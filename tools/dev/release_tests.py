"""Our tests of the patches, under each release of Megatron-Core.

    python -m tools.dev.release_tests                           every release with a pinned wheel
    python -m tools.dev.release_tests --releases 0.17.1,0.18.2
    python -m tools.dev.release_tests --checkout MEGATRON_LM    the main branch as well

A release is its pinned wheel, unpacked, with all series applied, before the packages of this environment: nothing is
installed, and this Python runs it. Wheels for another Python do, because what they have compiled is the index of data
sets, which no test here reads. From 0.18 on Megatron-Core imports Triton: the one that `tools/setup_tests.sh` fetched
is put beside it.

``--checkout`` is a git repository of Megatron-LM: of what has no wheel it gives the commit that UPSTREAM names.

Prints a Markdown table. Exit status 1: a test fails.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_rl.patching import releases, states, upstream
from megatron_rl.patching.releases import Target
from megatron_rl.patching.series import PURPOSES, Series

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"
BESIDE_TRAILERS = {
    "routing": ("tests/patches/test_router_replay_units.py", "tests/parallel/test_router_replay.py"),
    "precision": ("tests/parallel/test_learner_precision.py",),
    "cpu": (
        "tests/patches/test_cpu.py",
        "tests/parallel/test_patch_layouts.py",
        "tests/parallel/test_patch_checkpoint.py",
    ),
}
"""Tests of a purpose beside those that its patches name."""
OF_THE_ENVIRONMENT = "tests/patches/test_length_decay_patch.py::test_the_series_is_applied_only_when_named"
"""Asks what is applied to the package of the environment."""
LIMIT_S = 1800  # of one release


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--releases", help="versions, with commas between (default: all with a pinned wheel)")
    parser.add_argument("--checkout", type=Path, help="a git repository of Megatron-LM")
    options = parser.parse_args()
    pinned = {series.pins["Version"]: series for series in known_releases(options.checkout is not None)}
    wanted = options.releases.split(",") if options.releases else list(pinned)
    if unknown := [version for version in wanted if version not in pinned]:
        parser.error(f"--releases: found {', '.join(unknown)}; pinned are {', '.join(pinned)}")
    columns = [f"`{purpose}`" for purpose in PURPOSES]
    print(f"| release | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    bad = False
    for version in wanted:
        with tempfile.TemporaryDirectory(prefix="release-") as folder:
            cells, failures = row_of(pinned[version], options.checkout, Path(folder))
        print(f"| {version} | {' | '.join(cells)} |", flush=True)
        print("".join(f"{version}: {line}\n" for line in failures), file=sys.stderr, end="", flush=True)
        bad |= bool(failures)
    return 1 if bad else 0


def known_releases(without_wheel: bool) -> list[Series]:
    """The series of Megatron's releases that pin a wheel, and perhaps of what has none."""
    folder = ROOT / "patches"
    every = (Series.read(folder / name) for name in releases.names(folder))
    return [series for series in every if series.purposes and (series.archives or without_wheel)]


def row_of(series: Series, checkout: Path | None, folder: Path) -> tuple[list[str], list[str]]:
    """A cell for each purpose, and what fails."""
    if series.archives or checkout is None:
        root = upstream.unpack(upstream.fetch(series, CACHE / "patches", None), folder / "wheel", series.pins["Root"])
    else:
        root = unpack_commit(series, checkout, folder / "tree", "megatron")
        about = root / f"megatron_core-{series.pins['Version']}.dist-info"
        about.mkdir()
        text = f"Metadata-Version: 2.1\nName: {series.package}\nVersion: {series.pins['Version']}\n"
        (about / "METADATA").write_text(text)
    states.apply_or_revert(series, Target(root, None), False, series.purposes)
    add_triton(root)
    files = {purpose: tests_of(series, purpose) for purpose in series.purposes}
    outcomes = run_ours(root, sorted(set().union(*files.values())), folder / "ours.xml")
    cells = [cell(outcomes, files[purpose]) if purpose in files else "–" for purpose in PURPOSES]
    return cells, [test for test, outcome in outcomes.items() if outcome == "failed"]


def add_triton(root: Path) -> None:
    """Put the tests' Triton beside Megatron's files, where this environment has none."""
    for part in (CACHE / "transformer-engine").glob("triton*"):
        (root / part.name).symlink_to(part)


def tests_of(series: Series, purpose: str) -> set[str]:
    """The files of our tests that say whether the patches of ``purpose`` do what they are for."""
    named = {patch.trailers["Test"] for patch in series.of([purpose]) if patch.trailers}
    return named | set(BESIDE_TRAILERS.get(purpose, ()))


def run_ours(root: Path, files: Sequence[str], report: Path) -> dict[str, str]:
    """Test → "passed", "skipped" or "failed", with the package below ``root`` in the place of the installed one."""
    environment = os.environ | {"PYTHONPATH": f"{root}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not slow", "-p", "no:cacheprovider"]
    command += ["--tb=short", f"--junitxml={report}", f"--deselect={OF_THE_ENVIRONMENT}", *files]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode not in (0, 1) or not report.is_file():
        raise SystemExit(f"{root}: our tests did not run:\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
    if done.returncode:
        print(done.stdout[-8000:], file=sys.stderr)
    return outcomes_of(report)


def outcomes_of(report: Path) -> dict[str, str]:
    """Test → outcome, from pytest's report in JUnit's form."""
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        told = {child.tag for child in case}
        outcome = "failed" if told & {"failure", "error"} else "skipped" if "skipped" in told else "passed"
        outcomes[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return outcomes


def cell(outcome_of: Mapping[str, str], files: set[str]) -> str:
    """How many tests of ``files`` pass, and of how many if not all do."""
    modules = {file.removesuffix(".py").replace("/", ".") for file in files}
    outcomes = [outcome for test, outcome in outcome_of.items() if module_of(test) in modules and outcome != "skipped"]
    good = outcomes.count("passed")
    return str(good) if good == len(outcomes) else f"{good} of {len(outcomes)}"


def module_of(test: str) -> str:
    """The module of a test, whose name may go on with a class."""
    return re.sub(r"\.[A-Z]\w*$", "", test.split("::")[0])


def unpack_commit(series: Series, checkout: Path, folder: Path, *parts: str) -> Path:
    """``folder`` with these parts of the release's commit."""
    folder.mkdir()
    command = ["git", "-C", checkout, "archive", commit_of(series, checkout), *parts]
    archive = subprocess.run(command, check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    return folder


def commit_of(series: Series, checkout: Path) -> str:
    """The commit that UPSTREAM names, the tag of the release, else the branch of its line."""
    version = series.pins["Version"]
    named = re.findall(r"at ([0-9a-f]{40})", series.pins["Source"])
    branch = f"core_r{releases.line(version)}.0"
    for name in (*named, f"core_v{version}", branch, f"origin/{branch}"):
        command = ["git", "-C", checkout, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
        if subprocess.run(command, capture_output=True).returncode == 0:
            return name
    raise SystemExit(f"{checkout}: has neither {' nor '.join((*named, f'core_v{version}', branch))}")


if __name__ == "__main__":
    sys.exit(main())
