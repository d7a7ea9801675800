"""The suite's own machinery: what runs first, what each file costs, what `make test` leaves to `make test-all`."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tests.conftest import how_to_repeat, rank_of, unit_of
from tests.support.costs import Book, Cost, load, processor_seconds
from tests.support.tiny import REPOSITORY

pytest_plugins = ["pytester"]


def test_the_cluster_comes_first_then_quick_units_then_the_longest():
    measured = {"tests/e2e/a.py": 90.0, "tests/unit/b.py": 7.0, "tests/e2e/c.py": 1.0, "tests/unit/d.py": 0.5}
    measured["tests/slurm/"] = 80.0
    assert sorted(measured, key=lambda unit: rank_of(unit, measured)) == [
        "tests/slurm/",
        "tests/unit/d.py",
        "tests/e2e/c.py",
        "tests/e2e/a.py",
        "tests/unit/b.py",
    ]


def test_unit_tests_follow_the_cluster_where_nothing_was_measured():
    units = ["tests/e2e/a.py", "tests/slurm/", "tests/unit/b.py", "tests/patches/c.py"]
    assert sorted(units, key=lambda unit: rank_of(unit, {}))[:2] == ["tests/slurm/", "tests/unit/b.py"]


def test_files_that_share_a_cluster_or_a_process_are_one_unit():
    assert unit_of("tests/slurm/test_jobs.py::test_a[1]") == unit_of("tests/slurm/test_ports.py::test_b")
    over_te = [unit_of(f"tests/parallel/test_transformer_engine{part}.py::test_c") for part in ("", "_families")]
    assert over_te[0] == over_te[1] != unit_of("tests/parallel/test_exact.py::test_d")
    assert unit_of("tests/unit/a/test_b.py::test_c[x::y]") == "tests/unit/a/test_b.py"


def test_costs_of_all_workers_are_added_and_other_files_kept(tmp_path):
    path = tmp_path / "made" / "costs.json"
    first, second = Book(path), Book(path)
    first.add({"a": vars(Cost(2, 1.0, 0.5, 1, 4)), "b": vars(Cost(1))})
    first.add({"a": vars(Cost(3, 0.5, 0.25, 0, 1))})
    first.write()
    second.add({"b": vars(Cost(7))})
    second.write()
    assert load(path) == {"a": Cost(5, 1.5, 0.75, 1, 5), "b": Cost(7)}


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": {"unknown": 1}}'])
def test_costs_that_cannot_be_read_are_none(tmp_path, text):
    (tmp_path / "costs.json").write_text(text)
    assert load(tmp_path / "costs.json") == {}
    assert load(tmp_path / "absent.json") == {}


def test_processor_time_counts_children_that_ended():
    before = processor_seconds(os.getpid())
    spend = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", spend], check=True)
    tick = 1 / os.sysconf("SC_CLK_TCK")
    assert processor_seconds(os.getpid()) - before >= 0.3 - 2 * tick
    own = time.process_time()
    assert processor_seconds(os.getpid()) >= own - 2 * tick


def test_a_run_counts_starts_and_says_how_to_repeat_a_failure(pytester, monkeypatch):
    """Engines are counted at the import of their module: `vllm.v1.engine.core` is a made-up one here."""
    monkeypatch.delenv("PYTEST_PLUGINS", raising=False)  # `make test-isa` names a plugin that this folder cannot import
    package = pytester.mkpydir("vllm")
    for name in ("v1", "v1/engine"):
        (package / name).mkdir()
        (package / name / "__init__.py").touch()
    (package / "v1/engine/core.py").write_text("class EngineCore:\n    def __init__(self, x): self.x = x\n")
    pytester.makepyfile(
        test_it="import pytest\n"
        "@pytest.mark.parametrize('x', ['a b'])\n"
        "def test_no(x):\n"
        "    from vllm.v1.engine.core import EngineCore\n"
        "    from tests.support.costs import PROCESS, note_start\n"
        "    note_start(PROCESS)\n"
        "    assert [EngineCore(3).x, EngineCore(x=4).x] == [0]\n"
    )
    pytester.makeconftest(
        "import sys\n"
        f"sys.path[:0] = [{str(pytester.path)!r}, {str(REPOSITORY)!r}]\n"
        "from tests.conftest import pytest_addoption, pytest_configure, pytest_runtest_makereport, pytest_sessionfinish"
    )
    result = pytester.runpytest_subprocess("--costs", "costs.json", "-p", "no:cacheprovider")
    assert "[3, 4] == [0]" in result.stdout.str()
    assert f"\n{how_to_repeat('test_it.py::test_no[a b]')}\n" in result.stdout.str()
    cost = load(pytester.path / "costs.json")["test_it.py"]
    assert (cost.tests, cost.engines, cost.processes) == (1, 2, 1)


def test_ci_runs_each_test_once():
    """`make test` and `make test-rest` share nothing and leave nothing out; CI ends with pytest's own summary."""
    makefile = (REPOSITORY / "Makefile").read_text()
    recipes = {
        name: makefile.split(f"\n{name}: setup", 1)[1].split("\n\n", 1)[0] for name in ("test", "test-rest", "test-all")
    }
    assert '-m "not slow"' in recipes["test"]
    assert "-m slow" in recipes["test-rest"]
    assert " -m " not in recipes["test-all"]
    commands = [line for line in (REPOSITORY / ".ci/run").read_text().splitlines() if line.startswith("make ")]
    assert commands == ["make lint", "make test-all"]
    assert (REPOSITORY / ".ci/run").read_text().endswith("make test-all\n")
