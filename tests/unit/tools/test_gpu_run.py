"""A run of the campaign: what is in its file when it is cut off, its verdict, and processes that share a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from tools.gpu.run import GREEN, NCCL, OPEN, RED, NotRun, Problem, Ranks, Run, watch


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


def test_jobs_of_several_parts_are_made_in_one_start(tmp_path, monkeypatch):
    begun, starts = run(tmp_path, only="a|b"), []

    def ranks(size, jobs, **_):
        starts.append(list(jobs))
        return Ranks([0, 3], [1.0, 2.0], [{"a": 1, "b": 2}, {"a": 3}], ["", "it broke"], 0.0)

    monkeypatch.setattr(begun, "ranks", ranks)
    found, jobs = {}, dict.fromkeys("abc", ("f", {}))
    assert begun.of_job(found, 2, jobs, "a") == [1, 3]
    with pytest.raises(Problem, match="rank 1 left with status 3"):
        begun.of_job(found, 2, jobs, "b")
    assert starts == [["a", "b"]]


def test_processes_on_one_gpu_are_of_several_hosts(tmp_path):
    """NCCL_HOSTID differs, before the program's first line; the other variables are there."""
    program = "import os; print(os.environ['NCCL_HOSTID'], os.environ['RANK'], os.environ['NCCL_ALGO'])"
    told = [
        subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
        for environment in run(tmp_path).environments(2, "")
    ]
    (first, *rest), (second, *others) = (one.stdout.split() for one in told)
    assert first != second
    assert (rest, others) == (["0", NCCL["NCCL_ALGO"]], ["1", NCCL["NCCL_ALGO"]])


def test_ranks_are_not_waited_for_after_one_failed():
    programs = "raise SystemExit(3)", "import time; time.sleep(600)"
    processes = [subprocess.Popen([sys.executable, "-S", "-c", program]) for program in programs]
    start = time.monotonic()
    codes, seconds = watch(processes, 500.0, 0.1)
    processes[1].kill()
    processes[1].wait()
    assert codes == [3, None]
    assert seconds[0] <= seconds[1] <= time.monotonic() - start


def test_the_time_of_ranks_begins_with_a_mark(tmp_path):
    program = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
    processes = [subprocess.Popen([sys.executable, "-S", "-c", program, str(mark := tmp_path / "mark")])]
    assert watch(processes, 0.1, 0.1, mark)[0] == [None]
    assert mark.exists()
    processes[0].kill()
    processes[0].wait()
