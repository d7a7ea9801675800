"""What answers at an address and is not a server of the run, or says what cannot be true: one named error each, in
bounded memory, and a run with another server goes on. Real sockets; the real guard where a server has to prove itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import tracemalloc
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace

import aiohttp
import numpy as np
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.commands.run import server_table
from megatron_rl.config.rollout import ServersConfig
from megatron_rl.errors import InputError
from megatron_rl.rollout import RolloutError
from megatron_rl.rollout.servers import client as client_module
from megatron_rl.rollout.servers.client import (
    GENERATE,
    JSON_BYTES,
    READ_BYTES,
    SETTINGS,
    WEIGHTS,
    RequestRefused,
    ServerClient,
    ServerError,
    ServerLost,
    StaleServer,
    Stranger,
    UpdateInterrupted,
    Weights,
)
from megatron_rl.rollout.servers.guard import Guard, GuardState
from megatron_rl.rollout.servers.pool import Members, PoolLimits, ServerPool, read_table, table, table_path, write_table
from megatron_rl.rollout.servers.rendezvous import (
    Address,
    ServerSettings,
    discover,
    folder,
    key_for,
    printable,
    proof,
    publish,
)
from megatron_rl.rollout.servers.weight_broadcast import Amount
from megatron_rl.rollout.servers.wire import LOAD_HEADER, Damaged, Expected, Load, ModelLimits, pack, unpack
from megatron_rl.routing import RouteShape
from megatron_rl.types import Rollout

TOKEN = "a-token-of-tests-0123456789"
LIMITS = PoolLimits(wait_s=600.0, health_every_s=0.01)
Reply = Callable[[bytes], bytes | list[bytes]]


def http(body: bytes, kind: str = "application/json", status: str = "200 OK", **headers: object) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", "Connection: close"]
    values = {"Content-Length": len(body)} | {name.replace("_", "-"): value for name, value in headers.items()}
    lines += [f"{name}: {value}" for name, value in values.items() if value is not None]
    return "\r\n".join([*lines, "", ""]).encode() + body


def reply_json(content: object) -> bytes:
    return http(json.dumps(content).encode())


@contextlib.asynccontextmanager
async def listening(reply: Reply, heard: list[bytes] | None = None):
    """The address at which every request is answered with ``reply`` of its head; a list goes out piece by piece."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            if heard is not None:
                heard.append(head)
            pieces = reply(head)
            for piece in pieces if isinstance(pieces, list) else [pieces]:
                writer.write(piece)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def good(head: bytes) -> bytes:
    """A server that proves nothing, for pools that do not ask for it."""
    if SETTINGS.encode() in head:
        return reply_json({"replacing": False, "version": None, "workers": 1})
    return reply_json({"version": 0, "tensors": 1, "bytes": 1} if WEIGHTS.encode() in head else {})


def endless(head: bytes) -> list[bytes]:
    return [http(b"", Content_Length=None, Transfer_Encoding="chunked"), *[b"100000\r\n" + b" " * 2**20 + b"\r\n"] * 64]


