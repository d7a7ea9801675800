"""Children of the helper process: as apart from each other as processes that were started one by one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.parallel.gloo import run_ranks
from tests.support.patience import PATIENCE_S
from tests.support.zygote import Child, Zygote, run_command, surroundings, zygote

PROGRAMS = "tests.parallel.programs.zygote"


@pytest.fixture
def start(tmp_path):
    def start(function: str, **keywords) -> Child:
        return zygote().start(PROGRAMS, function, {}, log=tmp_path / function, **keywords)

    return start


def is_alive(pid: int) -> bool:
    """Zombies are not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_child_has_its_own_group_environment_and_output(start, tmp_path, monkeypatch):
    monkeypatch.setenv("SHARED", "by the test")
    errors = tmp_path / "errors"
    child = start("tell", env={**surroundings(), "OWN": "of this one"}, errors=errors)
    assert child.wait() == 0
    assert child.output == "True of this one by the test True\n"
    assert errors.read_text() == "an error\n"
    monkeypatch.delenv("SHARED")
    again = start("tell")
    assert again.wait() == 0
    assert again.output.splitlines()[1:] == ["True None None True", "an error"]  # of one file, appended


def test_what_a_child_did_to_itself_is_gone(start):
    assert start("spoil").wait() == 0
    assert start("default_dtype").wait() == 0
    child = start("tell")
    child.wait()
    assert "of another" not in child.output


def test_ends_are_told_as_the_system_tells_them(start):
    victim, patient = start("sleep"), start("sleep")
    os.kill(victim.pid, signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    assert patient.poll() is None
    with pytest.raises(AssertionError, match=r"not finished within 0.1 s"):
        patient.wait(0.1)
    assert patient.returncode == -signal.SIGKILL


def test_processes_that_a_child_left_behind_end_with_it(start):
    child = start("leave_a_child_behind")
    assert child.wait() == 3
    left = int(child.output)
    assert is_alive(left)
    child.end()
    assert child.returncode == 3
    deadline = time.monotonic() + PATIENCE_S  # the kill was sent; the system delivers it when it likes
    while is_alive(left) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(left)


def test_a_command_is_run_as_a_user_runs_it(tmp_path):
    done = run_command("megatron_rl", ["train", "no-such-recipe.yaml"], tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "no such file" in done.stderr
    helped = run_command("megatron_rl", ["--help"], tmp_path)
    assert helped.returncode == 0
    assert helped.stdout.startswith("usage: megatron-rl ")
    assert helped.stderr == ""


def test_an_import_that_starts_a_thread_ends_the_helper_with_the_reason(tmp_path):
    """A fork would copy what the thread holds, and not the thread."""
    with Zygote({"OWN": "a helper of its own"}) as helper, pytest.raises(RuntimeError, match="started 1 threads"):
        helper.start("tests.parallel.programs.thread", "sleep", {}, log=tmp_path / "log")


def test_settings_of_ranks_are_there_before_their_imports():
    assert run_ranks(PROGRAMS, "setting_at_import", 1, env={"ATEN_CPU_CAPABILITY": "default"}) == ["default"]
