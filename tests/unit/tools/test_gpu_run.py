"""A run of the campaign: what is in its file when it is cut off, its verdict, and processes that share a GPU."""

import json

import pytest

from tools.gpu.run import GREEN, OPEN, RED, NotRun, Problem, Run


def run(tmp_path, **options) -> Run:
    return Run("r0", tmp_path / "out.json", True, **options)


def read(tmp_path) -> dict:
    return json.loads((tmp_path / "out.json").read_text())


def raises(error: Exception):
    raise error


def test_a_run_that_is_cut_off_leaves_what_it_had(tmp_path):
    begun, seen = run(tmp_path), {}
    begun.part("first", lambda: {"figure": 1})
    begun.part("second", lambda: seen.update(read(tmp_path)))
    assert seen["parts"]["first"]["figure"] == 1
    assert (seen["parts"]["first"]["state"], seen["parts"]["second"]["state"]) == ("green", "open")
    assert seen["verdict"].startswith("r0: open: second")


@pytest.mark.parametrize(
    ("functions", "verdict", "status"),
    [
        ([], "open: no part", OPEN),
        ([dict, lambda: None], "green: all 2 parts", GREEN),
        ([dict, lambda: raises(NotRun("no"))], "open: part 1", OPEN),
        ([lambda: raises(Problem("wrong")), lambda: raises(NotRun("no"))], "red: part 0", RED),
        ([lambda: raises(KeyError("a")), dict], "red: part 0", RED),
    ],
)
def test_verdict(functions, verdict, status, tmp_path):
    begun = run(tmp_path)
    for number, function in enumerate(functions):
        begun.part(f"part {number}", function)
    assert begun.end() == status
    assert read(tmp_path)["verdict"].startswith(f"r0: {verdict}; ")


def test_a_part_after_the_end_of_the_time_is_open(tmp_path):
    begun = run(tmp_path, seconds=0.0)
    begun.part("late", lambda: raises(AssertionError("it was run")))
    assert (begun.end(), read(tmp_path)["parts"]["late"]["state"]) == (OPEN, "open")


def test_what_is_kept_and_green_is_not_run_again(tmp_path):
    begun = run(tmp_path, keep=tmp_path / "kept")
    begun.part("first", lambda: {"figure": 1})
    begun.part("second", lambda: raises(Problem("wrong")))
    assert begun.end() == RED
    again = run(tmp_path, keep=tmp_path / "kept")
    again.part("first", lambda: raises(AssertionError("it was run again")))
    again.part("second", dict)
    assert again.end() == GREEN
    assert read(tmp_path)["parts"]["first"]["figure"] == 1
