"""One rollout server: vLLM's own HTTP server, set up from the recipe, behind `guard`.

What vLLM's command line would do is done here step by step, because three things have to happen in between: the token
must not pass through arguments; on a CPU the engine's process is forked instead of started anew, which saves an import
of seconds and is what vLLM does on a GPU; and the engine must prove that it survives a weight update before anyone is
told that it is there.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.architecture import read_architecture
from megatron_rl.config.precision import PrecisionConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.errors import InputError
from megatron_rl.rollout import process_state
from megatron_rl.rollout.checksums import check_own_refit
from megatron_rl.rollout.engine_arguments import runs_eagerly
from megatron_rl.rollout.servers import guard
from megatron_rl.rollout.servers.answering import sample
from megatron_rl.rollout.servers.load import Meter
from megatron_rl.rollout.servers.rendezvous import Address, publish, withdraw
from megatron_rl.rollout.servers.replacement import load, replace_weights
from megatron_rl.rollout.servers.settings import agreed_settings, server_arguments
from megatron_rl.rollout.servers.under_way import UnderWay
from megatron_rl.rollout.servers.wire import SERVER_IDLE_S

PR_SET_PDEATHSIG = 1
# Set before vLLM is imported, whatever the user has set. One process: else vLLM puts a third one under the engine's.
REQUIRED = process_state.REQUIRED | {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes that change weights
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(SERVER_IDLE_S),
}


@dataclass(frozen=True)
class ServerSpec:
    """Everything that one server is started from."""

    config: RolloutConfig
    precision: PrecisionConfig
    model_path: Path
    max_prompt_length: int
    record_routes: bool
    device: str  # cpu | cuda
    run_dir: Path
    name: str  # of its file in the run directory
    host: str  # interface to listen on
    port: int  # 0: any free one
    token: str


def run_server(spec: ServerSpec, say: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. ``say``: told once, when the server can be used.

    Raises `InputError` where the address cannot be listened on, `RolloutError` where weight updates corrupt the engine.
    """
    listener = _listen(spec.host, spec.port)
    os.register_at_fork(after_in_child=end_with_parent)  # the engine's process goes with this one
    for name, value in process_state.DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ.update(REQUIRED)
    os.environ.pop("VLLM_API_KEY", None)  # the guard asks for the token, on every route
    if spec.device == "cpu":
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else two servers take the same core
    import uvloop

    uvloop.run(_serve(spec, listener, say))


async def _serve(spec: ServerSpec, listener: socket.socket, say: Callable[[str], None]) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.entry import build_and_serve
    from vllm.v1.engine.async_llm import AsyncLLM

    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    address = Address(spec.name, url, uuid.uuid4().hex, os.getpid(), socket.gethostname())
    arguments = _arguments(spec, host, port)
    engine_config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
    if spec.device == "cpu":
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # vLLM's CPU platform asks for spawn
        from megatron_rl.rollout import cpu_bookkeeping

        cpu_bookkeeping.install()  # outputs are processed here, not where the worker extension is
    engine = AsyncLLM.from_vllm_config(engine_config, disable_log_stats=True)
    published = None
    try:
        if runs_eagerly(spec.config, spec.device):
            await engine.collective_rpc("run_eagerly")
        await _prepare_weights(engine, spec)
        guard.STATE.settings = await _settings(engine, spec, address)
        architecture = read_architecture(spec.model_path) if spec.record_routes else None
        under_way = UnderWay(engine)
        guard.STATE.replace = partial(replace_weights, engine, under_way)
        guard.STATE.meter = Meter(engine, under_way)
        guard.STATE.sample = partial(sample, engine, under_way, architecture)
        guard.STATE.max_body_bytes += guard.BODY_BYTES_PER_TOKEN * engine.model_config.max_model_len
        guard.STATE.token = spec.token
        published = publish(spec.run_dir, address)
        say(f"server {spec.name} at {url}, process {os.getpid()}")
        shutdown = await build_and_serve(engine, url, listener, arguments)
    finally:
        if published is not None:
            withdraw(published, address)
        engine.shutdown()
    await shutdown


def _arguments(spec: ServerSpec, host: str, port: int) -> Any:
    """vLLM's parsed command line, as if this server's settings had been typed."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    wanted = server_arguments(
        spec.config,
        spec.model_path,
        spec.device,
        spec.max_prompt_length,
        record_routes=spec.record_routes,
        precision=spec.precision,
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


async def _prepare_weights(engine: Any, spec: ServerSpec) -> None:
    """Make weight updates possible, and prove that one with the same weights changes nothing."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    await engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
    if not spec.config.verify_refit:
        return
    before = (await engine.collective_rpc("checksums"))[0]
    await load(engine, {"files": []})
    after = (await engine.collective_rpc("checksums"))[0]
    check_own_refit(before, after)


async def _settings(engine: Any, spec: ServerSpec, address: Address) -> dict[str, Any]:
    """What the trainer compares with its recipe, and the rollout column of its precision contract."""
    from megatron_rl.rollout.fp32_modules import describe_configuration

    described = describe_configuration(engine.model_config) | (await engine.collective_rpc("describe"))[0]
    agreed = agreed_settings(
        spec.config,
        spec.model_path,
        spec.max_prompt_length,
        record_routes=spec.record_routes,
        precision=spec.precision,
    )
    return {
        "name": address.name,
        "instance": address.instance,
        "agreed": agreed,
        "precision": described,
        "backend": "gloo" if spec.device == "cpu" else "nccl",  # of a broadcast of weights
        "workers": engine.vllm_config.parallel_config.world_size,  # that take weights, each with a rank in a broadcast
    }


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
    except OSError as error:
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
