"""The server of the pages: only this machine, only with the token, only its own pages."""

from __future__ import annotations

import html
import http.client
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_rl.errors import InputError
from megatron_rl.instruments.watch import page
from megatron_rl.instruments.watch.command import serve
from megatron_rl.instruments.watch.run import WatchedRun
from megatron_rl.instruments.watch.server import WatchServer
from tests.support.written_run import WrittenRun


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
    written.batch(11)
    return written.directory.root


@pytest.fixture(scope="module")
def server(run_folder) -> Iterator[WatchServer]:
    with serving(run_folder) as server:
        yield server


def get(server: WatchServer, path: str, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    return answer, answer.read()


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
        "/why",
        f"/{server.token[:-1]}/",
        f"/{server.token}x/why",
        f"/{server.token}",
        "*",
        "/%C3%A9/",
    ):
        answer, body = get(server, path)
        assert answer.status == 404, path
        assert server.token.encode() not in body


@pytest.mark.parametrize("path", ["../server.py", "%2e%2e/server.py", "why/", "//why", "/etc/passwd", "why%00", "x"])
def test_only_its_own_pages_are_served(server, path):
    assert get(server, server.path + path)[0].status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_but_reads(server, method):
    assert get(server, server.path, method)[0].status == 501


@pytest.mark.parametrize("path", ["", "?x=time", "why", "why?run=0", "batch?step=11", "batch?step=11&sequence=3"])
def test_every_page_forbids_scripts_and_what_is_not_its_own(server, path):
    answer, body = get(server, server.path + path)
    assert answer.status == 200
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert not re.search(r"script|http|\*|self", policy)
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Access-Control-Allow-Origin"] is None
    assert body.startswith(b"<!doctype html>")
    assert get(server, server.path + path, "HEAD")[1] == b""


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("?x=miles", "x='miles': one of step, time, tokens"),
        ("why?run=1", "run=1: there are 1"),
        ("why?run=-1", "run='-1': a number from 0 on"),
        ("batch?step=3", "step 3: no recorded batch; there are: 11"),
        ("batch?step=11&sequence=99", "sequence 99; it has 24"),
        ("batch?step=9999999999999", "a number from 0 on"),
        ("?" + "a=1&" * 51, "Max number of fields exceeded"),
    ],
)
def test_what_cannot_be_answered_is_said(server, path, message):
    answer, body = get(server, server.path + path)
    assert answer.status == 404
    assert message in html.unescape(body.decode())


def test_a_run_that_goes_on_is_read_and_loaded_again(tmp_path):
    with serving(tmp_path) as server:
        assert b'http-equiv="refresh"' in get(server, server.path)[1]
        written = WrittenRun(tmp_path)
        written.step(0, reward=0.0625)
        assert b"0.0625" in get(server, server.path)[1]
        written.directory.done.write_text("1")
        assert b'http-equiv="refresh"' not in get(server, server.path)[1]


def test_a_page_that_fails_ends_nothing(server, monkeypatch, capfd):
    with monkeypatch.context() as patched:
        patched.setattr(page, "why_page", lambda run: 1 / 0)
        answer, body = get(server, f"{server.path}why")
    assert answer.status == 500
    assert b"ZeroDivisionError" in body
    assert "ZeroDivisionError" in capfd.readouterr().err
    assert get(server, f"{server.path}why")[0].status == 200


def test_a_port_that_is_taken_is_said(server):
    with pytest.raises(InputError, match="--port 0 takes a free one"):
        serve([], server.server_address[1])
