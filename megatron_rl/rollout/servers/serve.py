"""`serve`: one rollout server of a run, on this machine, until it is told to end."""

from __future__ import annotations

import os
import re
import signal
import socket

from megatron_rl.check import check_recipe
from megatron_rl.config import Recipe
from megatron_rl.errors import InputError
from megatron_rl.process.devices import default_device
from megatron_rl.rollout.servers.rendezvous import require_token

LOOPBACK = "127.0.0.1"
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
    check_recipe(recipe)
    token = require_token(recipe.rollout.servers)
    if host in ("", "0.0.0.0", "::"):
        raise InputError(
            f"--host {host}: a server listens on one address that the trainer can reach, such as the node's own on the "
            "cluster's network; all interfaces at once are not offered"
        )
    from megatron_rl.rollout.servers.server import ServerSpec, end_with_parent, run_server

    if ends_with_parent:
        end_with_parent(signal.SIGTERM)
    spec = ServerSpec(
        config=recipe.rollout,
        precision=recipe.precision,
        model_path=recipe.model.path,
        max_prompt_length=recipe.data.prompt.max_length,
        record_routes=recipe.routing.needs_engine_routes,
        device=default_device() if recipe.runtime.device == "auto" else recipe.runtime.device,
        run_dir=recipe.run_dir,
        name=name or f"{socket.gethostname()}-{os.getpid()}",
        host=host,
        port=port,
        token=token,
    )
    run_server(spec, say=lambda text: print(text, flush=True))
