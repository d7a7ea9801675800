"""What a server and its trainer have to agree on before the first response."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

from megatron_rl.checkpoint.hf_folder import HFFolder
from megatron_rl.config.precision import PrecisionConfig
from megatron_rl.config.rollout import RolloutConfig


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
    shapes = sorted((name, list(shape)) for name, shape in HFFolder(model_path).shapes().items())
    return {
        "model": hashlib.sha256(repr(shapes).encode()).hexdigest()[:16],
        "dtype": config.dtype,
        "quantization": config.quantization.model_dump(mode="json"),
        "max_model_len": max_prompt_length + config.max_response_length,
        "record_routes": record_routes,
        "fp32_head": precision.rollout_head,
        "fp32_router": precision.rollout_router,
    }


def differences(here: dict[str, Any], there: dict[str, Any]) -> list[str]:
    """What a server does otherwise than the recipe says, in words."""
    return [
        f"{key}: the server has {there.get(key)!r}, the recipe says {value!r}"
        for key, value in here.items()
        if there.get(key) != value
    ]
