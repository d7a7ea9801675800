"""The guard in front of a server, the token, new weights, and what is refused before an engine starts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.config.rollout import ServersConfig
from megatron_rl.errors import InputError
from megatron_rl.rollout.servers import server
from megatron_rl.rollout.servers.guard import GENERATE, SETTINGS, WEIGHTS, Guard, GuardState, Overtaken
from megatron_rl.rollout.servers.rendezvous import Address, discover, folder, publish, read_token, withdraw
from megatron_rl.rollout.servers.server import serve
from megatron_rl.rollout.servers.weight_broadcast import GroupError
from megatron_rl.rollout.servers.wire import MEDIA_TYPE, unpack
from megatron_rl.types import Rollout
from tests.support.tiny import tiny_recipe

TOKEN = "a-token-of-tests-0123456789"


class App:
    """Stands behind the guard as vLLM's routes and as its engine, and can be made to wait with responses."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.aborted = 0
        self.version = 0
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def __call__(self, scope, receive, send) -> None:
        self.paths.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'"from vLLM"'})

    async def sample(self, body: dict, is_open: Callable[[], bool]) -> Rollout:
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        ids = body["token_ids"]
        return Rollout(
            "",
            (),
            np.array(ids, np.int32),
            np.zeros(len(ids), np.float32),
            np.full(len(ids), self.version, np.int32),
            "stop",
        )


