"""One call to a server, and what answers at an address but is no server of the run: it is not used, for a reason
that is said, and a run with another server goes on. Real sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict

import pytest

from megatron_rl.config.rollout import ServersConfig
from megatron_rl.errors import InputError
from megatron_rl.rollout import RolloutError
from megatron_rl.rollout.servers import client as client_module
from megatron_rl.rollout.servers.client import (
    GENERATE,
    SETTINGS,
    WEIGHTS,
    RequestRefused,
    ServerClient,
    ServerError,
    ServerLost,
    StaleServer,
    UpdateInterrupted,
    Weights,
)
from megatron_rl.rollout.servers.pool import PoolLimits, ServerPool, table
from megatron_rl.rollout.servers.rendezvous import Address, ServerSettings, discover, folder, printable, publish
from megatron_rl.rollout.servers.weight_broadcast import Amount
from megatron_rl.rollout.servers.wire import Load

TOKEN = "a-token-of-tests-0123456789"
LIMITS = PoolLimits(wait_s=600.0, health_every_s=0.01)
SAID = ServerSettings("s", {}, {}, "gloo", 1, None, False, Load())
Reply = Callable[[bytes], bytes]


def http(body: bytes, kind: str = "application/json", status: str = "200 OK", **headers: object) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in ({"Content_Length": len(body)} | headers).items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def reply_json(content: object) -> bytes:
    return http(json.dumps(content).encode())


@contextlib.asynccontextmanager
async def listening(reply: Reply, heard: list[bytes] | None = None):
    """The address at which every request is answered with ``reply`` of its head."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            if heard is not None:
                heard.append(head)
            writer.write(reply(head))
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def settings(**changes: object) -> bytes:
    return reply_json(asdict(SAID) | {"version": 0} | changes)


def good(head: bytes) -> bytes:
    if SETTINGS.encode() in head:
        return settings()
    return reply_json({"version": 0, "tensors": 1, "bytes": 1} if WEIGHTS.encode() in head else {})


STRANGERS: dict[str, Reply] = {
    "a page": lambda head: http(b"<html>hi</html>", "text/html"),
    "nothing": lambda head: b"",
    "no HTTP": lambda head: b"SSH-2.0-OpenSSH_9.6\r\n",
    "a list": lambda head: http(b"[]"),
    "half of JSON": lambda head: http(b"{"),
    "Latin-1": lambda head: http(b'{"a":"\xe9"}'),
    "brackets": lambda head: http(b"[" * 200000),
    "a length that is not one": lambda head: http(b"{}", Content_Length="ten"),
    "a redirect to itself": lambda head: http(b"", status="307 X", Location=SETTINGS),
    "404": lambda head: http(b"no such page", "text/html", "404 Not Found"),
    "401": lambda head: http(b'{"error": "a valid token is required"}', status="401 Unauthorized"),
    "an error page of a megabyte": lambda head: http(b"\xff" * 2**20, "text/html; charset=utf-8", "500 X"),
}


async def with_pool(urls: dict[str, str], scene, problems=lambda settings: [], said=None):
    pool = ServerPool(
        LIMITS,
        lambda: [Address(name, url) for name, url in urls.items()],
        lambda address: ServerClient(address, TOKEN, 60.0),
        problems,
        (said if said is not None else []).append,
    )
    try:
        return await scene(pool)
    finally:
        await pool.close()


@pytest.mark.parametrize("name", STRANGERS)
def test_a_run_with_another_server_goes_on(name):
    heard, said = [], []

    async def scene(pool: ServerPool):
        await pool.start(1)
        await pool.until(lambda: "stranger" in pool.refused and len(heard) >= 4, "some looks")
        assert not pool.keeper.done()
        return table(pool)["servers"]

    async def run():
        async with listening(good) as one, listening(STRANGERS[name], heard) as other:
            return await with_pool({"stranger": other, "good": one}, scene, said=said)

    rows = {row["name"]: row for row in asyncio.run(run())}
    assert (rows["good"]["state"], rows["stranger"]["state"]) == ("ready", "refused")
    assert 0 < len(rows["stranger"]["lost"]) < 600
    assert rows["stranger"]["lost"].isprintable()
    assert sum("stranger" in line for line in said) == 1, "it is said once"


def test_with_nothing_but_strangers_the_start_says_what_they_are(monkeypatch):
    async def run():
        async with listening(STRANGERS["a page"]) as url:
            await with_pool({"stranger": url}, lambda pool: pool.start(1))

    monkeypatch.setattr(LIMITS, "wait_s", 0.5)
    with pytest.raises(RolloutError, match=r"0 can be used; stranger is not used \(.*settings: the answer is not JSON"):
        asyncio.run(run())


def test_a_server_that_does_not_fit_does_not_end_a_start_that_has_another():
    async def scene(pool: ServerPool):
        await pool.start(1)
        await pool.until(lambda: "other" in pool.refused, "a look at it")
        return pool.reasons()

    async def run(*names: str):
        async with listening(good) as one, listening(lambda head: settings(agreed={"dtype": "bf16"})) as other:
            urls = {"good": one, "other": other}
            urls = {name: urls[name] for name in names}
            return await with_pool(urls, scene, lambda settings: ["dtype"] if settings.agreed else [])

    assert asyncio.run(run("other", "good")) == ["other is not used (dtype)"]
    with pytest.raises(InputError, match="server other: dtype"):
        asyncio.run(run("other"))


