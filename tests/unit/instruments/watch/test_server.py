"""The page's server: only this machine, only with the token, only its own files; answers for runs without anything."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_rl.commands.run import serve
from megatron_rl.errors import InputError
from megatron_rl.instruments.watch.run import WatchedRun, open_runs
from megatron_rl.instruments.watch.server import _ANSWERS, _STATIC, WatchServer
from megatron_rl.run.recorded_batches import batch_path
from tests.support.written_run import BANDS, EVIL, LAYERS, WrittenRun


@contextmanager
def serving(*folders: Path) -> Iterator[WatchServer]:
    server = WatchServer([WatchedRun(folder.name, folder) for folder in folders], 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    written = WrittenRun(tmp_path_factory.mktemp("runs") / "full")
    for step in range(12):
        written.step(step, alarm=step == 7)
        written.sample(step, EVIL)
    written.batch(11)
    return written.directory.root


@pytest.fixture(scope="module")
def server(run_folder) -> Iterator[WatchServer]:
    with serving(run_folder) as server:
        for run in server.runs:
            run.refresh()
        yield server


def get(server: WatchServer, path: str, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    return answer, answer.read()


def api(server: WatchServer, path: str) -> object:
    answer, body = get(server, f"{server.path}api/{path}")
    assert answer.status == 200, body
    return json.loads(body)


def test_it_listens_on_loopback_alone(server):
    assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "[::1]", "LOCALHOST", "localhost:9", "127.0.0.1:8420", "[::1]:1"]
)
def test_any_port_of_this_machine_is_answered(server, host):
    """A tunnel's other end may have another port."""
    assert get(server, server.path, Host=host)[0].status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8420",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        "",
        "localhost:x",
        "0.0.0.0",
        "::1",
        "a:b:localhost",
    ],
)
def test_other_names_are_refused(server, host):
    """A page elsewhere whose name is made to resolve to 127.0.0.1 sends its own name."""
    answer, body = get(server, server.path, Host=host)
    assert answer.status == 421
    assert b"watch" not in body


def test_without_the_token_there_is_nothing(server):
    for path in (
        "/",
        "/index.html",
        "/api/state",
        f"/{server.token[:-1]}/",
        f"/{server.token}x/api/state",
        f"/{server.token}",
        "*",
        "/%C3%A9/",
    ):
        answer, body = get(server, path)
        assert answer.status == 404, path
        assert server.token.encode() not in body


@pytest.mark.parametrize(
    "path",
    [
        "../server.py",
        "..%2fserver.py",
        "%2e%2e/server.py",
        "static/../server.py",
        "./index.html",
        "index.html/",
        "//index.html",
        "\\..\\server.py",
        "/etc/passwd",
        "api/",
        "api/state/",
        "api/__init__",
        "index.html%00",
    ],
)
def test_only_its_own_files_are_served(server, path):
    assert get(server, server.path + path)[0].status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_but_reads(server, method):
    assert get(server, server.path, method)[0].status == 501


@pytest.mark.parametrize("file", ["", *sorted(path.name for path in _STATIC.iterdir())])
def test_every_file_forbids_what_is_not_its_own(server, file):
    answer, body = get(server, server.path + file)
    assert answer.status == 200
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert not re.search(r"unsafe|http|\*|data:", policy)
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Access-Control-Allow-Origin"] is None
    assert body == (_STATIC / (file or "index.html")).read_bytes()


def test_the_pages_parts_load_nothing_and_parse_no_html():
    for file in _STATIC.iterdir():
        text = file.read_text()
        assert set(re.findall(r"""(?:https?:)?//[\w.-]+\.\w+[^\s"']*""", text)) <= {"http://www.w3.org/2000/svg"}, file
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc", text
        ), file
        assert not re.search(r"""(?:src|href)=["']/""", text), f"{file}: an address that is not relative"


def test_an_answer_that_is_known_is_not_sent_again(server):
    path = f"{server.path}api/panels?x=step"
    answer, body = get(server, path)
    again, nothing = get(server, path, If_None_Match=answer.headers["ETag"])
    assert (again.status, nothing) == (304, b"")
    packed, small = get(server, path, Accept_Encoding="gzip, br")
    assert packed.headers["Content-Encoding"] == "gzip"
    assert len(small) < len(body)
    assert gzip.decompress(small) == body


