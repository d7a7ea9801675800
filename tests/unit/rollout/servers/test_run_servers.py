"""Servers that a run launches by itself: started again when they end, given up when that does not help."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from megatron_rl.rollout import RolloutError
from megatron_rl.rollout.servers.run_servers import MAX_ENDS, LocalServers
from tests.support.patience import PATIENCE_S

# Writes its line to the log, then ends with status 7 where the file `broken` is in the working directory's place.
PROGRAM = """
import pathlib, sys, time
print("here is", sys.argv[-1], flush=True)
if pathlib.Path(sys.argv[1]).exists():
    print("no memory left", flush=True)
    sys.exit(7)
time.sleep(600)
"""


@pytest.fixture
def broken(tmp_path) -> Path:
    return tmp_path / "broken"


@pytest.fixture
def servers(tmp_path, broken):
    command = [sys.executable, "-c", PROGRAM, str(broken)]
    servers = LocalServers(2, tmp_path / "recipe.yaml", tmp_path / "run", "token", command)
    yield servers
    servers.close()


def wait_for_end(servers: LocalServers, *names: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while any(servers._processes[name].poll() is None for name in names):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_line(address: Path, times: int) -> None:
    """Until the server's log says so often that it is there."""
    deadline = time.monotonic() + PATIENCE_S
    while address.with_suffix(".log").read_text().count("here is local-0") < times:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_server_that_ends_is_started_again_and_its_log_goes_on(servers, tmp_path):
    said: list[str] = []
    servers.relaunch(said.append)
    assert said == []
    first = servers._processes["local-0"]
    address = tmp_path / "run" / "servers" / "local-0.json"
    address.write_text("{}")
    wait_for_line(address, 1)
    first.kill()
    wait_for_end(servers, "local-0")
    servers.relaunch(said.append)
    assert len(said) == 1
    assert said[0].startswith("server local-0 ended (status -9) and is started again; see ")
    assert not address.exists(), "the address of the one that died"
    assert servers._processes["local-0"].pid != first.pid
    servers.check()
    wait_for_line(address, 2)


def test_servers_that_keep_ending_are_given_up_and_the_last_words_are_in_the_error(servers, broken):
    said: list[str] = []
    broken.touch()
    for process in servers._processes.values():
        process.kill()
    for _ in range(MAX_ENDS - 1):
        wait_for_end(servers, "local-0", "local-1")
        servers.relaunch(said.append)
    wait_for_end(servers, "local-0", "local-1")
    with pytest.raises(RolloutError) as failed:
        servers.relaunch(said.append)
    assert "no server can be started; local-1 ended (status 7); " in str(failed.value)
    assert str(failed.value).endswith("no memory left")
    assert sum("is started again" in line for line in said) == 2 * (MAX_ENDS - 1)
    assert sum("it is left alone" in line for line in said) == 2


def test_one_that_came_up_in_between_counts_from_0(servers):
    for _ in range(2 * MAX_ENDS):
        servers._processes["local-1"].kill()
        wait_for_end(servers, "local-1")
        servers.relaunch(lambda line: None)
        servers.came_up("local-1")
    servers.check()


def test_one_that_ends_at_the_start_is_an_error_with_its_last_words(tmp_path, broken):
    broken.touch()
    command = [sys.executable, "-c", PROGRAM, str(broken)]
    servers = LocalServers(1, tmp_path / "recipe.yaml", tmp_path / "run", "token", command)
    wait_for_end(servers, "local-0")
    with pytest.raises(RolloutError, match=r"(?s)server local-0 ended at its start \(status 7\); .*no memory left$"):
        servers.check()
    servers.close()


def test_one_of_two_that_is_given_up_ends_nothing(servers):
    said: list[str] = []
    for _ in range(MAX_ENDS):
        servers._processes["local-1"].kill()
        wait_for_end(servers, "local-1")
        servers.relaunch(said.append)
    assert sum("it is left alone" in line for line in said) == 1
    servers.relaunch(said.append)
    assert servers._processes["local-0"].poll() is None
