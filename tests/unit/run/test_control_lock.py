"""The lock of a run directory: real processes, real flock, and file systems that have none."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
import threading
import time

import pytest

from megatron_rl.errors import InputError
from megatron_rl.run.control import RunLock, _boot_id
from tests.support.tiny import REPOSITORY

HOLDER = """
import sys, time
from pathlib import Path
from megatron_rl.run.control import RunLock
RunLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(600)
"""


def quick(path, **keywords) -> RunLock:
    return RunLock(path, **{"patience_s": 0.0, "heartbeat_s": 0.05} | keywords)


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "LOCK")], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_held_refused_killed_and_taken_over(tmp_path, holder):
    with pytest.raises(InputError, match=rf"{tmp_path} is in use by process {holder.pid} on .*STOP.*--set name=…"):
        quick(tmp_path / "LOCK").acquire()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    lock = quick(tmp_path / "LOCK")
    assert f"(pid {holder.pid}) did not end in order" in lock.acquire()
    lock.release()
    lock.release()
    assert quick(tmp_path / "LOCK").acquire() == "", "a lock that was given back leaves no trace"


def test_a_holder_that_is_about_to_end_is_waited_for(tmp_path, holder):
    threading.Timer(0.3, holder.kill).start()
    lock = quick(tmp_path / "LOCK", patience_s=60.0)
    assert "did not end in order" in lock.acquire()
    lock.release()


@pytest.mark.parametrize("has_locks", [True, False])
def test_a_holder_that_no_lock_tells_of_is_known_by_its_signs_of_life(tmp_path, has_locks, monkeypatch):
    """It is on another host, or on a file system without locks."""

    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    if not has_locks:
        monkeypatch.setattr("megatron_rl.run.control.fcntl.flock", none)
    path, stop = tmp_path / "LOCK", threading.Event()
    owner = {"host": "far", "pid": 7, "boot": "another" if has_locks else _boot_id(), "beat": "0"}
    path.write_text(json.dumps(owner))

    def beat():
        number = 0
        while not stop.wait(0.02):
            number += 1
            path.with_suffix(".new").write_text(json.dumps(owner | {"beat": str(number)}))
            path.with_suffix(".new").rename(path)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(InputError, match="in use by process 7 on far"):
            quick(path, heartbeat_s=0.5).acquire()
    finally:
        stop.set()
        thread.join()
    lock = quick(path)
    assert "(pid 7 on far) gave no sign of life" in lock.acquire()
    lock.release()


def test_the_holder_gives_signs_of_life(tmp_path):
    lock = quick(tmp_path / "LOCK")
    lock.acquire()
    first = json.loads((tmp_path / "LOCK").read_text())
    deadline = time.monotonic() + 30
    while json.loads((tmp_path / "LOCK").read_text())["beat"] == first["beat"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    lock.release()


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "7", '{"host": "x"}'])
def test_a_lock_file_of_nonsense_is_no_holder(tmp_path, content):
    (tmp_path / "LOCK").write_text(content)
    lock = quick(tmp_path / "LOCK")
    assert lock.acquire() == ""
    lock.release()
