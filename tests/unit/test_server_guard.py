"""The guard in front of a server, the token, and what is refused before an engine starts."""

from __future__ import annotations

import asyncio
import json

import pytest

from megatron_rl.config.servers import ServersConfig
from megatron_rl.errors import InputError
from megatron_rl.rollout.servers.guard import GENERATE, OPEN, SETTINGS, Guard, GuardState
from megatron_rl.rollout.servers.rendezvous import Address, discover, folder, publish, read_token, withdraw
from megatron_rl.serve import serve
from tests.support.tiny import tiny_recipe

TOKEN = "a-token-of-tests-0123456789"


class App:
    """Stands behind the guard; answers everything, and can be made to wait with responses."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def __call__(self, scope, receive, send) -> None:
        self.paths.append(scope["path"])
        if scope["path"] == GENERATE:
            await self.go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'"from the engine"'})


async def call(
    guard: Guard, path: str, token: str | None = TOKEN, version: int | None = None, body: dict | None = None
):
    """(status, content) of one request."""
    headers = [(b"authorization", f"Bearer {token}".encode())] if token is not None else []
    headers += [(b"x-policy-version", str(version).encode())] if version is not None else []
    sent = []

    async def receive():
        return {"type": "http.request", "body": json.dumps(body or {}).encode(), "more_body": False}

    async def send(message):
        sent.append(message)

    await guard({"type": "http", "path": path, "headers": headers}, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


@pytest.mark.parametrize("path", [GENERATE, OPEN, SETTINGS, "/health", "/pause", "/collective_rpc", "/v1/models", "/x"])
@pytest.mark.parametrize("token", [None, "", TOKEN[:-1], TOKEN + "x"])
def test_nothing_is_answered_without_the_token(path, token):
    app = App()
    guard = Guard(app, GuardState(token=TOKEN))
    assert asyncio.run(call(guard, path, token))[0] == 401
    assert app.paths == []


def test_a_server_without_a_token_answers_nobody():
    assert asyncio.run(call(Guard(App(), GuardState()), "/health", ""))[0] == 401


def test_only_the_version_that_is_open_is_sampled():
    async def scene():
        guard = Guard(App(), GuardState(token=TOKEN))
        seen = [await call(guard, GENERATE, version=0)]
        await call(guard, OPEN, body={"version": 4})
        seen += [await call(guard, GENERATE, version=v) for v in (4, 3, None)]
        assert (await call(guard, SETTINGS))[1]["version"] == 4
        await call(guard, "/health")
        seen.append(await call(guard, GENERATE, version=4))
        await call(guard, "/start_weight_update")
        return [*seen, await call(guard, GENERATE, version=4)]

    closed, open_, older, unnamed, healthy, updating = asyncio.run(scene())
    assert open_ == healthy == (200, "from the engine")
    assert [status for status, _ in (closed, older, unnamed, updating)] == [409] * 4
    assert older[1]["error"] == "policy version 3 was asked for, this server holds 4"


def test_an_answer_that_an_update_overtook_is_thrown_away():
    """Even where the version that comes back has the same number."""

    async def scene():
        app = App()
        guard = Guard(app, GuardState(token=TOKEN))
        await call(guard, OPEN, body={"version": 1})
        app.go_on.clear()
        asked = asyncio.create_task(call(guard, GENERATE, version=1))
        await asyncio.sleep(0)
        await call(guard, "/update_weights")
        await call(guard, OPEN, body={"version": 1})
        app.go_on.set()
        return await asked

    assert asyncio.run(scene())[0] == 409


def test_a_token_comes_from_the_environment_or_a_private_file(tmp_path):
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    assert read_token(ServersConfig(token_file=file), {}) == TOKEN
    assert read_token(ServersConfig(), {"MRL_SERVER_TOKEN": TOKEN}) == TOKEN
    assert read_token(ServersConfig(), {}) is None
    file.chmod(0o640)
    with pytest.raises(InputError, match=r"others than its owner may read it \(mode 640\); chmod 600"):
        read_token(ServersConfig(token_file=file), {})
    with pytest.raises(InputError, match="holds 5 characters; at least 16"):
        read_token(ServersConfig(), {"MRL_SERVER_TOKEN": "short"})


def test_servers_are_found_by_their_files_or_by_the_recipe(tmp_path):
    first, second = (
        Address("n1-7", "http://10.0.0.1:5", "x", 7, "n1"),
        Address("n2-7", "http://10.0.0.2:5", "y", 7, "n2"),
    )
    assert discover(ServersConfig(), tmp_path) == []
    publish(tmp_path, first)
    path = publish(tmp_path, second)
    (folder(tmp_path) / "broken.json").write_text("{")
    assert discover(ServersConfig(), tmp_path) == [first, second]
    withdraw(path, Address("n2-7", "http://10.0.0.2:9", "z", 8, "n2"))  # another server of the name: not ours to remove
    assert path.is_file()
    withdraw(path, second)
    assert discover(ServersConfig(), tmp_path) == [first]
    listed = ServersConfig(addresses=["http://10.0.0.9:80/"])
    assert [address.url for address in discover(listed, tmp_path)] == ["http://10.0.0.9:80"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_serve_refuses_all_interfaces(host, monkeypatch, tmp_path):
    monkeypatch.setenv("MRL_SERVER_TOKEN", TOKEN)
    recipe = tiny_recipe(run_root=str(tmp_path), rollout={"engine": "vllm_server"})
    with pytest.raises(InputError, match=r"all interfaces at once"):
        serve(recipe, host=host)


def test_serve_wants_a_token_and_the_right_engine(monkeypatch):
    monkeypatch.delenv("MRL_SERVER_TOKEN", raising=False)
    with pytest.raises(InputError, match=r"no token: set the environment variable MRL_SERVER_TOKEN"):
        serve(tiny_recipe(rollout={"engine": "vllm_server"}))
    with pytest.raises(InputError, match=r"rollout.engine: vllm; `serve` starts servers for"):
        serve(tiny_recipe())


@pytest.mark.parametrize("engine", ["vllm", "exact"])
def test_staleness_needs_servers(engine):
    with pytest.raises(ValueError, match=f"max_staleness: 1, but engine `{engine}` works in the learner's own process"):
        tiny_recipe(rollout={"engine": engine, "max_staleness": 1})
    assert tiny_recipe(rollout={"engine": "vllm_server", "max_staleness": 2}).rollout.max_staleness == 2
