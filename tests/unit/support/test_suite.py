"""The suite's own machinery: what runs first, what each file costs, what `make test` leaves to `make test-all`."""

from tests.conftest import how_to_repeat, rank_of
from tests.support.costs import Book, Cost, load
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


def test_costs_of_all_workers_are_added_and_other_files_kept(tmp_path):
    path = tmp_path / "made" / "costs.json"
    first, second = Book(path), Book(path)
    first.add({"a": vars(Cost(2, 1.0, 0.5)), "b": vars(Cost(1))})
    first.add({"a": vars(Cost(3, 0.5, 0.25))})
    first.write()
    second.add({"b": vars(Cost(7))})
    second.write()
    assert load(path) == {"a": Cost(5, 1.5, 0.75), "b": Cost(7)}


def test_a_run_counts_its_tests_and_says_how_to_repeat_a_failure(pytester, monkeypatch):
    monkeypatch.delenv("PYTEST_PLUGINS", raising=False)  # `make test-isa` names a plugin that this folder cannot import
    pytester.makepyfile(
        test_it="import pytest\n@pytest.mark.parametrize('x', ['a b'])\ndef test_no(x):\n    assert x == 'c'\n"
    )
    pytester.makeconftest(
        "import sys\n"
        f"sys.path[:0] = [{str(pytester.path)!r}, {str(REPOSITORY)!r}]\n"
        "from tests.conftest import pytest_addoption, pytest_configure, pytest_runtest_makereport, pytest_sessionfinish"
    )
    result = pytester.runpytest_subprocess("--costs", "costs.json", "-p", "no:cacheprovider")
    assert f"\n{how_to_repeat('test_it.py::test_no[a b]')}\n" in result.stdout.str()
    assert load(pytester.path / "costs.json")["test_it.py"].tests == 1


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
