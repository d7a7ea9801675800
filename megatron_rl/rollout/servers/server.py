"""One rollout server: vLLM's own HTTP server, set up from the recipe, behind `guard`.

The steps of vLLM's command line are done here one by one, because three things have to happen in between: the token
must not pass through arguments; on a CPU the engine's process is forked instead of started anew, which saves an import
of seconds and is what vLLM does on a GPU; and the engine must prove that it survives a weight update before it is
announced.

A response is a few arrays from the engine to the trainer (`wire`). vLLM's own route for token ids
(`/inference/v1/generate`) makes several objects for every token: 1.6 ms of processor time for a response of 24 tokens,
in the process that also passes on every token of the engine.

Nothing can be sampled while weights are replaced. vLLM offers that as seven HTTP calls, of which the one that pauses
sleeps for 0.02 s. Here it is one call, and the engine is paused only where a response is under way. The update's
`InFlightMode` says what becomes of such a response.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from megatron_rl.config import Recipe
from megatron_rl.config.learner import rollout_fp32_products
from megatron_rl.config.model_rules import model_problems, refuse_recipe
from megatron_rl.errors import InputError
from megatron_rl.model.architecture import Architecture, read_architecture
from megatron_rl.process import fp32_products
from megatron_rl.process.devices import default_device
from megatron_rl.rollout import process_state
from megatron_rl.rollout.engine_arguments import runs_eagerly
from megatron_rl.rollout.generator import (
    RolloutError,
    prompt_scores,
    sampled_tokens,
    sampled_with_head,
    sampling_params,
    scoring_params,
)
from megatron_rl.rollout.requests import seal_routes
from megatron_rl.rollout.servers import guard
from megatron_rl.rollout.servers.guard import UnderWay
from megatron_rl.rollout.servers.rendezvous import (
    Address,
    agreed_settings,
    publish,
    require_token,
    server_arguments,
    withdraw,
)
from megatron_rl.rollout.servers.weight_broadcast import GroupError
from megatron_rl.rollout.servers.wire import SERVER_IDLE_S, Meter
from megatron_rl.rollout.weights import check_own_refit
from megatron_rl.types import Rollout


async def sample(
    engine: Any,
    under_way: UnderWay,
    architecture: Architecture | None,
    body: dict[str, Any],
    is_open: Callable[[], bool] = lambda: True,
) -> Rollout:
    """One response of ``engine`` (vLLM's AsyncLLM). ``is_open``: whether it holds the weights that were asked for.

    Body: ``token_ids`` of the prompt; ``sampling_params`` (see `sampling_fields`); where routes are wanted,
    ``wants_routes`` and the ``id`` of the sequence that they are sealed for, and ``first_route``, the position from
    which on (default 0); ``head``, how many of the most probable tokens come with each (default 0). ``architecture``:
    of an engine that records routes. Raises `ValueError`, `TypeError` or `KeyError` for what cannot be sampled,
    `Overtaken`, and what vLLM raises where the engine fails.
    """
    prompt, first_route = body["token_ids"], body.get("first_route", 0)
    head = int(body.get("head", 0))
    params = sampling_params(body["sampling_params"], head)
    sequence_id = str(body["id"]) if architecture is not None and body.get("wants_routes") else None
    if sequence_id is not None:
        params.routed_experts_prompt_start = first_route
    completion, versions = await under_way.sample(prompt, params, is_open)
    if completion.finish_reason == "error":
        raise RolloutError("the engine gave this response up")
    heads = {}
    if head:
        sampled, logprobs, heads["head_tokens"], heads["head_logprobs"] = sampled_with_head(completion, head)
    else:
        sampled, logprobs = sampled_tokens(completion)
    tokens, routes, checksums = np.asarray(sampled, np.int32), None, None
    if sequence_id is not None and len(tokens):
        # In a thread: at 8k tokens it takes 10 ms, in which the loop passes other responses' tokens on.
        routes, checksums = await asyncio.to_thread(
            seal_routes, sequence_id, sequence_id, prompt, tokens, completion.routed_experts, architecture, first_route
        )
    logprobs = np.asarray(logprobs, np.float32)
    return Rollout("", (), tokens, logprobs, versions, completion.finish_reason, routes, checksums, **heads)


async def score(engine: Any, numbers: Iterator[int], body: dict[str, Any]) -> Rollout:
    """The log-probs of the tokens that ``engine`` reads, as those of a response. Whatever weights it holds answer.

    Body: ``token_ids``; ``first``, from which on they are wanted, at least 1; ``top_k``, how many of the most probable
    tokens come with each, as its head (default 0). Raises what `sample` raises.
    """
    tokens, first, top_k = body["token_ids"], max(1, int(body["first"])), int(body.get("top_k", 0))
    params, name = scoring_params(top_k), f"score-{next(numbers)}"
    async for output in engine.generate({"prompt_token_ids": tokens}, params, name):
        scored = output
    logprobs, head, of_head = prompt_scores(scored, first, top_k)
    ids = np.asarray(tokens[first:], np.int32)
    versions = np.zeros(len(ids), np.int32)
    return Rollout("", (), ids, logprobs, versions, "stop", head_tokens=head, head_logprobs=of_head)


async def load(engine: Any, update: dict[str, Any]) -> dict[str, int]:
    """Load all weights of ``update`` (`ServerUpdate`) into all workers of ``engine`` (vLLM's AsyncLLM).

    Returns ``tensors`` and ``bytes``, the same of every worker. Raises `GroupError` where a broadcast broke off, what
    vLLM raises where its engine is gone, else `RuntimeError`.
    """
    amounts = await engine.collective_rpc("replace_weights", args=(update,))
    for amount in amounts:
        if "error" in amount:
            raise (GroupError if amount["interrupted"] else RuntimeError)(amount["error"])
    if any(amount != amounts[0] for amount in amounts):
        raise RuntimeError(f"the workers of this server did not get the same: {amounts}")
    return amounts[0]


async def replace_weights(
    engine: Any, under_way: UnderWay, update: dict[str, Any], version: int, keep: bool = False
) -> dict[str, int]:
    """`load` ``update``, as ``version``; returns what it does.

    ``keep``: responses under way go on, with the keys and values that they have; else they end with what they have. No
    prompt that comes later finds keys and values of older weights (`UnderWay`). Raises what `load` raises, after all
    responses were ended, because nobody knows which weights are there.
    """
    try:
        await under_way.hold(keep)
        amount = await load(engine, update)
        return amount
    except BaseException:
        await under_way.drop()
        raise
    finally:
        await under_way.release(version)


PR_SET_PDEATHSIG = 1
# Set before vLLM is imported, whatever the user has set. One process: else vLLM puts a third one under the engine's.
REQUIRED = process_state.REQUIRED | {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(SERVER_IDLE_S)}


def _run(recipe: Recipe, device: str, name: str, token: str, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT. Raises `RolloutError` where weight updates corrupt the engine."""
    os.register_at_fork(after_in_child=end_with_parent)  # the engine's process goes with this one
    for variable, value in process_state.DEFAULTS.items():
        os.environ.setdefault(variable, value)
    os.environ.update(REQUIRED)
    os.environ.pop("VLLM_API_KEY", None)  # the guard asks for the token, on every route
    if device == "cpu":
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else two servers take the same core
    process_state.settle_sums(recipe.rollout, device)
    import uvloop

    uvloop.run(_serve(recipe, device, name, token, listener))


async def _serve(recipe: Recipe, device: str, name: str, token: str, listener: socket.socket) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.entry import build_and_serve
    from vllm.v1.engine.async_llm import AsyncLLM

    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    address = Address(name, url, os.getpid(), socket.gethostname())
    arguments = _arguments(recipe, device, host, port)
    engine_config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
    if device == "cpu":
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # vLLM's CPU platform asks for spawn
    engine = AsyncLLM.from_vllm_config(engine_config, disable_log_stats=True)
    published = None
    try:
        if runs_eagerly(recipe.rollout, device):
            await engine.collective_rpc("run_eagerly")
        await _prepare_weights(engine, recipe.rollout.verify_refit)
        guard.STATE.settings = await _settings(engine, recipe, device, name)
        architecture = read_architecture(recipe.model.path) if recipe.routing.needs_engine_routes else None
        under_way = UnderWay(engine)
        guard.STATE.replace = partial(replace_weights, engine, under_way)
        guard.STATE.meter, guard.STATE.check = Meter(engine), engine.check_health
        guard.STATE.sample = partial(sample, engine, under_way, architecture)
        guard.STATE.score = partial(score, engine, itertools.count())
        guard.STATE.token = token
        published = publish(recipe.run_dir, address)
        print(f"server {name} at {url}, process {os.getpid()}", flush=True)
        shutdown = await build_and_serve(engine, url, listener, arguments)
    finally:
        if published is not None:
            withdraw(published, address)
        engine.shutdown()
    await shutdown


def _arguments(recipe: Recipe, device: str, host: str, port: int) -> Any:
    """vLLM's parsed command line, as if this server's settings had been typed."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    wanted = server_arguments(
        recipe.rollout,
        recipe.model.path,
        device,
        recipe.data.prompt.max_length,
        record_routes=recipe.routing.needs_engine_routes,
        precision=recipe.precision,
    )
    wanted |= {
        "host": host,
        "port": port,
        "middleware": [f"{guard.Guard.__module__}.{guard.Guard.__name__}"],
        "disable_fastapi_docs": True,
        "disable_uvicorn_access_log": True,
        "uvicorn_log_level": "warning",
    }
    if unknown := sorted(wanted.keys() - vars(arguments).keys()):
        raise RuntimeError(
            f"vLLM's server knows no argument {', '.join(unknown)}: it would run without, and say nothing"
        )
    vars(arguments).update(wanted)
    return arguments


async def _prepare_weights(engine: Any, verifies: bool) -> None:
    """Make weight updates possible; with ``verifies``, prove that one with the same weights changes nothing."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    await engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
    if not verifies:
        return
    before = (await engine.collective_rpc("checksums"))[0]
    await load(engine, {"files": []})
    after = (await engine.collective_rpc("checksums"))[0]
    check_own_refit(before, after)


async def _settings(engine: Any, recipe: Recipe, device: str, name: str) -> dict[str, Any]:
    """What the trainer compares with its recipe, and the rollout column of its precision contract."""
    from megatron_rl.rollout.precision import described

    precision = described(engine.model_config, (await engine.collective_rpc("describe"))[0])
    agreed = agreed_settings(
        recipe.rollout,
        recipe.model.path,
        recipe.data.prompt.max_length,
        record_routes=recipe.routing.needs_engine_routes,
        precision=recipe.precision,
    )
    return {
        "name": name,
        "agreed": agreed,
        "precision": precision,
        "backend": "gloo" if device == "cpu" else "nccl",  # of a broadcast of weights
        "workers": engine.vllm_config.parallel_config.world_size,  # that take weights, each with a rank in a broadcast
    }


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
    except (OSError, UnicodeError) as error:  # the second for what cannot be a host's name
        raise InputError(
            f"serve: cannot listen on {host} port {port} ({error}); --host takes an address of this machine, "
            "--port 0 any free port"
        ) from error
    return listener


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Have signal ``number`` sent to this process when its parent dies, however that comes about. Linux only."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    except (OSError, AttributeError):
        return


LOOPBACK = "127.0.0.1"
MAX_PORT = 65535
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")  # a file's name, of no other folder and not hidden


def serve(
    recipe: Recipe, host: str = LOOPBACK, port: int = 0, name: str | None = None, ends_with_parent: bool = False
) -> None:
    """Start a server with the recipe's rollout section and announce it in the run directory; return when it has ended.

    ``host``: address to listen on, which is also where the trainer will look for it. ``name``: of its file in the run
    directory; default: host name and process id. ``ends_with_parent``: as soon as the process that started this one is
    gone, however it went. Raises `InputError` before an engine starts.
    """
    if recipe.rollout.engine != "vllm_server":
        raise InputError(
            f"rollout.engine: {recipe.rollout.engine}; `serve` starts servers for rollout.engine: vllm_server"
        )
    if name is not None and not _NAME.fullmatch(name):
        raise InputError(f"--name {name}: use letters, digits, '.', '_' and '-'; it names a file in the run directory")
    if not 0 <= port <= MAX_PORT:
        raise InputError(f"--port {port}: a port is a number from 1 to {MAX_PORT}; 0 takes any free one")
    refuse_recipe(recipe, model_problems(recipe, read_architecture(recipe.model.path), None))
    token = require_token()
    if host in ("", "0.0.0.0", "::"):
        raise InputError(
            f"--host {host}: a server listens on one address that the trainer can reach, such as the node's own on the "
            "cluster's network; all interfaces at once are not offered"
        )

    if ends_with_parent:
        end_with_parent(signal.SIGTERM)
    device = default_device() if recipe.runtime.device == "auto" else recipe.runtime.device
    fp32_products.settle(rollout_fp32_products(recipe.rollout.dtype, recipe.precision), device)
    name = name or f"{socket.gethostname()}-{os.getpid()}"
    _run(recipe, device, name, token, _listen(host, port))