def test_what_the_page_asks_for(server, run_folder):
    state = api(server, "state")["runs"][0]
    assert (state["label"], state["step"], state["num_steps"], state["num_events"]) == ("full", 11, 30, 1)
    assert state["events"] == [
        {"step": 7, "name": "mismatch", "text": "mismatch/rho_std = 1.02 > 0.5 for 1 steps; then: warn"}
    ]
    assert state["rules"][:1] == [{"name": "mismatch", "text": "mismatch/rho_std above 0.5; then: warn"}]
    assert state["batches"] == [11]
    panels = api(server, "panels?x=time&metric=perf/time/step")
    assert panels["panels"][0]["title"] == "perf/time/step"
    reward = next(panel for panel in panels["panels"] if panel["title"] == "reward")["curves"][0]
    assert reward["x"] == [float(f"{(step + 1) / 100:.6g}") for step in range(12)]
    assert panels["zero"] == ["PPO KL"]
    bands = api(server, "bands?step=5")
    assert bands["labels"] == list(BANDS)
    assert bands["runs"][0]["step"] == 5
    assert [row["mean"] for row in bands["runs"][0]["rows"]] == [1 + 0.01 * (band - 2) for band in range(len(BANDS))]
    routes = api(server, "routes")[0]
    assert routes["layers"] == list(range(LAYERS))
    assert routes["values"][3] == [0.03] * 12
    samples = api(server, "samples?number=5")
    assert [sample["step"] for sample in samples["samples"]] == [11, 10, 9, 8, 7]
    assert [s["step"] for s in api(server, f"samples?before={samples['next']}&number=50")["samples"]] == [
        *range(6, -1, -1)
    ]
    assert "\x1b" not in samples["samples"][0]["response"]
    assert api(server, "log")[0].startswith("12:00:00 alarm mismatch at step 7")
    assert len(api(server, "batch?step=11&number=7")["responses"]) == 7
    assert api(server, "response?step=11&sequence=0")["has_tokenizer"]
    assert "critic/rewards/mean" in api(server, "metrics")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("panels?x=miles", "x='miles': one of step, time, tokens"),
        ("samples?run=1", "run=1: there are 1"),
        ("samples?run=-1", "run='-1': a number from 0 on"),
        ("batch", "step: is missing"),
        ("batch?step=3", "step 3: no recorded batch; there are: 11"),
        ("response?step=11&sequence=99", "sequence 99; it has 24"),
        ("bands?step=9999999999999", "a number from 0 on"),
        ("state?" + "a=1&" * 51, "more than 50 arguments"),
    ],
)
def test_what_cannot_be_answered_is_said(server, path, message):
    answer, body = get(server, f"{server.path}api/{path}")
    assert answer.status == 404
    assert message in json.loads(body)["error"]


def test_of_thousands_of_batches_the_newest_are_listed_and_every_one_is_answered(tmp_path):
    written = WrittenRun(tmp_path)
    written.batch(0)
    for step in range(1, 400):
        batch_path(written.directory.batches, step).touch()
    with serving(tmp_path) as server:
        state = api(server, "state")["runs"][0]
        assert state["batches"] == list(range(100, 400))
        assert state["num_batches"] == 400
        assert api(server, "batch?step=0")["total"] == 24


def test_the_page_of_why(server, tmp_path):
    answer = api(server, "why")
    assert answer["healthy"] is False
    assert f"{server.runs[0].label}: 12 steps" in answer["text"]
    assert "step     4  mismatch-contract" in answer["text"]
    (tmp_path / "metrics.jsonl").write_text("no json\n{}\n")
    with serving(tmp_path) as other:
        assert "line 1: not valid JSON" in api(other, "why")["text"]


def test_runs_that_have_not_begun(tmp_path):
    with serving(tmp_path) as server:
        for name in set(_ANSWERS) - {"batch", "response"}:
            api(server, name)
        state = api(server, "state")["runs"][0]
        assert (state["status"], state["step"], state["num_steps"]) == ("waiting", None, None)
        WrittenRun(tmp_path).step(0)
        server.runs[0].refresh()
        assert api(server, "state")["runs"][0]["step"] == 0


def test_folders_and_pipes_in_place_of_files_are_no_lines(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    os.mkfifo(tmp_path / "log.txt")
    with serving(tmp_path) as server:
        server.runs[0].refresh()
        assert api(server, "state")["runs"][0]["status"] == "waiting"
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(InputError, match=r"loop: .*expected a run directory"):
        open_runs([str(loop)])


def test_a_view_that_fails_ends_nothing(server, monkeypatch, capfd):
    monkeypatch.setitem(_ANSWERS, "state", lambda runs, query: 1 / 0)
    answer, body = get(server, f"{server.path}api/state")
    assert answer.status == 500
    assert "ZeroDivisionError" in json.loads(body)["error"]
    assert "ZeroDivisionError" in capfd.readouterr().err
    assert api(server, "metrics")


def test_a_port_that_is_taken_is_said(server):
    with pytest.raises(InputError, match="--port 0 takes a free one"):
        serve([], server.server_address[1])


def test_labels_differ(tmp_path):
    for name in ("a/run", "b/run", "c/run"):
        (tmp_path / name).mkdir(parents=True)
    folders = [str(tmp_path / name) for name in ("a/run", "b/run", "b/run")]
    assert [run.label for run in open_runs([*folders, f"base={folders[0]}", f"base={folders[1]}"])] == [
        "run",
        "b/run",
        "b/run (2)",
        "base",
        "base (2)",
    ]
    with pytest.raises(InputError, match="no such folder; expected a run directory"):
        open_runs([str(tmp_path / "typo")])