async def call(
    guard: Guard,
    path: str,
    token: str | None = TOKEN,
    version: int | None = None,
    body: dict | None = None,
    hang_up: asyncio.Event | None = None,
    authorization: str = "Bearer {}",
):
    """(status, content) of one request; None where nothing was answered."""
    headers = [(b"authorization", authorization.format(token).encode())] if token is not None else []
    headers += [(b"x-policy-version", str(version).encode())] if version is not None else []
    sent, halves = [], []
    content = json.dumps(body if body is not None else {"token_ids": [1]}).encode()

    async def receive():
        if len(halves) < 2:
            halves.append(content[len(content) // 2 :] if halves else content[: len(content) // 2])
            return {"type": "http.request", "body": halves[-1], "more_body": len(halves) < 2}
        await (hang_up or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    await guard({"type": "http", "path": path, "headers": headers}, receive, send)
    if not sent:
        return None
    content = b"".join(message["body"] for message in sent[1:])
    assert [message.get("more_body", False) for message in sent[1:]] == [True] * (len(sent) - 2) + [False]
    assert int(dict(sent[0]["headers"]).get(b"content-length", len(content))) == len(content)
    if dict(sent[0]["headers"]).get(b"content-type") == MEDIA_TYPE.encode():
        answer = unpack(content)
        return sent[0]["status"], {name: getattr(answer, name).tolist() for name in ("tokens", "policy_versions")}
    return sent[0]["status"], json.loads(content)


@pytest.mark.parametrize(
    "path", [GENERATE, WEIGHTS, SETTINGS, "/health", "/pause", "/collective_rpc", "/v1/models", "/x"]
)
@pytest.mark.parametrize("token", [None, "", TOKEN[:-1], TOKEN + "x"])
def test_nothing_is_answered_without_the_token(path, token):
    app = App()
    guard = Guard(app, GuardState(token=TOKEN))
    assert asyncio.run(call(guard, path, token))[0] == 401
    assert app.paths == []


@pytest.mark.parametrize(
    ("authorization", "status"),
    [("bearer {}", 200), ("Bearer  {}", 200), ("Basic {}", 401), ("{}", 401), (" {}", 401), ("Bearer{}", 401)],
)
def test_a_token_comes_as_a_bearer(authorization, status):
    answer = asyncio.run(call(Guard(App(), GuardState(token=TOKEN)), "/health", authorization=authorization))
    assert answer[0] == status


def test_a_server_without_a_token_answers_nobody():
    assert asyncio.run(call(Guard(App(), GuardState()), "/health", ""))[0] == 401


PLACE = {"name": "n", "host": "h", "port": 1, "rank": 1, "world_size": 2, "backend": "gloo", "stall_s": 1.0}
AMOUNT = {"tensors": 3, "bytes": 12}


def guarded(app: App, replace: Callable[[dict, int, bool], Awaitable[dict]] | None = None) -> Guard:
    async def take(update: dict, version: int, keep: bool) -> dict:
        await asyncio.sleep(0)
        app.version = version
        return AMOUNT

    return Guard(app, GuardState(token=TOKEN, replace=replace or take, sample=app.sample))


def weights(version: int) -> dict:
    return {"version": version, "mode": "finish", "files": [f"/weights/{version}"]}


def test_only_the_version_that_is_open_is_sampled():
    async def scene():
        guard = guarded(App())
        seen = [await call(guard, GENERATE, version=0)]
        assert await call(guard, WEIGHTS, body=weights(4)) == (200, {"version": 4, **AMOUNT})
        seen += [await call(guard, GENERATE, version=v) for v in (4, 3, None)]
        assert (await call(guard, SETTINGS))[1]["version"] == 4
        await call(guard, "/health")
        seen.append(await call(guard, GENERATE, version=4))
        return seen

    closed, open_, older, unnamed, healthy = asyncio.run(scene())
    assert open_ == healthy == (200, {"tokens": [1], "policy_versions": [4]})
    assert [status for status, _ in (closed, older, unnamed)] == [409] * 3
    assert older[1]["error"] == "policy version 3 was asked for, this server holds 4"


def test_an_answer_that_an_update_overtook_is_thrown_away():
    """Even where the version that comes back has the same number."""

    async def scene():
        app = App()
        guard = guarded(app)
        await call(guard, WEIGHTS, body=weights(1))
        app.go_on.clear()
        asked = asyncio.create_task(call(guard, GENERATE, version=1))
        await asyncio.sleep(0)
        await call(guard, WEIGHTS, body=weights(1))
        app.go_on.set()
        return await asked

    assert asyncio.run(scene())[0] == 409


@pytest.mark.parametrize("mode", ["abort_and_resume", "keep"])
def test_an_answer_survives_the_updates_that_spare_it(mode):
    async def scene():
        app, modes = App(), []

        async def take(update, version, keep):
            modes.append(keep)
            return AMOUNT

        guard = guarded(app, take)
        await call(guard, WEIGHTS, body=weights(1))
        app.go_on.clear()
        asked = asyncio.create_task(call(guard, GENERATE, version=1))
        await asyncio.sleep(0)
        for version in (2, 3):
            await call(guard, WEIGHTS, body=weights(version) | {"mode": mode})
        app.go_on.set()
        return (await asked)[0], modes

    assert asyncio.run(scene()) == (200, [False, mode == "keep", mode == "keep"])


def test_a_request_whose_weights_went_while_its_body_came_is_not_sampled():
    async def scene():
        guard = guarded(App())

        async def overtaken(body, is_open):
            guard._change(2)
            assert not is_open()
            raise Overtaken

        guard._state.sample = overtaken
        await call(guard, WEIGHTS, body=weights(1))
        return (await call(guard, GENERATE, version=1))[0]

    assert asyncio.run(scene()) == 409


@pytest.mark.parametrize(
    "path", ["/inference/v1/generate", "/v1/completions", "/wake_up", "/collective_rpc", "/health/", "//health", "/"]
)
def test_what_the_trainer_does_not_use_is_not_offered(path):
    async def scene():
        app = App()
        guard = guarded(app)
        await call(guard, WEIGHTS, body=weights(1))
        return (await call(guard, path))[0], (await call(guard, GENERATE, version=1))[0], app.paths

    assert asyncio.run(scene()) == (404, 200, [])


@pytest.mark.parametrize("version", ["None", "none", "-1", " 1", "1.0", "+1", "1_0", "\u0661", "\xff", "", "9" * 5000])
@pytest.mark.parametrize("is_open", [False, True])
def test_a_version_is_a_number_that_the_server_holds(version, is_open):
    async def scene():
        app = App()
        guard = guarded(app)
        if is_open:
            await call(guard, WEIGHTS, body=weights(1))
        return await call(guard, GENERATE, version=version)

    status, content = asyncio.run(scene())
    assert status == 409
    assert len(content["error"]) < 150


def test_a_websocket_is_closed_unheard():
    async def scene():
        app, sent = App(), []

        async def send(message):
            sent.append(message)

        await guarded(app)({"type": "websocket", "path": "/v1/realtime", "headers": []}, None, send)
        return app.paths, sent

    assert asyncio.run(scene()) == ([], [{"type": "websocket.close", "code": 1008}])


@pytest.mark.parametrize("name", ["../../x", "a/b", "", ".hidden", "..", "x\0", "x\n"])
def test_a_server_s_file_stays_in_the_run_directory(name):
    with pytest.raises(InputError, match="it names a file in the run directory"):
        serve(tiny_recipe(rollout={"engine": "vllm_server"}), name=name)


def test_a_response_whose_caller_hung_up_is_aborted():
    async def scene():
        app, hang_up = App(), asyncio.Event()
        guard = guarded(app)
        await call(guard, WEIGHTS, body=weights(1))
        app.go_on.clear()
        asked = asyncio.create_task(call(guard, GENERATE, version=1, hang_up=hang_up))
        await asyncio.sleep(0.01)
        assert not asked.done()
        hang_up.set()
        answer = await asked
        await asyncio.sleep(0.01)
        return answer, app.aborted

    assert asyncio.run(scene()) == (None, 1)


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("too long"), 400), (KeyError("token_ids"), 400), (RuntimeError("dead"), 500)]
)
def test_what_vllm_refuses_is_told_from_what_fails(error, status):
    async def scene():
        app = App()

        async def raises(body, is_open):
            raise error

        app.sample = raises
        guard = guarded(app)
        await call(guard, WEIGHTS, body=weights(1))
        return await call(guard, GENERATE, version=1)

    assert asyncio.run(scene()) == (status, {"error": f"{type(error).__name__}: {error}"})


