"""Real servers behind proxies that do harm to their answers, and strangers beside them: the run goes on with what is
left, and every token is of the weights that are said to have sampled it. The two servers are started once.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.errors import InputError
from megatron_rl.rollout.generator import RolloutError
from megatron_rl.rollout.servers import client
from megatron_rl.rollout.servers.client import GENERATE, WEIGHTS
from megatron_rl.rollout.servers.generator import ServerGenerator
from megatron_rl.rollout.servers.pool import table
from megatron_rl.rollout.servers.rendezvous import Address, folder, publish, read
from tests.e2e import in_flight
from tests.e2e.in_flight import (
    TOKEN,
    assert_sampled_as_said,
    flat,
    generator_on,
    prompts,
    served_recipe,
    two_models,
    update,
    wait,
)
from tests.support.forked_servers import ForkedServers
from tests.support.http_proxy import HttpProxy, with_body
from tests.support.patience import PATIENCE_S
from tests.support.slow import slow_but

LENGTH = 24


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    return two_models(tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The recipe of two real servers, and their own addresses."""
    run_dir = tmp_path_factory.mktemp("run") / "served"
    recipe, file = served_recipe(run_dir, LENGTH)
    local = ForkedServers(2, file, run_dir, TOKEN)
    paths, deadline = [folder(run_dir) / f"local-{number}.json" for number in range(2)], time.monotonic() + PATIENCE_S
    while not all(path.is_file() for path in paths):
        local.check()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    yield recipe, [read(path) for path in paths]
    local.close()


@pytest.fixture(scope="module")
def proxies(served):
    made = [HttpProxy(address.url) for address in served[1]]
    yield made
    for proxy in made:
        proxy.close()


@pytest.fixture(scope="module", params=slow_but(["broadcast"], ["files", "broadcast"]))
def generator(request, served, proxies, tmp_path_factory) -> Iterator[ServerGenerator]:
    """On the servers as proxies show them, and two strangers."""
    run_dir = tmp_path_factory.mktemp(request.param) / "run"
    for address, proxy in zip(served[1], proxies, strict=True):
        publish(run_dir, replace(address, url=proxy.url))
    stranger = page()
    for name in ("gone", "page"):
        publish(run_dir, Address(name, stranger.url, "another start"))
    patch = pytest.MonkeyPatch()
    patch.setattr(client, "HEALTH_S", 2.0)
    made = generator_on(run_dir, served[0], "finish", weights=request.param)
    yield made
    made.close()
    patch.undo()
    stranger.shutdown()
    assert all(TOKEN not in head for head in stranger.heads)


