"""What a server and its trainer have to agree on before the first response."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_rl.checkpoint.hf_folder import HFFolder, model_shapes
from megatron_rl.config.precision import PrecisionConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.model.architecture import read_architecture
from megatron_rl.rollout.servers.rendezvous import printable
from megatron_rl.rollout.servers.wire import Load

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
    from megatron_rl.rollout.fp32_modules import overrides
    from megatron_rl.rollout.servers.extension import BACKEND, ServerExtension

    arguments = engine_arguments(config, model_path, device, max_prompt_length, record_routes=record_routes)
    arguments |= {
        "hf_overrides": overrides(precision),
        "weight_transfer_config": {"backend": BACKEND},
        "worker_extension_cls": f"{ServerExtension.__module__}.{ServerExtension.__name__}",
        "distributed_executor_backend": "uni" if config.tensor_parallel == 1 else "mp",
        "enable_scale_out": True,  # token ids in, token ids out
        "max_logprobs": 1,
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
    shapes = sorted((name, list(shape)) for name, shape in model_shapes(read_architecture(model_path)).items())
    return {
        "model": hashlib.sha256(repr(shapes).encode()).hexdigest()[:16],
        "config": _digest_of_config(model_path / CONFIG_FILE),
        "weights": _digest_of_files(HFFolder(model_path).files),
        "dtype": config.dtype,
        "quantization": config.quantization.model_dump(mode="json"),
        "max_model_len": max_prompt_length + config.max_response_length,
        "record_routes": record_routes,
        "fp32_head": precision.rollout_head,
        "fp32_router": precision.rollout_router,
    }


def _digest_of_config(path: Path) -> str:
    """Of what config.json says, without the keys that say where it came from."""
    content = json.loads(path.read_text())
    kept = {name: value for name, value in content.items() if name not in ORIGIN_KEYS}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def _digest_of_files(files: list[Path]) -> str:
    """Of the sizes of ``files`` and some blocks of each. Any training changes all of a checkpoint's weights, so that
    two checkpoints of the same shapes differ in some block. Reads `NUM_BLOCKS` × `BLOCK_BYTES` a file."""
    digest = hashlib.sha256()
    for path in sorted(files, key=lambda path: path.name):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for number in range(NUM_BLOCKS):
                file.seek(max(0, size - BLOCK_BYTES) * number // (NUM_BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]


MOST_WORKERS = 4096  # processes of one server
BACKENDS = ("gloo", "nccl")


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
    def of(cls, content: dict[str, Any]) -> ServerSettings:
        """Of the JSON object that it sent. Raises `ValueError` that names the first value which cannot be true."""
        given = {name: content[name] for name in cls.__dataclass_fields__ if name in content}
        fits = {
            "name": lambda value: isinstance(value, str),
            "agreed": lambda value: isinstance(value, dict),
            "precision": lambda value: isinstance(value, dict) and all(isinstance(v, str) for v in value.values()),
            "backend": lambda value: value in BACKENDS,
            "workers": lambda value: type(value) is int and 0 < value <= MOST_WORKERS,
            "version": lambda value: value is None or (type(value) is int and 0 <= value < 2**31),
            "replacing": lambda value: type(value) is bool,
            "load": lambda value: isinstance(value, dict),
        }
        for name, value in given.items():
            if not fits[name](value):
                raise ValueError(f"{name}: {printable(repr(value), 60)} cannot be true")
        return cls(**given | ({"load": Load.of(given["load"])} if "load" in given else {}))


def differences(here: dict[str, Any], there: dict[str, Any], who: str = "the recipe says") -> list[str]:
    """What a server does otherwise than ``who``, in words."""
    return [
        f"{key}: the server has {printable(repr(there.get(key)), 200)}, {who} {value!r}"
        for key, value in here.items()
        if there.get(key) != value
    ]
