"""Processor time per token of a rank that fetches responses from servers.

    python -m tools.bench.answers [--responses 64] [--length 8192] [--servers 2] [--rounds 5] [--json] [--compress]

Servers are processes without an engine (`lib.made_up_server`) that answer in a real server's bytes, over HTTP, with
routes of 48 layers and 8 of 128 experts. The rank asks for all responses at once, as `ServerGenerator` does, and makes
rollouts of the answers; decoding to text is not part of it. Processor time is that of the whole process: reception by
the kernel, checksums, every thread. ``--compress``: three compressors on real routes of the tiny model, and on random
routes for comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
import time
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_rl.config import load_recipe
from megatron_rl.instruments.plan.hardware import TURNS
from megatron_rl.model.architecture import Architecture, read_architecture
from megatron_rl.rollout.conversation import Client, Conversation, Turn
from megatron_rl.rollout.generator import Sampling
from megatron_rl.rollout.requests import make_requests, seal_routes
from megatron_rl.rollout.servers.client import ServerClient, Weights, request_body
from megatron_rl.rollout.servers.dispatch import Dispatch
from megatron_rl.rollout.servers.pool import PoolLimits, ServerPool
from megatron_rl.rollout.servers.rendezvous import Address, folder, read
from megatron_rl.routing import route_checksums
from megatron_rl.types import Prompt, Rollout
from tools.bench.lib import made_up_server
from tools.bench.unit_costs import fit

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "token-of-a-measurement"
PROMPT, GROUP = 256, 16  # tokens of a prompt, responses to each
DIFFERENT = 4  # different answers of a server, which it repeats
START_S = 600.0


def architecture() -> Architecture:
    """Routes of Qwen3-30B-A3B."""
    tiny = read_architecture(ROOT / "recipes" / "tiny" / "model")
    return replace(tiny, num_layers=48, moe_layers=(True,) * 48, num_experts=128, experts_per_token=8)


def start_servers(
    run_dir: Path, number: int, length: int, shape: Architecture | None = None
) -> tuple[list, list[Address]]:
    """Start servers and return their processes and addresses. ``shape``: of the answers' routes; None: no routes."""
    context = multiprocessing.get_context("spawn")
    arguments = {"agreed": {}, "architecture": shape, "length": length, "answers": DIFFERENT}
    processes = [
        context.Process(target=made_up_server.serve, args=(str(run_dir), f"s{i}", TOKEN), kwargs=arguments, daemon=True)
        for i in range(number)
    ]
    for process in processes:
        process.start()
    paths, deadline = [folder(run_dir) / f"s{i}.json" for i in range(number)], time.monotonic() + START_S
    while not all(path.is_file() for path in paths):
        assert time.monotonic() < deadline, "the servers do not come up"
        time.sleep(0.1)
    return processes, [read(path) for path in paths]


async def fetch(pool: ServerPool, requests: list, sampling: Sampling, shape: Architecture | None) -> list[Rollout]:
    bodies = [request_body(request, sampling, []) for request in requests]
    dispatch = Dispatch(pool, bodies, [request.sequence_id for request in requests], concurrency=16, retries=0)
    rollouts = []
    async for index, answer in dispatch.completions():
        rollouts.append(requests[index].rollout_of(answer))
    return rollouts


