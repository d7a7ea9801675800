"""A process does not take Python apart while a library's thread still holds what needs it."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading

import pytest

from megatron_rl.process import host
from megatron_rl.process.host import GLOO_CALLS, TASKS, wait_until_idle
from tests.support.reach import REPOSITORY

BLOCK = bytes(200_000_000)


@pytest.fixture
def tasks(tmp_path):
    """A folder of threads; writes a thread's state."""

    def write(number, name, state):
        (tmp_path / str(number)).mkdir(exist_ok=True)
        (tmp_path / str(number) / "stat").write_text(f"{number} ({name}) {state} 1 1 0\n")

    write.folder = tmp_path
    return write


def test_a_thread_that_wants_to_run_is_waited_for(tasks):
    tasks(1, "python", "R")
    tasks(2, GLOO_CALLS, "R")
    tasks(3, GLOO_CALLS, "S")
    assert not wait_until_idle(longest_s=0.05, tasks=tasks.folder)
    done = threading.Timer(0.1, tasks, (2, GLOO_CALLS, "S"))
    done.start()
    assert wait_until_idle(tasks=tasks.folder)
    assert done.finished.is_set(), "not before it was idle"


def test_one_idle_look_is_not_enough(monkeypatch):
    """A thread that waits for Python's lock looks idle while this one has it."""
    looks = iter([True, False, True, False, False, True])
    monkeypatch.setattr(host, "_is_any_busy", lambda *_: next(looks))
    assert wait_until_idle()
    assert list(looks) == [True], "it stopped at the second idle look in a row"


def test_other_threads_and_odd_names_are_left_alone(tasks):
    tasks(1, f"{GLOO_CALLS})", "R")
    tasks(2, "a (b) c", "R")
    (tasks.folder / "3").mkdir()  # it has ended
    assert wait_until_idle(longest_s=5, tasks=tasks.folder)
    assert wait_until_idle(longest_s=5, tasks=tasks.folder / "nowhere")


def test_a_busy_thread_of_this_process_is_seen():
    """With the state and the name that the system has of it."""
    named, stop = threading.Event(), threading.Event()

    def compute():
        (TASKS / str(threading.get_native_id()) / "comm").write_text("computes")
        named.set()
        while not stop.is_set():
            hashlib.sha256(BLOCK)  # without Python's lock

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        named.wait()
        assert not wait_until_idle("computes", longest_s=0.2)
    finally:
        stop.set()
        thread.join()
    assert wait_until_idle("computes")


JOINS = """
import atexit, sys
from pathlib import Path
from unittest import mock
from megatron_rl.config.learner import ParallelConfig
from megatron_rl.learner import process_groups
from megatron_rl.process import host as native_threads
with mock.patch.object(atexit, "register", wraps=atexit.register) as registered:
    process_groups.initialize(ParallelConfig(), "cpu", seed=0)
    process_groups.initialize(ParallelConfig(), "cpu", seed=0)
assert [call.args for call in registered.call_args_list].count((native_threads.wait_until_idle,)) == 1
names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
assert native_threads.GLOO_CALLS in names, names
"""


def test_a_process_that_joins_a_job_waits_at_its_end_for_threads_that_have_this_name():
    done = subprocess.run([sys.executable, "-c", JOINS], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
