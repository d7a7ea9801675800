"""`megatron-rl run servers`: what a run tells of its servers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_rl.__main__ import main
from megatron_rl.errors import InputError
from megatron_rl.instruments import server_table
from megatron_rl.rollout.servers.pool import (
    Member,
    Members,
    PoolLimits,
    load_metrics,
    read_table,
    table,
    table_path,
    write_table,
)
from megatron_rl.rollout.servers.rendezvous import Address, publish
from megatron_rl.rollout.servers.wire import Load

BUSY = Load(running=3, waiting=1, kv_usage=0.5)


class Known(Members):
    due, refused = 4, {"d": "dtype: the server has 'bf16'"}

    def __init__(self, *members: Member) -> None:
        super().__init__(PoolLimits(1.0, 1.0), lambda: False)
        self.members = {member.address.name: member for member in members}


def member(name: str, version: int | None = 4, lost: str = "", load: Load = BUSY) -> Member:
    client = SimpleNamespace(load=load)
    return Member(Address(name, f"http://{name}:1"), client, version=None if lost else version, lost=lost)


MEMBERS = Known(member("a"), member("b", version=3), member("c", lost="connection refused"))


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "run").mkdir()
    write_table(tmp_path / "run", table(MEMBERS))
    return tmp_path / "run"


def test_a_run_tells_which_servers_it_uses_and_why_not(run_dir, capsys):
    assert main(["servers", str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[0].split()) == "name url version state running waiting KV cache why"
    assert " ".join(lines[1].split()) == "a http://a:1 4 ready 3 1 50%"
    assert lines[2].split()[:4] == ["b", "http://b:1", "3", "updating"]
    assert lines[3].split()[:4] == ["c", "http://c:1", "-", "lost"]
    assert lines[3].endswith("connection refused")
    assert lines[4].split()[:3] == ["d", "-", "refused"]
    assert lines[5] == "policy version that is due: 4"
    told = server_table.describe(run_dir)
    assert (told["due"], [one["state"] for one in told["servers"]]) == (4, ["ready", "updating", "lost", "refused"])


def test_after_the_run_its_servers_have_ended(run_dir):
    write_table(run_dir, table(MEMBERS, ended=True))
    assert [one["state"] for one in server_table.describe(run_dir)["servers"]] == ["ended", "ended", "lost", "refused"]


def test_servers_that_the_run_does_not_know_yet_are_found_by_their_files(tmp_path):
    publish(tmp_path, Address("n1", "http://n1:1"))
    (one,) = server_table.describe(tmp_path)["servers"]
    assert (one["name"], one["state"]) == ("n1", "found")


def test_a_directory_without_servers_says_so(tmp_path, capsys):
    with pytest.raises(InputError, match="no server has been registered"):
        server_table.describe(tmp_path)
    table_path(tmp_path).parent.mkdir()
    table_path(tmp_path).write_text("[1")
    assert read_table(tmp_path) is None
    assert main(["servers", str(tmp_path)]) == 2
    assert "no server has been registered" in capsys.readouterr().err


def test_metrics_of_a_batch():
    more = Load(running=1, waiting=0, kv_usage=0.2)
    later = Known(member("a", load=more), member("b"), member("c", lost="gone"))
    assert load_metrics(later) == {
        "rollout/servers/running": 2.0,
        "rollout/servers/waiting": 0.5,
        "rollout/servers/kv_usage": 0.5,
        "rollout/servers/lost": 1.0,
    }
