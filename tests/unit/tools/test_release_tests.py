"""What is run under each release of Megatron-Core, and how outcomes are counted."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.tiny import REPOSITORY
from tools.dev import release_tests

SERIES = {series.pins["Version"]: series for series in release_tests.known_releases(True)}

REPORT = """<testsuites><testsuite>
<testcase classname="tests.parallel.test_a" name="one"/>
<testcase classname="tests.parallel.test_a.TestMore" name="two"><skipped/></testcase>
<testcase classname="tests.parallel.test_a.TestMore" name="three"><failure/></testcase>
<testcase classname="tests.parallel.test_b" name="four"><error/></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize("version", SERIES)
def test_each_series_of_a_release_has_tests_that_exist(version):
    for purpose in SERIES[version].purposes:
        files = release_tests.tests_of(SERIES[version], purpose)
        assert files
        assert all((REPOSITORY / file).is_file() for file in files)
    assert release_tests.OF_THE_ENVIRONMENT.split("::")[0] in release_tests.tests_of(SERIES[version], "schedule")
    learners = release_tests.BESIDE_TRAILERS["precision"][0]
    assert (learners in release_tests.tests_of(SERIES[version], "precision")) == (version != "0.15.3")


def test_outcomes_are_counted_by_file(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    outcomes = release_tests.outcomes_of(tmp_path / "report.xml")
    assert list(outcomes.values()) == ["passed", "skipped", "failed", "failed"]
    assert release_tests.cell(outcomes, {"tests/parallel/test_a.py"}) == "1 of 2"
    assert release_tests.cell(outcomes, {"tests/parallel/test_a.py", "tests/parallel/test_b.py"}) == "1 of 3"
    assert release_tests.cell({"tests.test_c::one": "passed"}, {"tests/test_c.py"}) == "1"


def test_megatrons_tests_are_those_of_files_that_patches_change(tmp_path):
    folder = tmp_path / "tests" / "unit_tests" / "moe"
    folder.mkdir(parents=True)
    (folder / "test_router.py").write_text("from megatron.core.transformer.moe.router import TopKRouter\n")
    (folder / "test_package.py").write_text("from megatron.core.transformer.moe import experts, router\n")
    (folder / "test_other.py").write_text("from megatron.core.transformer.moe.router_of_others import x\n")
    changed = SERIES["0.16.1"].paths
    touched = release_tests.touched_tests(changed, tmp_path, "")
    assert touched == ["tests/unit_tests/moe/test_package.py", "tests/unit_tests/moe/test_router.py"]
    assert release_tests.touched_tests(changed, tmp_path, "models,moe/test_r") == touched[1:]
    assert release_tests.touched_tests(changed, tmp_path, "dist_checkpointing") == []


def test_a_test_that_the_patches_lose_is_named(monkeypatch, tmp_path):
    """One that fails beside others alone, as on a busy machine, is not lost."""
    before = dict.fromkeys(("f.py::a", "f.py::b", "g.py::busy"), "passed") | {"f.py::c": "failed", "h.py::d": "skipped"}
    after = {"f.py::a": "passed", "f.py::b": "failed", "f.py::c": "passed", "g.py::busy": "failed"}
    ran = []

    def run_theirs(root, files):
        ran.append((root.name, list(files)))
        told = before if root.name == "before" else after | ({"g.py::busy": "passed"} if len(files) == 1 else {})
        return {test: outcome for test, outcome in told.items() if test.split("::")[0] in files}

    monkeypatch.setattr(release_tests, "unpack_commit", lambda series, checkout, folder, *parts: folder)
    monkeypatch.setattr(release_tests, "touched_tests", lambda *arguments: ["f.py", "g.py", "h.py"])
    monkeypatch.setattr(release_tests.states, "apply_or_revert", lambda *arguments: None)
    monkeypatch.setattr(release_tests, "add_triton", lambda root: None)
    monkeypatch.setattr(release_tests, "run_theirs", run_theirs)
    cells, lost = release_tests.row_of_theirs(SERIES["0.16.1"], tmp_path, "", tmp_path)
    assert (cells, lost) == (["3", "1", "1"], ["f.py::b"])
    assert ran[:2] == [("before", ["f.py", "g.py", "h.py"]), ("after", ["f.py", "g.py"])]


ENDS = """
import os

def test_one():
    pass

def test_two():
    os._exit(7)

def test_three():
    pass
"""


@pytest.mark.slow
def test_the_files_after_one_that_ends_the_process_run(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(release_tests, "ROOT", tmp_path)  # without the plugin's torch: one that only notes
    (programs := tmp_path / "tests" / "patches" / "programs").mkdir(parents=True)
    source = (REPOSITORY / "tests" / "patches" / "programs" / "on_cpu.py").read_text()
    notes = source[source.index("def note(") : source.index("def pytest_load")]
    hooks = source[source.index("def pytest_collectstart") :]
    (programs / "on_cpu.py").write_text(f"import json, os\nfrom typing import Any\n{notes}{hooks}")
    names = ["a/test_a.py", "a/test_b.py", "b/test_a.py", "b/test_c.py"]
    for name, text in zip(names, (ENDS, "import nothing_of_this_name", "def test_x(): pass", "import os; os._exit(1)")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    outcomes = release_tests.run_theirs(tmp_path, names)
    assert outcomes == {"a/test_a.py::test_one": "passed", "b/test_a.py::test_x": "passed"}
    ended = "a/test_a.py: ended the process\nb/test_c.py: ended the process\n"  # one while it was read
    assert capsys.readouterr().err == ended


def test_a_release_is_the_commit_that_upstream_names_its_tag_or_its_branch(tmp_path):
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
        subprocess.run(["git", *identity, "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "one")
    git("tag", "core_v0.16.1")
    git("branch", "core_r0.16.0")
    git("branch", "core_r0.19.0")
    assert release_tests.commit_of(SERIES["0.16.1"], tmp_path) == "core_v0.16.1"
    assert release_tests.commit_of(SERIES["0.19.2"], tmp_path) == "core_r0.19.0"
    with pytest.raises(SystemExit, match=r"has neither core_v0\.18\.2 nor core_r0\.18\.0"):
        release_tests.commit_of(SERIES["0.18.2"], tmp_path)