TEXT = b'{"a":"' + b"x" * (64 << 20) + b'"}'
BOMB, DEFLATED = gzip.compress(TEXT, 1), zlib.compress(TEXT, 1)
HEADERS = b"".join(b"A%d: b\r\n" % number for number in range(20000))
STRANGERS: dict[str, Reply] = {
    "a page": lambda head: http(b"<html>hi</html>", "text/html"),
    "nothing": lambda head: b"",
    "no HTTP": lambda head: b"SSH-2.0-OpenSSH_9.6\r\n",
    "null": lambda head: http(b"null"),
    "a list": lambda head: http(b"[]"),
    "a number": lambda head: http(b"7"),
    "half of JSON": lambda head: http(b"{"),
    "Latin-1": lambda head: http(b'{"a":"\xe9"}'),
    "an error page in Latin-1": lambda head: http(b"caf\xe9", "text/html; charset=utf-8", "500 X"),
    "an unknown charset": lambda head: http(b"\xff\xfe", "text/html; charset=\xff", "500 X"),
    "brackets": lambda head: http(b"[" * 200000),
    "a number of 10^5 digits": lambda head: http(b'{"version":' + b"9" * 100000 + b"}"),
    "NaN": lambda head: http(b'{"workers": NaN}'),
    "a body of a megabyte": lambda head: http(b'{"a":"' + b"x" * 2**20 + b'"}'),
    "10^15 bytes": lambda head: http(b"{", Content_Length=10**15),
    "a length that is not one": lambda head: http(b"{}", Content_Length="ten"),
    "chunks without end": endless,
    "a gzip bomb": lambda head: http(BOMB, Content_Encoding="gzip"),
    "a deflate bomb": lambda head: http(DEFLATED, Content_Encoding="deflate"),
    "a redirect": lambda head: http(b"", status="302 Found", Location="http://127.0.0.1:1/"),
    "a redirect to itself": lambda head: http(b"", status="307 X", Location=SETTINGS),
    "404": lambda head: http(b"no such page", "text/html", "404 Not Found"),
    "401": lambda head: http(b'{"error": "a valid token is required"}', status="401 Unauthorized"),
    "400": lambda head: http(b'{"error": "no"}', status="400 Bad Request"),
    "409": lambda head: http(b'{"error": "no"}', status="409 Conflict"),
    "503": lambda head: http(b'{"error": "no"}', status="503 Unavailable"),
    "a long line": lambda head: b"HTTP/1.1 200 " + b"O" * 2**20 + b"\r\n\r\n",
    "many headers": lambda head: b"HTTP/1.1 200 OK\r\n" + HEADERS + b"\r\n",
    "workers: true": lambda head: reply_json({"workers": True}),
    "workers: 10^9": lambda head: reply_json({"workers": 10**9}),
    "a version of text": lambda head: reply_json({"version": "0"}),
    "agreed: a list": lambda head: reply_json({"agreed": []}),
    "precision of numbers": lambda head: reply_json({"precision": {"router": 1}}),
    "an unknown backend": lambda head: reply_json({"backend": ["gloo"]}),
}


async def with_pool(addresses: list[Address], scene, problems=lambda settings: [], connect=None, said=None):
    pool = ServerPool(
        LIMITS,
        lambda: addresses,
        connect or (lambda address: ServerClient(address, TOKEN, 60.0)),
        problems,
        (said if said is not None else []).append,
    )
    try:
        return await scene(pool)
    finally:
        await pool.close()


@pytest.mark.parametrize("name", STRANGERS)
def test_a_run_with_another_server_goes_on(name):
    """The stranger is set aside with a reason, never hears the token, and the keeper looks at it again."""
    heard, said = [], []

    async def scene(pool: ServerPool):
        await pool.start(1)
        await pool.until(lambda: "stranger" in pool.aside and len(heard) >= 4, "some looks")
        assert not pool.keeper.done()
        return table(pool, pool.refused, aside=pool.aside)["servers"]

    async def run():
        async with listening(good) as one, listening(STRANGERS[name], heard) as other:
            addresses = [Address("stranger", other), Address("good", one)]
            return await with_pool(addresses, scene, said=said)

    tracemalloc.start()
    rows = {row["name"]: row for row in asyncio.run(run())}
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * READ_BYTES, "what it sends is not kept"  # both ends' buffers
    assert (rows["good"]["state"], rows["stranger"]["state"]) == ("ready", "aside")
    assert 0 < len(rows["stranger"]["lost"]) < 600
    assert rows["stranger"]["lost"].isprintable()
    assert all(TOKEN.encode() not in head for head in heard)
    assert sum("is set aside" in line for line in said) <= 1, "it is said once"


def test_with_nothing_but_strangers_the_start_says_what_they_are(monkeypatch):
    async def scene(pool: ServerPool):
        await pool.start(1)

    async def run():
        async with listening(STRANGERS["a page"]) as url:
            await with_pool([Address("stranger", url, "gone")], scene)

    monkeypatch.setattr(LIMITS, "wait_s", 0.5)
    with pytest.raises(
        RolloutError, match=r"0 can be used; stranger is not used \(.*settings: expected JSON, got text"
    ):
        asyncio.run(run())


def test_a_server_that_does_not_fit_does_not_end_a_start_that_has_another():
    async def scene(pool: ServerPool):
        await pool.start(1)
        await pool.until(lambda: "other" in pool.refused, "a look at it")
        return pool.reasons()

    async def run(*names: str):
        async with listening(good) as one, listening(lambda head: reply_json({"agreed": {"dtype": "bf16"}})) as other:
            urls = {"good": one, "other": other}
            addresses = [Address(name, urls[name], "x") for name in names]
            return await with_pool(addresses, scene, lambda settings: ["dtype"] if settings.agreed else [])

    assert asyncio.run(run("other", "good")) == ["other is not used (dtype)"]
    with pytest.raises(InputError, match="server other: dtype"):
        asyncio.run(run("other"))


