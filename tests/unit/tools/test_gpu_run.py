"""A run of the campaign: what is in its file when it is cut off, its verdict, and processes that share a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from tools.gpu.run import GREEN, NCCL, OPEN, RED, NotRun, Problem, Run, watch


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