async def measure(
    addresses: list[Address], responses: int, length: int, rounds: int, shape: Architecture | None
) -> dict[str, list[float]]:
    """Return microseconds per token of a response, by round, without the first round, in which servers draw answers."""
    pool = ServerPool(
        PoolLimits(20.0, 5.0),
        discover=lambda: addresses,
        connect=lambda address: ServerClient(address, TOKEN, 600.0),
        problems=lambda settings: [],
        say=lambda line: None,
    )
    prompts = [Prompt(f"p{i}", [1] * PROMPT, "") for i in range(-(-responses // GROUP))]
    requests = make_requests(prompts, GROUP, seed=0, step=0)[:responses]
    sampling, costs = Sampling(length), {"processor": [], "wall": []}
    await pool.start(len(addresses))
    await pool.push(Weights(0))
    try:
        for _ in range(rounds + 1):
            before, start = time.process_time(), time.perf_counter()
            rollouts = await fetch(pool, requests, sampling, shape)
            spent, passed = time.process_time() - before, time.perf_counter() - start
            tokens = sum(rollout.length for rollout in rollouts)
            assert tokens == responses * length
            costs["processor"].append(1e6 * spent / tokens)
            costs["wall"].append(1e6 * passed / tokens)
            del rollouts
    finally:
        await pool.close()
    return {name: values[1:] for name, values in costs.items()}


def measured(
    servers: int, responses: int, length: int, rounds: int, shape: Architecture | None
) -> dict[str, list[float]]:
    """Start servers and return `measure` on them."""
    with tempfile.TemporaryDirectory() as directory:
        processes, addresses = start_servers(Path(directory), servers, length, shape)
        try:
            return asyncio.run(measure(addresses, responses, length, rounds, shape))
        finally:
            for process in processes:
                process.kill()
                process.join()


def unit_costs(quick: bool = False) -> list[float]:
    """Return processor seconds of the fetching rank per response, per token and per byte of routes."""
    shape, length = architecture(), 1024 if quick else 4096
    settings = ((32, length, shape), (32, length, None), (32, 4 * length, None), (512, 16, None))
    rows, seconds = [], []
    for number, tokens, routes in settings:
        costs = measured(2, number, tokens, 3 if quick else 5, routes)
        num_routes = (PROMPT + tokens - 1) * shape.num_layers * shape.experts_per_token * (routes is not None)
        rows.append((number, number * tokens, number * num_routes))
        seconds.append(1e-6 * statistics.median(costs["processor"]) * number * tokens)
    return [float(f"{unit:.3g}") for unit in fit(np.array(rows, float), np.array(seconds))]


class _Asker:
    """What a `Conversation` needs to know of its client."""

    sequence_id, vocab_size = "x", 1000
    token_ids = Client.token_ids


def stitching(length: int, turns: int, shape: Architecture | None) -> float:
    """Return processor seconds of making one response of ``turns`` turns that a server has sealed.

    ``length``: tokens of the response; one half of each turn is sampled, the other is a tool's result. ``shape``: of
    the routes; None: no routes.
    """
    half, rng = length // turns // 2, np.random.default_rng(0)
    whole = rng.integers(1, _Asker.vocab_size, PROMPT + 2 * half * turns).tolist()
    answers, first = [], 0
    for begin in range(PROMPT, len(whole), 2 * half):
        end, routes, seals = begin + half, None, None
        if shape is not None:
            rows = (end - 1 - first, shape.num_layers, shape.experts_per_token)
            routes = rng.integers(0, shape.num_experts, rows).astype(np.uint8)
            seals = route_checksums(_Asker.sequence_id, np.array(whole[:end]), routes, first)
        sampled = whole[begin:end], [-1.0] * half, "stop", routes, first, seals, np.zeros(half, np.int32)
        answers.append((Turn(whole[:begin], *sampled), whole[end : begin + 2 * half]))
        first = end - 1
    start = time.process_time()
    conversation = Conversation(_Asker(), whole[:PROMPT], len(whole))
    for turn, result in answers:
        conversation.add(turn)
        conversation.tell(result)
    made, routes = (conversation.response, conversation.sampled, conversation.logprobs), conversation.routes
    seconds = time.process_time() - start
    assert len(made[0]) == len(whole) - PROMPT - half
    assert shape is None or len(routes[0]) == first
    return seconds


def stitching_costs(quick: bool = False) -> list[float]:
    """Return processor seconds of stitching `TURNS` turns per response, per token and per byte of routes."""
    shape, longest, rows, seconds = architecture(), 4096 if quick else 16384, [], []
    for length, routes in ((64, None), (longest, None), (64, shape), (longest // 4, shape), (longest, shape)):
        bytes_of_routes = (PROMPT + length) * shape.num_layers * shape.experts_per_token * (routes is not None)
        rows.append((1, length, bytes_of_routes))
        seconds.append(statistics.median(stitching(length, TURNS, routes) for _ in range(5 if quick else 25)))
    return [float(f"{unit:.3g}") for unit in fit(np.array(rows, float), np.array(seconds))]


def sealing(length: int) -> float:
    """Return a server's microseconds per token for seals."""
    shape, rng = architecture(), np.random.default_rng(0)
    prompt, tokens = [1] * PROMPT, rng.integers(0, 100, length).astype(np.int32)
    routes = rng.integers(0, 128, (PROMPT + length - 1, 48, 8)).astype(np.int16)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        seal_routes("x", "x", prompt, tokens, routes, shape)
        seconds.append(time.process_time() - start)
    return 1e6 * statistics.median(seconds) / length


def real_routes() -> np.ndarray:
    """Return routes [tokens, 4, 2] uint8 that vLLM records while the tiny model answers the toy task."""
    from megatron_rl.data import load_prompts, load_tokenizer
    from megatron_rl.rollout.vllm_engine import VllmGenerator

    recipe = load_recipe(ROOT / "recipes" / "tiny" / "servers.yaml", ["rollout.engine=vllm", "rollout.max_staleness=0"])
    tokenizer = load_tokenizer(str(recipe.model.path))
    prompts = list(load_prompts(recipe.data.train, tokenizer, recipe.data.prompt))[:64]
    engine = VllmGenerator(
        recipe.rollout, recipe.model.path, max_prompt_length=recipe.data.prompt.max_length, record_routes=True
    )
    groups = engine.rollout(prompts, 8, policy_version=0, step=0)
    engine.close()
    return np.concatenate([rollout.routed_experts for group in groups for rollout in group.rollouts])


def compression(routes: np.ndarray) -> dict[str, tuple[float, float, float]]:
    """Return, per codec: ratio, and MB of routes compressed and restored per second of processor time."""
    import pyarrow

    raw = np.tile(routes.reshape(-1), -(-(8 << 20) // routes.size)) if routes.size < 1 << 20 else routes.reshape(-1)
    blob = raw[: 8 << 20].tobytes() if routes.size >= 1 << 20 else routes.tobytes()
    codecs = {
        "zlib -1": (lambda b: zlib.compress(b, 1), lambda b, n: zlib.decompress(b)),
        "zstd -1": (_with(pyarrow.Codec("zstd", 1)), lambda b, n: pyarrow.decompress(b, n, "zstd")),
        "lz4": (_with(pyarrow.Codec("lz4")), lambda b, n: pyarrow.decompress(b, n, "lz4")),
    }
    results = {}
    for name, (pack, unpack) in codecs.items():
        packed = pack(blob)
        assert bytes(unpack(packed, len(blob))) == blob
        rates = [_rate(lambda: pack(blob), len(blob)), _rate(lambda: unpack(packed, len(blob)), len(blob))]  # noqa: B023
        results[name] = (len(blob) / len(packed), *rates)
    return results


def _with(codec):
    return lambda blob: codec.compress(blob, asbytes=True)


def _rate(work, size: int) -> float:
    """Return MB per second of processor time, measured over half a second."""
    start, times = time.process_time(), 0
    while time.process_time() - start < 0.5:
        work()
        times += 1
    return 1e-6 * size * times / (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=64)
    parser.add_argument("--length", type=int, default=8192, help="tokens of every response")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--compress", action="store_true", help="measure compressors too; starts an engine")
    options = parser.parse_args()
    costs = measured(options.servers, options.responses, options.length, options.rounds, architecture())
    middle = {name: statistics.median(values) for name, values in costs.items()} | {"seal": sealing(options.length)}
    if options.json:
        print(json.dumps(middle))
        return
    print(f"{options.responses} responses of {options.length} tokens, load {os.getloadavg()[0]:.1f}; µs a token")
    print(f"fetching rank, processor {middle['processor']:.3f} ({min(costs['processor']):.3f} the least)")
    print(f"fetching rank, wall      {middle['wall']:.3f}")
    print(f"server, seals            {middle['seal']:.3f}")
    if options.compress:
        rng = np.random.default_rng(0)
        drawn = np.argsort(rng.random((20_000, 128)), axis=1)[:, :8].astype(np.uint8)
        for name, routes in (("tiny model", real_routes()), ("at random, 8 of 128", drawn)):
            for codec, (ratio, packing, unpacking) in compression(routes).items():
                print(f"{name:<20} {codec:<8} ratio {ratio:4.2f}, {packing:6.0f} and {unpacking:6.0f} MB/s")


if __name__ == "__main__":
    main()
