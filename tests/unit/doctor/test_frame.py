"""A check that hangs, crashes or raises fails by itself and leaves the others alone."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from megatron_rl.doctor import frame
from megatron_rl.doctor.checks import CHECKS, Check, Outcome, Setting
from megatron_rl.doctor.command import MINUTES, QUICK_MINUTES, choose
from megatron_rl.doctor.frame import run_check, run_checks
from megatron_rl.errors import Fault, InputError

PROGRAM = """
import json, os, sys, time
name, setting, outcome = sys.argv[1:]
rank = int(os.environ.get("RANK", -1))
def say(reason, status="pass"):
    found = {"status": status, "reason": reason, "fix": "", "figures": {}}
    open(outcome + (f".{rank}" if rank > 0 else ""), "w").write(json.dumps(found))
print("here is", name, flush=True)
if name == "hangs":
    if os.fork() == 0:  # an engine's worker, which outlives its parent unless the whole group is ended
        print("worker", os.getpid(), flush=True)
    time.sleep(100)
if name == "crashes":
    os.kill(os.getpid(), 11)
if name == "one rank dies" and rank == 1:
    sys.exit(7)
if name == "one rank raises" and rank == 1:
    say("words", "fail")
    sys.exit(1)
if name.startswith("one rank"):
    time.sleep(100)
if name == "says nothing":
    sys.exit(0)
say(" ".join([os.environ.get("WORLD_SIZE", "alone"), os.environ.get("EXTRA", "-"), os.environ["OMP_NUM_THREADS"]]))
"""


@pytest.fixture(autouse=True)
def stand_in(monkeypatch, tmp_path):
    """In place of `megatron_rl.doctor.frame`, for checks that exist in this file alone."""
    program, interpreter = tmp_path / "child.py", tmp_path / "python"
    program.write_text(PROGRAM)
    interpreter.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {program} "$@"\n')  # without -m and the module
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    monkeypatch.setattr(frame, "GRACE_S", 0.2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def check(name: str, seconds: float = 20, **options) -> Check:
    return Check(name, seconds, "?", "none.none", **options)


SETTING = Setting("cpu", 2, "/tmp")


def test_the_others_run_on():
    checks = [check("crashes"), check("says nothing"), check("fine")]
    results = run_checks(checks, SETTING, 60)
    assert [r.outcome.status for r in results] == ["fail", "fail", "pass"]
    assert "ended by SIGSEGV" in results[0].outcome.reason
    assert results[0].log == "here is crashes"
    assert "without an outcome" in results[1].outcome.reason
    assert results[2].log == ""
    assert all(r.outcome.fix for r in results[:2])


def test_a_check_that_hangs_is_ended_with_all_that_it_started():
    result = run_check(check("hangs"), SETTING, 1.0)
    assert result.outcome.status == "fail"
    assert result.outcome.reason == "it had not ended after 1 s (its budget: 20 s)"
    assert "--only hangs" in result.outcome.fix
    worker = int(result.log.split("worker ")[1])
    deadline = time.monotonic() + 10
    while Path(f"/proc/{worker}").exists() and "Z" not in Path(f"/proc/{worker}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the worker lives on"
        time.sleep(0.05)


def test_a_process_that_cannot_be_ended_holds_up_nobody(monkeypatch):
    """As one that waits for a driver: it stays when it is killed."""
    pids = []
    with monkeypatch.context() as patch:
        patch.setattr(frame.os, "killpg", lambda pid, signal: pids.append(pid))
        patch.setattr(frame, "END_S", 0.1)
        result = run_check(check("hangs"), SETTING, 1.0)
    os.killpg(pids[0], 9)
    assert (result.outcome.status, "not ended after 1 s" in result.outcome.reason) == ("fail", True)


def test_a_rank_that_dies_ends_the_check_and_is_named():
    result = run_check(check("one rank dies", ranks="node"), SETTING, 60)
    assert result.outcome.reason == "process 1 of 2 left with status 7"
    assert result.seconds < 15


def test_a_rank_that_raises_ends_the_check_with_its_words():
    result = run_check(check("one rank raises", ranks="node"), SETTING, 60)
    assert (result.outcome.status, result.outcome.reason) == ("fail", "rank 1: words")
    assert result.seconds < 15


def test_ranks_of_a_node_and_variables_of_a_check(monkeypatch):
    assert run_check(check("a", ranks="node"), SETTING, 60).outcome.reason == "2 - 1"
    assert run_check(check("b", environment={"EXTRA": "x"}), SETTING, 60).outcome.reason == "alone x 1"


def test_one_process_is_no_rank_of_the_job_around_it(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "64")
    monkeypatch.setenv("RANK", "3")
    assert run_check(check("a"), SETTING, 60).outcome.reason.startswith("alone")


def test_a_rank_of_a_job_runs_one_process_of_the_job(monkeypatch):
    for name, value in {"WORLD_SIZE": "64", "RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "5"}.items():
        monkeypatch.setenv(name, value)
    inside = Setting("cpu", 2, "/tmp", in_job=True)
    assert run_check(check("a", ranks="job"), inside, 60).outcome.reason.startswith("64")
    monkeypatch.setenv("RANK", "3")
    assert run_check(check("a", ranks="job"), inside, 60).outcome.reason.startswith("64")  # its own outcome


def test_what_has_no_gpu_is_not_run():
    assert run_check(check("a", gpu_only="no GPU at hand"), SETTING, 60).outcome.reason == "no GPU at hand"


def test_time_is_dealt_by_budgets_and_what_is_left_goes_on(monkeypatch):
    limits, clock = [], [0.0]
    monkeypatch.setattr(frame.time, "monotonic", lambda: clock[0])

    def run(check, setting, folder, limit):
        limits.append((limit, setting.wait_s))
        clock[0] += 1.0
        return Outcome("pass", ""), ""

    monkeypatch.setattr(frame, "_in_processes", run)
    run_checks([check("a", 10), check("b", 30)], SETTING, 80)
    assert limits == [(20.0, 20 / 6), (79.0, 79 / 6)]


def test_budgets_are_those_of_ten_minutes_and_of_two():
    assert sum(check.budget_s for check in CHECKS) == 60 * MINUTES
    quick = choose(None, job=False, quick=True)
    assert sum(check.budget_s for check in quick) < 1.1 * 60 * QUICK_MINUTES
    assert not any(check.function.startswith("engine.") for check in quick)
    assert len({c.name for c in CHECKS}) == len(CHECKS)
    assert all(callable(c.load()) for c in CHECKS)


@pytest.mark.parametrize(
    ("error", "reason"), [(InputError("words"), "words"), (Fault("words"), "words"), (KeyError("k"), "KeyError: 'k'")]
)
def test_an_exception_is_a_failure(monkeypatch, capsys, error, reason):
    def raises(setting):
        raise error

    monkeypatch.setattr(Check, "load", lambda self: raises)
    outcome, raised = frame.attempt("packages", SETTING)
    assert (raised, outcome.status, outcome.reason) == (True, "fail", reason)
    assert outcome.fix
    assert "Traceback" in capsys.readouterr().err
