"""How servers and the trainer find each other: one file per server in the run directory, and a token that is not in it.

The file is written when the server can answer and names its address, so that neither side needs a list of nodes or
fixed ports. The token comes from the environment. Every request bears it, and a server compares it in constant time.

`ServerSettings` is what a server and its trainer have to agree on before the first response.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_rl.checkpoint.hf_folder import HFFolder
from megatron_rl.config.learner import PrecisionConfig
from megatron_rl.config.rollout import MOST_KEPT, TOKEN_VARIABLE, RolloutConfig, ServersConfig
from megatron_rl.errors import InputError
from megatron_rl.process.host import write_whole
from megatron_rl.rollout.servers.wire import Load

MIN_TOKEN_LENGTH = 16  # characters; what a person makes up in passing is shorter


@dataclass(frozen=True)
class Address:
    """Where a server is. ``pid``, ``host``: of its process; for a server that the recipe lists they are not known."""

    name: str
    url: str
    pid: int = 0
    host: str = ""


def printable(text: str, limit: int) -> str:
    """At most ``limit`` characters of ``text`` on one line, with escapes for those that are not printable."""
    short = " ".join(text[: 2 * limit].split())[:limit]
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in short)


def read_token() -> str | None:
    """The shared secret; None where the environment has none. Raises `InputError` where it is too short to be one."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if 0 < len(token) < MIN_TOKEN_LENGTH:
        raise InputError(f"{TOKEN_VARIABLE}: holds {len(token)} characters; at least {MIN_TOKEN_LENGTH} are wanted")
    return token or None


def require_token() -> str:
    """Return the token. Raises `InputError` without one."""
    token = read_token()
    if token is None:
        raise InputError(
            f"no token: set the environment variable {TOKEN_VARIABLE}, the same for trainer and servers, for example "
            "from `openssl rand -hex 32`"
        )
    return token


def folder(run_dir: Path) -> Path:
    """Where the servers of a run write their addresses."""
    return run_dir / "servers"


def publish(run_dir: Path, address: Address) -> Path:
    """Write the server's file, all of it at once."""
    path = folder(run_dir) / f"{address.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(asdict(address), indent=2) + "\n")
    return path


def withdraw(path: Path, address: Address) -> None:
    """Take the file away, unless another server has taken the name since."""
    if path.is_file() and read(path) == address:
        path.unlink(missing_ok=True)


def read(path: Path) -> Address | None:
    """The address in a file; None where the file went or is not an address of the server that the file is named for."""
    try:
        address = Address(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return address if address.name == path.stem else None


def discover(config: ServersConfig, run_dir: Path) -> list[Address]:
    """Addresses that the recipe lists, else those that servers have published."""
    if config.addresses:
        return [Address(name=url.split("://", 1)[1], url=url.rstrip("/")) for url in config.addresses]
    addresses = (read(path) for path in sorted(folder(run_dir).glob("*.json")))
    return [address for address in addresses if address is not None]


CONFIG_FILE, ORIGIN_KEYS = "config.json", ("_name_or_path", "transformers_version")
NUM_BLOCKS, BLOCK_BYTES = 8, 1 << 16


def server_arguments(
    config: RolloutConfig,
    model_path: Path,
    device: Literal["cpu", "cuda"],
    max_prompt_length: int,
    *,
    record_routes: bool,
    precision: PrecisionConfig,
) -> dict[str, Any]:
    """Arguments of vLLM's server, by the names of its engine: those of the in-process engine, but for what a process
    of its own does otherwise. Imports vLLM."""
    from megatron_rl.rollout.engine_arguments import engine_arguments
    from megatron_rl.rollout.precision import overrides
    from megatron_rl.rollout.worker_extension import SERVER_BACKEND, ServerExtension

    arguments = engine_arguments(config, model_path, device, max_prompt_length, record_routes=record_routes)
    arguments |= {
        "hf_overrides": arguments["hf_overrides"] | overrides(precision),
        "weight_transfer_config": {"backend": SERVER_BACKEND},
        "worker_extension_cls": f"{ServerExtension.__module__}.{ServerExtension.__name__}",
        "distributed_executor_backend": "uni" if config.tensor_parallel == 1 else "mp",
        "enable_scale_out": True,  # token ids in, token ids out
        "max_logprobs": MOST_KEPT,
    }
    arguments.pop("enable_sleep_mode", None)  # a server has its GPUs to itself
    return {name: value for name, value in arguments.items() if value is not None}


def agreed_settings(
    config: RolloutConfig,
    model_path: Path,
    max_prompt_length: int,
    *,
    record_routes: bool,
    precision: PrecisionConfig,
) -> dict[str, Any]:
    """The part of a recipe that decides what a server's responses mean; JSON values. No engine, no vLLM."""
    return {
        "config": digest_of_config(model_path / CONFIG_FILE),
        "weights": _digest_of_files(HFFolder(model_path).files),
        "dtype": config.dtype,
        "quantization": config.quantization.model_dump(mode="json"),
        "max_model_len": max_prompt_length + config.max_response_length,
        "record_routes": record_routes,
        "sampled_head": config.sampled_head,
        "fp32_head": precision.rollout_head,
        "fp32_router": precision.rollout_router,
    }


def digest_of_config(path: Path) -> str:
    """Return a digest of config.json, without the keys that say where it came from."""
    content = json.loads(path.read_text())
    kept = {name: value for name, value in content.items() if name not in ORIGIN_KEYS}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def _digest_of_files(files: list[Path]) -> str:
    """Return a digest of the sizes of ``files`` and of some blocks of each. Any training changes all of a checkpoint's
    weights, so that two checkpoints of the same shapes differ in some block. Reads `NUM_BLOCKS` × `BLOCK_BYTES` a
    file."""
    digest = hashlib.sha256()
    for path in sorted(files, key=lambda path: path.name):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for number in range(NUM_BLOCKS):
                file.seek(max(0, size - BLOCK_BYTES) * number // (NUM_BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class ServerSettings:
    """What a server says of itself."""

    name: str = ""
    agreed: dict[str, Any] = field(default_factory=dict)  # `agreed_settings`
    precision: dict[str, str] = field(default_factory=dict)  # the rollout column of the precision contract
    backend: str = "gloo"  # of a broadcast of weights
    workers: int = 1  # processes that take weights, each with a rank in a broadcast
    version: int | None = None  # of the weights that it answers for; None: it is closed
    replacing: bool = False  # an update of weights has not ended
    load: Load = field(default_factory=Load)

    @classmethod
    def of(cls, content: Any) -> ServerSettings:
        """Read the settings that a server sent. Raises `ValueError` where these are no settings."""
        if not isinstance(content, dict):
            raise ValueError(f"no settings of a server: {printable(str(content), 60)}")
        given = {name: content[name] for name in cls.__dataclass_fields__ if name in content}
        return cls(**given | {"load": Load.of(given.get("load"))})


def differences(here: dict[str, Any], there: dict[str, Any], who: str = "the recipe says") -> list[str]:
    """What a server does otherwise than ``who``, in words."""
    return [
        f"{key}: the server has {printable(repr(there.get(key)), 200)}, {who} {value!r}"
        for key, value in here.items()
        if there.get(key) != value
    ]
