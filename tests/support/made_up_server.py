"""A rollout server without an engine: a real one's guard and wire format, and responses that follow from the request.

For tests and measurements of the trainer's end. A response is drawn from the request's seed and the policy version, so
every rank and every server gives the same one.
"""

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from megatron_rl.model.architecture import Architecture
from megatron_rl.rollout.requests import seal_routes
from megatron_rl.rollout.servers.guard import Guard, GuardState
from megatron_rl.rollout.servers.rendezvous import Address, publish
from megatron_rl.rollout.servers.wire import SERVER_IDLE_S
from megatron_rl.types import Rollout

SLOW = "slow"  # ids of prompts that take SLOW_S begin with this
SLOW_S = 1.0


def response(body: dict[str, Any], version: int, architecture: Architecture | None, length: int | None) -> Rollout:
    """``length``: of every response; None: as the seed says."""
    fields = body["sampling_params"]
    rng = np.random.default_rng([fields["seed"], version])
    number = length or int(rng.integers(1, fields["max_tokens"] + 1))
    tokens = rng.integers(0, 100, number).astype(np.int32)
    stops = number < fields["max_tokens"]
    if stops:
        tokens[-1] = fields["stop_token_ids"][0]
    routes = checksums = None
    if architecture is not None and body.get("wants_routes"):
        shape = (len(body["token_ids"]) + number - 1, architecture.num_layers, architecture.experts_per_token)
        drawn = rng.integers(0, architecture.num_experts, shape)
        routes, checksums = seal_routes(body["id"], body["id"], body["token_ids"], tokens, drawn, architecture)
    return Rollout(
        "",
        (),
        tokens=tokens,
        inference_logprobs=-rng.random(number, np.float32),
        policy_versions=np.full(number, version, np.int32),
        finish_reason="stop" if stops else "length",
        routed_experts=routes,
        route_checksums=checksums,
    )


def serve(
    run_dir: str,
    name: str,
    token: str,
    agreed: dict[str, Any],
    architecture: Architecture | None = None,
    length: int | None = None,
    answers: int | None = None,
) -> None:
    """Serve until killed. ``agreed``: what the trainer compares with its recipe. ``answers``: how many different ones
    are drawn; later requests get these again, whatever they ask."""
    import uvicorn

    drawn: list[Rollout] = []
    held = 0  # policy version

    async def sample(body: dict[str, Any], is_open: Any) -> Rollout:
        version = held
        if body["id"].startswith(SLOW):
            await asyncio.sleep(SLOW_S)
        if answers is not None and len(drawn) >= answers:
            drawn.append(drawn.pop(0))
            return drawn[-1]
        drawn.append(response(body, version, architecture, length))
        return drawn.pop() if answers is None else drawn[-1]

    async def replace(update: dict[str, Any], version: int, keep: bool) -> dict[str, int]:
        nonlocal held
        held = version
        tensors = [tensor for file in update["files"] for tensor in load_file(file).values()]
        return {"tensors": len(tensors), "bytes": sum(tensor.nbytes for tensor in tensors)}

    async def healthy(scope: dict, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    settings = {"name": name, "agreed": agreed, "precision": {"router": "made up"}}
    state = GuardState(token=token, settings=settings, replace=replace, sample=sample)
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    publish(Path(run_dir), Address(name, url, os.getpid(), socket.gethostname()))
    config = uvicorn.Config(
        Guard(healthy, state), log_level="warning", lifespan="off", access_log=False, timeout_keep_alive=SERVER_IDLE_S
    )
    uvicorn.Server(config).run([listener])