def test_a_lost_server_whose_engine_has_stopped_does_not_come_back():
    """It still says its settings, for a moment."""
    asked = []

    def stopped(head: bytes) -> bytes:
        asked.append(head)
        return http(b"", status="503 Service Unavailable") if b"/health" in head else good(head)

    async def scene(pool: ServerPool):
        await pool.start(2)
        await pool.until(lambda: "other" in pool.aside, "a second look")
        return pool.members["other"].lost, pool.aside["other"], pool._num_joined

    async def run():
        async with listening(good) as one, listening(stopped) as other:
            return await with_pool([Address("good", one), Address("other", other)], scene)

    lost, aside, joined = asyncio.run(run())
    assert lost == aside == "/health: status 503: "
    assert joined == 2


@pytest.mark.parametrize("problem", [ValueError("a fault of ours"), OSError("Input/output error")])
def test_no_fault_of_one_server_ends_the_keeper(problem):
    """Neither one in looking at it, nor a disk that cannot tell for a while where servers are."""
    looks, said = [], []

    def problems(settings: ServerSettings) -> list[str]:
        if settings.agreed:
            raise problem
        return []

    async def scene(pool: ServerPool):
        ask, pool._discover = pool._discover, lambda: looks.append(1) or (failing() if len(looks) % 2 else ask())
        await pool.start(1)
        await pool.until(lambda: "other" in pool.aside, "a look")
        return pool.aside["other"]

    def failing():
        raise OSError(5, "Input/output error")

    async def run():
        async with listening(good) as one, listening(lambda head: reply_json({"agreed": {"a": 1}})) as other:
            return await with_pool([Address("other", other), Address("good", one)], scene, problems, said=said)

    assert str(problem) in asyncio.run(run())
    assert any("looking for servers failed, and is tried again: [Errno 5] Input/output error" in line for line in said)


# ---------------------------------------------------------------- one call


async def call(reply: Reply, ask: Callable[[ServerClient], Awaitable], mode="finish", model=None):
    async with listening(reply) as url:
        client = ServerClient(Address("s", url, "instance"), TOKEN, 60.0, mode, model)
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
        client = ServerClient(Address("s", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "i"), TOKEN, 60.0)
        try:
            await client.settings()
        finally:
            await client.close()
            server.close()

    with pytest.raises(ServerLost, match=r"settings: no answer in 0\.2 s"):
        asyncio.run(scene())


@pytest.mark.parametrize("content", [None, [], "7", {}, {"version": 6, "tensors": 1, "bytes": 4}])
@pytest.mark.parametrize("how", [{"files": ("/a",)}, {"files": None}])
def test_only_an_answer_that_names_the_version_is_a_weight_update(content, how):
    weights = Weights(7, **how)
    with pytest.raises(ServerLost, match=r"weights: (expected a version|version 7 was sent, the server holds 6)"):
        asyncio.run(call(lambda head: reply_json(content), lambda client: client.push(weights)))
    taken = {"version": 7, "tensors": 3, "bytes": 12}
    for name, value in ((name, value) for name in taken for value in (True, "7", 7.0, -1, None)):
        with pytest.raises(ServerLost, match="expected a version and numbers"):
            asyncio.run(call(lambda head: reply_json(taken | {name: value}), lambda client: client.push(weights)))  # noqa: B023
    exact = replace(weights, amount=Amount(3, 12))
    assert asyncio.run(call(lambda head: reply_json(taken), lambda client: client.push(exact))) == {
        "tensors": 3,
        "bytes": 12,
    }
    with pytest.raises(ServerLost, match=r"the server got Amount\(tensors=3, bytes=12\), but Amount\(tensors=4"):
        asyncio.run(call(lambda head: reply_json(taken), lambda c: c.push(replace(weights, amount=Amount(4, 12)))))