def test_nothing_is_sampled_while_weights_are_replaced_nor_after_that_failed():
    async def scene():
        loading, go_on = asyncio.Event(), asyncio.Event()

        async def fails(update, version, keep):
            loading.set()
            await go_on.wait()
            raise OSError(f"cannot read {update['files'][0]}")

        guard = guarded(App(), fails)
        guard._state.version = 1
        update = asyncio.create_task(call(guard, WEIGHTS, body=weights(2)))
        await loading.wait()
        meanwhile = [await call(guard, GENERATE, version=version) for version in (1, 2)]
        replacing = [(await call(guard, SETTINGS))[1]["replacing"]]
        go_on.set()
        failed = await update
        replacing.append((await call(guard, SETTINGS))[1]["replacing"])
        return meanwhile, replacing, failed, [await call(guard, GENERATE, version=version) for version in (1, 2)]

    meanwhile, replacing, failed, after = asyncio.run(scene())
    assert replacing == [True, False]
    assert [status for status, _ in meanwhile + after] == [409] * 4
    assert failed == (500, {"error": "OSError: cannot read /weights/2"})


def test_updates_are_made_one_after_the_other():
    async def scene():
        running, order = 0, []

        async def take(update, version, keep):
            nonlocal running
            running += 1
            assert running == 1
            order.append(version)
            for _ in range(5):
                await asyncio.sleep(0)
            running -= 1
            return AMOUNT

        guard = guarded(App(), take)
        both = await asyncio.gather(*(call(guard, WEIGHTS, body=weights(version)) for version in (1, 2)))
        return order, [status for status, _ in both], guard._state.version

    assert asyncio.run(scene()) == ([1, 2], [200, 200], 2)


def test_a_token_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("MRL_SERVER_TOKEN", TOKEN)
    assert read_token() == TOKEN
    monkeypatch.setenv("MRL_SERVER_TOKEN", "short")
    with pytest.raises(InputError, match="MRL_SERVER_TOKEN: holds 5 characters; at least 16"):
        read_token()
    monkeypatch.delenv("MRL_SERVER_TOKEN")
    assert read_token() is None


def test_servers_are_found_by_their_files_or_by_the_recipe(tmp_path):
    first, second = (
        Address("n1-7", "http://10.0.0.1:5", 7, "n1"),
        Address("n2-7", "http://10.0.0.2:5", 7, "n2"),
    )
    assert discover(ServersConfig(), tmp_path) == []
    publish(tmp_path, first)
    path = publish(tmp_path, second)
    (folder(tmp_path) / "broken.json").write_text("{")
    assert discover(ServersConfig(), tmp_path) == [first, second]
    withdraw(path, Address("n2-7", "http://10.0.0.2:9", 8, "n2"))  # another server of the name: not ours to remove
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


@pytest.mark.parametrize("port", [-1, 65536, 70000, 2**70])
def test_serve_takes_no_number_for_a_port_that_is_not_one(port):
    """The system would take the lower 16 bits of it."""
    with pytest.raises(InputError, match=f"--port {port}: a port is a number from 1 to 65535"):
        serve(tiny_recipe(rollout={"engine": "vllm_server"}), port=port)


def test_a_host_that_cannot_be_a_name_is_one_clear_error():
    with pytest.raises(InputError, match=r"serve: cannot listen on a{300} port 0 \("):
        server._listen("a" * 300, 0)


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


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ([AMOUNT, {"error": "gone", "interrupted": True}], GroupError),
        ([AMOUNT, {"error": "no such layer", "interrupted": False}], RuntimeError),
        ([AMOUNT, {**AMOUNT, "bytes": 8}], RuntimeError),
    ],
    ids=["a broadcast broke off", "a worker failed", "workers got different sets"],
)
def test_what_one_worker_could_not_load_fails_the_update(answers, error):
    """The engine's calls return what workers say; see `worker_extension.ServerExtension.replace_weights`."""

    async def rpc(method, args):
        return answers

    with pytest.raises(error) as raised:
        asyncio.run(server.load(SimpleNamespace(collective_rpc=rpc), {}))
    assert raised.type is error


def test_a_server_whose_broadcast_broke_off_is_closed_and_can_be_told_from_one_that_failed():
    async def scene():
        async def interrupted(update, version, keep):
            assert update == {"broadcast": PLACE}
            raise GroupError("the trainer gave the group up")

        guard = guarded(App(), interrupted)
        guard._state.version = 1
        answered = await call(guard, WEIGHTS, body={"version": 2, "mode": "finish", "broadcast": PLACE})
        return answered, guard._state.version

    assert asyncio.run(scene()) == ((503, {"error": "the trainer gave the group up"}), None)


def test_a_server_whose_engine_is_dead_says_so_in_place_of_its_settings():
    async def dead():
        raise RuntimeError("EngineCore died")

    guard = Guard(App(), GuardState(token=TOKEN, check=dead))
    assert asyncio.run(call(guard, SETTINGS)) == (500, {"error": "RuntimeError: EngineCore died"})