def page() -> ThreadingHTTPServer:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.server.heads.append(str(self.headers))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>a page</html>")

        def log_message(self, *_) -> None:
            """Not in the test's output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    server.heads, server.url = [], f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture(autouse=True)
def unharmed(proxies) -> Iterator[None]:
    yield
    for proxy in proxies:
        proxy.alter = None


def both_ready(generator: ServerGenerator, models: list[Path]) -> None:
    """Wait until both servers are there, and give them weights that both hold."""
    wait(generator, lambda: sum(not member.lost for member in generator._servers.pool.members.values()) == 2)
    while len(generator._servers.pool.ready) < 2:
        update(generator, models)


def assert_goes_on(generator: ServerGenerator, models: list[Path], seed: int) -> None:
    """A batch is whole, and of the newest weights alone."""
    groups = generator.rollout(prompts(6, seed), 2, policy_version=generator.version, step=seed)
    assert len(flat(groups)) == 12
    assert {int(v) for _, rollout in flat(groups) for v in np.unique(rollout.policy_versions)} == {generator.version}
    assert_sampled_as_said(generator, models, groups)


def test_strangers_are_set_aside_and_shown(generator, models):
    pool = generator._servers.pool
    assert_goes_on(generator, models, 1)
    wait(generator, lambda: set(pool.aside) == {"gone", "page"})
    rows = {row["name"]: row for row in table(pool, pool.refused, aside=pool.aside)["servers"]}
    assert [rows[name]["state"] for name in ("local-0", "local-1", "gone", "page")] == ["ready"] * 2 + ["aside"] * 2
    assert "introduction: expected JSON, got " in rows["page"]["lost"]


def one_less(name: str):
    """An answer in which the number ``name`` is one less."""
    return lambda body: json.dumps(json.loads(body) | {name: json.loads(body)[name] - 1}).encode()


ALTERED = {
    "null": lambda body: b"null",
    "another version": one_less("version"),
    "fewer tensors": one_less("tensors"),
    "half of it": lambda body: body[: len(body) // 2],
}


@pytest.mark.parametrize("name", slow_but(["another version", "half of it"], ALTERED))
def test_an_update_whose_answer_does_not_say_so_does_not_count(generator, models, proxies, name):
    """The server is lost until it has taken the weights that are due, and says so."""
    both_ready(generator, models)

    def alter(path: str, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        return with_body(head, ALTERED[name](body)) if path == WEIGHTS else (head, body)

    proxies[0].alter = alter
    update(generator, models)
    pool = generator._servers.pool
    wait(generator, lambda: f"weight update {generator.version}: " in pool.members["local-0"].lost)
    assert [member.address.name for member in pool.ready] == ["local-1"]
    assert_goes_on(generator, models, 2)
    proxies[0].alter = None
    both_ready(generator, models)
    assert_goes_on(generator, models, 3)


def test_answers_that_are_not_to_their_requests_are_asked_for_again(generator, models, proxies):
    """A page, half of one, one that was cut, and one to another request."""
    both_ready(generator, models)
    before: list[tuple[bytes, bytes]] = []
    harms = [
        lambda head, body: with_body(head, b"<html>"),
        lambda head, body: with_body(head, body[: len(body) // 2]),
        lambda head, body: before[0],
        lambda head, body: (head.replace(b"content-length: ", b"content-length: 9999999999999"), body),
    ]

    def alter(path: str, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        if path != GENERATE or not head.startswith(b"HTTP/1.1 200"):
            return head, body
        before.append((head, body))
        return harms.pop()(head, body) if len(before) > 1 and harms else (head, body)

    proxies[0].alter = alter
    while harms:
        assert_goes_on(generator, models, 4 + len(harms))
        assert generator.stats()["rollout/requeued"] > 0
        both_ready(generator, models)


def test_a_server_that_is_stopped_is_lost_until_it_goes_on(generator, models, served):
    both_ready(generator, models)
    pool, pid = generator._servers.pool, served[1][0].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        assert_goes_on(generator, models, 9)
        wait(generator, lambda: bool(pool.members["local-0"].lost))
        update(generator, models)
        assert_goes_on(generator, models, 10)
    finally:
        os.kill(pid, signal.SIGCONT)
    both_ready(generator, models)
    assert_goes_on(generator, models, 11)


def test_a_clock_that_jumps_changes_nothing(generator, models, monkeypatch):
    both_ready(generator, models)
    now, jumps = time.time(), iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: now + (-1) ** next(jumps) * 1e7)
    update(generator, models)
    assert_goes_on(generator, models, 12)
    assert len(generator._servers.pool.ready) == 2


def on_same_servers(served, tmp_path: Path, model: Path | None = None) -> None:
    run_dir = tmp_path / "run"
    for address in served[1]:
        publish(run_dir, address)
    with pytest.MonkeyPatch.context() as patch:
        if model is not None:
            patch.setattr(in_flight, "MODEL", model)
        generator_on(run_dir, served[0], "finish", wait_s=3.0, health_every_s=0.2).close()


def test_a_run_of_another_token_gets_no_answer_from_them(served, tmp_path, monkeypatch):
    monkeypatch.setattr(in_flight, "TOKEN", "another-token-of-this-test")
    with pytest.raises(RolloutError, match=r"0 can be used; local-[01] is not used \(.*does not prove"):
        on_same_servers(served, tmp_path)


def test_a_run_of_another_model_is_refused_by_key(served, models, tmp_path):
    """Its shapes are the same: version 0 would be sampled from other weights than the learner starts from."""
    with pytest.raises(InputError, match=r"server local-[01]: weights: the server has '.*', the recipe says '"):
        on_same_servers(served, tmp_path, models[1])
    changed = json.loads((models[1] / "config.json").read_text()) | {"rope_theta": 5.0}
    (models[1] / "config.json").write_text(json.dumps(changed))
    with pytest.raises(InputError, match="config: the server has"):
        on_same_servers(served, tmp_path, models[1])