@pytest.mark.parametrize("problem", [ValueError("a fault of ours"), OSError("Input/output error")])
def test_no_fault_of_one_server_ends_the_keeper(problem):
    """Neither one in looking at it, nor a disk that cannot tell for a while where servers are."""
    looks, said = [], []

    def problems(settings: ServerSettings) -> list[str]:
        if settings.agreed:
            raise problem
        return []

    def failing():
        raise OSError(5, "Input/output error")

    async def scene(pool: ServerPool):
        ask, pool._discover = pool._discover, lambda: looks.append(1) or (failing() if len(looks) % 2 else ask())
        await pool.start(1)
        await pool.until(lambda: "other" in pool.refused, "a look")
        return pool.refused["other"]

    async def run():
        async with listening(good) as one, listening(lambda head: settings(agreed={"a": 1})) as other:
            return await with_pool({"other": other, "good": one}, scene, problems, said)

    assert str(problem) in asyncio.run(run())
    assert any("looking for servers failed, and is tried again: [Errno 5] Input/output error" in line for line in said)


# ---------------------------------------------------------------- one call


async def call(reply: Reply, ask: Callable[[ServerClient], Awaitable]):
    async with listening(reply) as url:
        client = ServerClient(Address("s", url), TOKEN, 60.0)
        try:
            return await ask(client)
        finally:
            await client.close()


def test_what_drips_is_given_up(monkeypatch):
    """Within the limit of the whole call, though something comes all the time."""
    monkeypatch.setattr(client_module, "HEALTH_S", 0.2)

    async def scene():
        async def drip(reader, writer):
            with contextlib.suppress(ConnectionError):
                writer.write(http(b"", Content_Length=1000))
                while True:
                    writer.write(b" ")
                    await writer.drain()
                    await asyncio.sleep(0.01)

        server = await asyncio.start_server(drip, "127.0.0.1", 0)
        client = ServerClient(Address("s", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), TOKEN, 60.0)
        try:
            await client.settings()
        finally:
            await client.close()
            server.close()

    with pytest.raises(ServerLost, match=r"settings: no answer in 0\.2 s"):
        asyncio.run(scene())


@pytest.mark.parametrize("how", [{"files": ("/a",)}, {"files": None}])
def test_only_an_answer_that_says_what_arrived_is_a_weight_update(how):
    def pushed(content: object, amount: Amount | None = None) -> Amount:
        weights = Weights(7, **how, amount=amount)
        return asyncio.run(call(lambda head: reply_json(content), lambda client: client.push(weights)))

    for content in (None, [], "7", {}):
        with pytest.raises(ServerLost, match="weights: the answer does not say what arrived"):
            pushed(content)
    taken = {"version": 7, "tensors": 3, "bytes": 12}
    assert pushed(taken, Amount(3, 12)) == Amount(3, 12)
    with pytest.raises(ServerLost, match=r"the server got Amount\(tensors=3, bytes=12\), but Amount\(tensors=4"):
        pushed(taken, Amount(4, 12))


@pytest.mark.parametrize(
    ("path", "status", "content", "kind"),
    [
        (GENERATE, "400 X", b'{"error": "too long"}', RequestRefused),
        (GENERATE, "400 X", b"<html>", ServerLost),
        (GENERATE, "401 X", b'{"error": "no"}', ServerLost),
        (GENERATE, "409 X", b'{"error": "no"}', StaleServer),
        (GENERATE, "503 X", b'{"error": "no"}', ServerLost),
        (GENERATE, "500 X", b"\xff\x00\x1b[2J", ServerLost),
        (WEIGHTS, "503 X", b'{"error": "gave up"}', UpdateInterrupted),
        (WEIGHTS, "503 X", b"<html>", ServerLost),
    ],
)
def test_what_a_status_means(path, status, content, kind):
    """A request is refused, and the run ends, only where a server says so in its own words."""
    is_json = content.startswith(b"{")
    reply = lambda head: http(content, "application/json" if is_json else "text/html", status)  # noqa: E731
    ask = {GENERATE: lambda client: client.generate({}, 0), WEIGHTS: lambda client: client.push(Weights(0))}[path]
    with pytest.raises(ServerError) as caught:
        asyncio.run(call(reply, ask))
    assert type(caught.value) is kind
    assert caught.value.is_final
    assert str(caught.value).isprintable()


def test_errors_are_short_and_printable():
    text = "\x1b[2J\u202e" + "long " * 10**6
    with pytest.raises(ServerLost) as caught:
        asyncio.run(call(lambda head: http(text.encode(), "text/plain", "500 X"), lambda c: c.settings()))
    assert str(caught.value).startswith("/megatron_rl/settings: status 500: \\x1b[2J\\u202elong long")
    assert len(str(caught.value)) < 400
    assert printable("\ud800\x00 é\n\t ü", 99) == "\\ud800\\x00 é ü"


@pytest.mark.parametrize("content", [b"null", b"{", b'{"name": "\xe9"}', {"name": "other"}, {"more": 1}], ids=str)
def test_a_file_that_is_not_an_address_is_passed_over(tmp_path, content):
    publish(tmp_path, Address("good", "http://10.0.0.1:80"))
    if isinstance(content, dict):
        content = json.dumps(asdict(Address("bad", "http://10.0.0.2:80")) | content).encode()
    (folder(tmp_path) / "bad.json").write_bytes(content)
    (folder(tmp_path) / "folder.json").mkdir()
    assert [address.name for address in discover(ServersConfig(), tmp_path)] == ["good"]