@pytest.mark.parametrize(
    ("path", "status", "content", "kind"),
    [
        (GENERATE, "400 X", b'{"error": "too long"}', RequestRefused),
        (GENERATE, "400 X", b"<html>", Stranger),
        (GENERATE, "413 X", b'{"error": "too long"}', RequestRefused),
        (GENERATE, "404 X", b'{"error": "no"}', Stranger),
        (GENERATE, "401 X", b'{"error": "no"}', Stranger),
        (GENERATE, "409 X", b'{"error": "no"}', StaleServer),
        (GENERATE, "503 X", b'{"error": "no"}', ServerLost),
        (GENERATE, "500 X", b"\xff\x00\x1b[2J", ServerLost),
        (WEIGHTS, "503 X", b'{"error": "gave up"}', UpdateInterrupted),
        (WEIGHTS, "503 X", b"<html>", ServerLost),
        (WEIGHTS, "404 X", b"<html>", Stranger),
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
        asyncio.run(call(lambda head: http(text.encode(), "text/plain", "500 X"), lambda c: c.check_health()))
    assert str(caught.value).startswith("/health: status 500: \\x1b[2J\\u202elong long")
    assert len(str(caught.value)) < 400
    assert printable("\ud800\x00 é\n\t ü", 99) == "\\ud800\\x00 é ü"


# ---------------------------------------------------------------- responses

SHAPE = RouteShape(num_experts=8, topk=2, layers=(1, 3, 5))
MODEL = ModelLimits(vocab_size=99, shape=SHAPE)
BODY = {"token_ids": [3, 4, 5], "sampling_params": {"max_tokens": 6}, "wants_routes": True}


def answer(n: int = 4, version: int = 3, rows: int | None = None) -> Rollout:
    rows = 2 + n if rows is None else rows
    return Rollout(
        "",
        (),
        tokens=np.arange(n, dtype=np.int32),
        inference_logprobs=np.full(n, -0.5, np.float32),
        policy_versions=np.full(n, version, np.int32),
        finish_reason="stop",
        routed_experts=np.zeros((rows, 3, 2), np.uint8),
        route_checksums=np.zeros(rows + 3, np.int64),
    )


def sent(response: Rollout) -> bytes:
    return http(b"".join(pack(response)), "application/octet-stream")


def generated(content: bytes, mode="keep", body=BODY, model=MODEL) -> Rollout:
    return asyncio.run(call(lambda head: content, lambda client: client.generate(body, 3), mode, model))


def with_one(array: np.ndarray, value: float) -> np.ndarray:
    array = array.copy()
    array.reshape(-1)[-1] = value
    return array


WITHOUT_ROUTES = {"routed_experts": None, "route_checksums": None}


def with_logprob(value: float) -> Rollout:
    return replace(answer(), inference_logprobs=with_one(answer().inference_logprobs, value))


def with_route(expert: int) -> Rollout:
    return replace(answer(), routed_experts=with_one(answer().routed_experts, expert))


def test_a_response_within_the_bounds_of_its_request_is_taken():
    for response in (answer(1), answer(6), replace(answer(6), finish_reason="length")):
        assert (generated(sent(response)).tokens == response.tokens).all()
    unrecorded = replace(answer(), routed_experts=with_one(with_one(answer().routed_experts, 255)[..., ::-1], 255))
    assert (generated(sent(unrecorded)).routed_experts[-1, -1] == 255).all()  # no record for a whole row
    assert len(generated(sent(replace(answer(0), finish_reason="abort", **WITHOUT_ROUTES))).tokens) == 0
    later = {**BODY, "first_route": 2}
    assert len(generated(sent(answer(4, rows=4)), body=later).tokens) == 4
    assert len(generated(sent(replace(answer(), policy_versions=np.array([3, 3, 4, 9], np.int32)))).tokens) == 4


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (replace(answer(), finish_reason="length"), "cut at 4 tokens, 6 were asked for"),
        (
            with_logprob(-3e38),
            "a log-prob of -3e+38; no token is sampled",
        ),
        (answer(7), "7 tokens, finish reason 'stop'; 6 were asked for"),
        (replace(answer(0), **WITHOUT_ROUTES), "0 tokens"),
        (replace(answer(), tokens=with_one(answer().tokens, 99)), "token 0 or 99 is not in 0 … 98"),
        (replace(answer(), tokens=with_one(answer().tokens, -1)), "token -1 or"),
        (
            with_logprob(np.nan),
            "a log-prob is not finite, or above 0",
        ),
        (
            with_logprob(-np.inf),
            "a log-prob is not finite",
        ),
        (with_logprob(0.1), "or above 0"),
        (replace(answer(), **WITHOUT_ROUTES), "routes are missing"),
        (answer(rows=5), "routes of 5 rows with 8 checksums; 6 rows are due"),
        (replace(answer(), route_checksums=np.zeros(8, np.int64)), "6 rows with 8 checksums"),
        (
            with_route(8),
            "a route to an expert that is not in 0 … 7",
        ),
        (with_route(255), "a route to an expert"),
        (replace(answer(), routed_experts=answer().routed_experts.astype(np.uint16)), "are not the model's"),
        (replace(answer(), routed_experts=answer().routed_experts[..., :1]), "are not the model's"),
        (replace(answer(), finish_reason="error"), "unknown finish reason 'error'"),
        (replace(answer(), finish_reason=None), "unknown finish reason None"),
        (answer(version=2), "tokens of older policy versions than 3"),
        (replace(answer(), policy_versions=np.array([3, 4, 3, 3], np.int32)), "or in a wrong order"),
    ],
)
def test_a_response_that_cannot_be_one_to_the_request_is_a_lost_server(response, said):
    with pytest.raises(ServerLost) as caught:
        generated(sent(response))
    assert said in str(caught.value)
    assert not caught.value.is_final, "another server is asked, and this one's health is looked at"


def test_routes_that_nobody_asked_for_are_refused():
    for body, model in (({**BODY, "wants_routes": False}, MODEL), (BODY, ModelLimits(99))):
        with pytest.raises(ServerLost, match=r"routes were not asked for|to this request it has at most"):
            generated(sent(answer()), body=body, model=model)


def test_no_memory_is_taken_for_what_a_request_cannot_bring():
    """Neither for the length that is announced, nor for run lengths, nor for a shape."""
    head = {"finish_reason": "stop", "versions": [[3, 2**31 - 1]] * 1000, "arrays": []}
    runs = replace_head(b"".join(pack(answer())), lambda old: old | {"versions": head["versions"]})
    replies = [
        http(b"", "application/octet-stream", Content_Length=10**15),
        http(b"", "application/octet-stream", Content_Length=Expected.of(BODY, MODEL).most_bytes + 1),
        http(runs, "application/octet-stream"),
        http(runs, "application/octet-stream", Content_Encoding="gzip"),
        http(b"", "application/octet-stream", Content_Length=None, Transfer_Encoding="chunked"),
        http(b"x" * JSON_BYTES, "text/html"),
    ]
    tracemalloc.start()
    for reply in replies:
        with pytest.raises(ServerLost):
            generated(reply)
    with pytest.raises(Damaged, match="4 tokens, 4 log-probs and 2147483647000 versions"):
        unpack(runs)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 << 20


def replace_head(content: bytes, change: Callable[[dict], dict]) -> bytes:
    """``content`` with another head, whose checksum is right."""
    size = int.from_bytes(content[8:12], "little")
    text = json.dumps(change(json.loads(content[16 : 16 + size]))).encode()
    text += b" " * (-len(text) % 8)
    return (
        content[:8]
        + len(text).to_bytes(4, "little")
        + zlib.crc32(text).to_bytes(4, "little")
        + text
        + content[16 + size :]
    )


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.data())
def test_any_change_of_one_field_of_a_head_is_an_error_or_the_same_answer(data):
    """Also with a checksum that fits, as a server with a fault would send it."""
    sound, expected = answer(), Expected.of(BODY, MODEL)

    def change(head: dict) -> dict:
        place, path = head, data.draw(st.sampled_from(sorted(paths(head), key=str)))
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = data.draw(ANY)
        return head

    changed = replace_head(b"".join(pack(sound)), change)
    try:
        answered = unpack(changed)
        expected.check(answered)
    except Damaged:
        return
    for name, value in vars(sound).items():
        if name not in ("versions", "finish_reason"):
            assert np.array_equal(getattr(answered, name), value)
    assert answered.finish_reason in ("stop", "length", "abort")
    assert len(answered.policy_versions) == len(sound.tokens)


def paths(tree: object, before: tuple = ()) -> list[tuple]:
    """Of every value inside ``tree``."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path for key, value in items for path in [(*before, key), *paths(value, (*before, key))]]


@given(st.dictionaries(st.sampled_from([*ServerSettings.__dataclass_fields__, "x"]), ANY))
def test_settings_are_of_their_types_or_an_error_that_names_the_value(content):
    settings, problem = None, ""
    try:
        settings = ServerSettings.of(content)
    except ValueError as error:
        problem = str(error)
    if settings is None:
        assert problem.split(":")[0] in content
        assert problem.isprintable()
        return
    assert type(settings.workers) is int
    assert 0 < settings.workers <= 4096
    assert settings.version is None or type(settings.version) is int
    assert type(settings.replacing) is bool
    assert isinstance(settings.load, Load)


@given(st.dictionaries(st.sampled_from(list(asdict(Load()))), ANY) | ANY)
def test_a_load_is_of_numbers_that_can_be_true(content):
    for load in (Load.of(json.dumps(content)), Load.of(content if isinstance(content, dict) else None)):
        assert all(type(value) in (int, float) and 0 <= value <= 2**53 for value in asdict(load).values())
        assert load.kv_usage <= 1


# ---------------------------------------------------------------- proof

INSTANCE = "0123456789abcdef"


@contextlib.asynccontextmanager
async def guarded(token: str = TOKEN, instance: str = INSTANCE):
    """The real guard behind a real HTTP server, without an engine."""

    async def healthy(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def take(update, version, keep):
        return {"tensors": 3, "bytes": 12}

    async def sample(body, is_open):
        return answer()

    settings = {"name": "s", "instance": instance, "agreed": {}, "precision": {}}
    state = GuardState(token=token, settings=settings, replace=take, sample=sample)
    config = uvicorn.Config(Guard(healthy, state), port=0, lifespan="off", log_config=None, ws="none")
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None
    task = asyncio.create_task(server._serve())
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


async def asked(address: Address, token: str = TOKEN) -> tuple:
    client = ServerClient(address, token, 60.0, model=MODEL, wants_proof=True)
    try:
        settings = ServerSettings.of(await client.settings())
        await client.check_health()
        amount = await client.push(Weights(3))
        return settings.name, amount, len((await client.generate(BODY, 3)).tokens)
    finally:
        await client.close()


@pytest.mark.parametrize("instance", [INSTANCE, ""], ids=["published", "listed"])
def test_a_server_that_knows_the_token_proves_it_with_every_answer(instance):
    async def scene():
        async with guarded() as url:
            return await asked(Address("s", url, instance))

    assert asyncio.run(scene()) == ("s", {"tensors": 3, "bytes": 12}, 4)


@pytest.mark.parametrize("stops", [[], [2, 3], [3]])
@pytest.mark.parametrize("last", [3, 98])
def test_a_response_that_stops_ends_with_a_stop_token(stops, last):
    response = replace(answer(), tokens=with_one(answer().tokens, last))
    body = {**BODY, "sampling_params": {"max_tokens": 6, "stop_token_ids": stops}}
    if last == 3 or not stops:
        assert generated(sent(response), body=body).tokens[-1] == last
    else:
        with pytest.raises(ServerLost, match="ends with token 98, which is none of"):
            generated(sent(response), body=body)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("instance", ["instance of another", ""], ids=["published", "listed"])
def test_what_passes_requests_on_to_a_server_is_shown_no_key(instance, host):
    """Byte by byte, so that every proof of the real server arrives: each is for the socket that was asked."""
    seen = []

    async def scene():
        async with guarded() as url:

            async def passes_on(reader, writer):
                there, back = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))

                async def copy(source, target, keep):
                    while data := await source.read(1 << 16):
                        keep(data)
                        target.write(data)

                both = [copy(reader, back, seen.append), copy(there, writer, lambda data: None)]
                await asyncio.gather(*both, return_exceptions=True)

            relay = await asyncio.start_server(passes_on, "127.0.0.1", 0)
            try:
                await asked(Address("s", f"http://{host}:{relay.sockets[0].getsockname()[1]}", instance))
            finally:
                relay.close()

    with pytest.raises(Stranger, match="does not prove"):
        asyncio.run(asyncio.wait_for(scene(), 60))
    assert seen
    assert b"authorization" not in b"".join(seen).lower()


@pytest.mark.parametrize("instance", [INSTANCE, ""], ids=["published", "listed"])
def test_a_server_of_another_token_or_start_is_a_stranger(instance):
    async def scene(token, started):
        async with guarded(token, started) as url:
            await asked(Address("s", url, instance))

    with pytest.raises(Stranger, match="does not prove that it knows this run's token"):
        asyncio.run(scene("another-token-of-tests", INSTANCE))
    if instance:
        with pytest.raises(Stranger, match="or was started anew"):
            asyncio.run(scene(TOKEN, "another start"))


@pytest.mark.parametrize("instance", [INSTANCE, ""], ids=["published", "listed"])
def test_a_stranger_cannot_say_what_a_server_said_before(instance):
    """Not even one that repeats every answer of a real one: each request has a nonce of its own."""
    heard: list[bytes] = []
    shown = {"instance": INSTANCE, "proof": proof(TOKEN, INSTANCE, "an earlier nonce")}

    async def scene():
        repeat = lambda head: http(json.dumps(shown).encode(), X_Server_Proof=shown["proof"])  # noqa: E731
        async with listening(repeat, heard) as url:
            await asked(Address("s", url, instance))

    with pytest.raises(Stranger, match="does not prove"):
        asyncio.run(scene())
    secret = TOKEN.encode()
    assert heard
    assert all(secret not in head for head in heard)


def test_what_a_stranger_has_heard_opens_no_server():
    """It is shown no key. That of one server, which a listener may have heard, opens no other."""
    heard: list[bytes] = []

    async def scene():
        async with listening(STRANGERS["null"], heard) as url:
            with pytest.raises(Stranger):
                await asked(Address("s", url, "gone"))
        async with guarded() as url, aiohttp.ClientSession() as session:
            for key, status in (
                (key_for(TOKEN, "gone"), 401),
                (proof(TOKEN, INSTANCE, "n"), 401),
                (key_for(TOKEN, INSTANCE), 200),
            ):
                async with session.get(url + SETTINGS, headers={"Authorization": f"Bearer {key}"}) as response:
                    assert response.status == status

    asyncio.run(scene())
    assert len(heard) == 1
    assert b"authorization" not in heard[0].lower()


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    "content",
    [
        b"null",
        b"[]",
        b"{",
        b'{"name": "\xe9"}',
        b"[" * 10**5,
        b" " * (1 << 17),
        {"name": 5},
        {"name": "other"},
        {"url": None},
        {"url": "ftp://a"},
        {"url": "http://a b"},
        {"url": "http://user:secret@a"},
        {"pid": True},
        {"instance": ["x"]},
        {"host": {}},
        {"more": 1},
    ],
    ids=str,
)
def test_a_file_that_is_not_an_address_is_passed_over(tmp_path, content):
    publish(tmp_path, Address("good", "http://10.0.0.1:80"))
    if isinstance(content, dict):
        content = json.dumps(asdict(Address("bad", "http://10.0.0.2:80")) | content).encode()
    (folder(tmp_path) / "bad.json").write_bytes(content)
    os.mkfifo(folder(tmp_path) / "pipe.json")
    (folder(tmp_path) / "folder.json").mkdir()
    assert [address.name for address in discover(ServersConfig(), tmp_path)] == ["good"]


@given(st.data())
def test_a_table_with_one_wrong_value_is_none_or_can_be_shown(tmp_path_factory, data):
    run_dir = tmp_path_factory.mktemp("run")
    members = type("Known", (Members,), {"due": 3})(LIMITS, lambda: False)
    content = table(members, {"a": "dtype"}, aside={"b": "a page"})
    place, path = content, data.draw(st.sampled_from(sorted(paths(content), key=str)))
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = data.draw(ANY)
    with contextlib.suppress(UnicodeEncodeError):
        write_table(run_dir, content)
    assert table_path(run_dir).exists()
    if (stored_table := read_table(run_dir)) is not None:
        assert isinstance(server_table(stored_table), str)


def test_a_load_header_of_a_stranger_is_no_load():
    content = b"".join(pack(answer()))
    for load in ('{"running": -5}', '{"running": true}', "[", '{"kv_usage": NaN}', "[" * 7000):
        reply = http(content, "application/octet-stream", **{LOAD_HEADER: load})

        async def loaded(client: ServerClient) -> Load:
            await client.generate(BODY, 3)
            return client.load

        assert asyncio.run(call(lambda head, reply=reply: reply, loaded, model=MODEL)) == Load()
