"""What a checkpoint's config.json says of its model: the numbers that layouts, conversion and plans need. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.model.config_keys import architectures_problem, read_keys, rope_of, unknown_keys
from megatron_rl.model.decoder import Architecture
from megatron_rl.model.families import FAMILIES


def read_architecture(path: Path) -> Architecture:
    """Read ``path/config.json``. Raises `InputError` where it is missing, broken, of another architecture, or asks for
    something that the learner or vLLM would not do (`config_keys`)."""
    file = Path(path) / "config.json"
    config = _read(file)
    try:
        architecture = architecture_from(config)
        problem = architectures_problem(config)
    except InputError as error:
        raise InputError(f"model.path: {file}: {error}") from error
    if problem:
        raise InputError(f"model.path: {file}: {problem}")
    return architecture


def unknown_config_keys(path: Path) -> list[str]:
    """Keys of ``path/config.json`` that neither the learner nor an engine is known to read."""
    return unknown_keys(_read(Path(path) / "config.json"))


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise InputError(f"model.path: {file} does not exist; expected a checkpoint folder in Hugging Face layout")
    config = read_object(file)
    model_type = config.get("model_type")
    if type(model_type) is not str or model_type not in FAMILIES:
        raise InputError(
            f"model.path: {file} has model_type {model_type!r}; supported architectures: {', '.join(FAMILIES)}"
        )
    return config


def read_object(file: Path) -> dict[str, Any]:
    """The object that the JSON file ``file`` of a model's folder holds. Raises `InputError` where it holds none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise InputError(f"model.path: {file} is not valid JSON ({error}); is the download complete?") from error
    if not isinstance(value, dict):
        raise InputError(f"model.path: {file} holds a {type(value).__name__}; expected an object of keys")
    return value


def architecture_from(config: dict[str, Any]) -> Architecture:
    """The architecture that the keys of a config.json describe; absent keys are transformers' defaults.

    Raises `InputError` that names every key whose value is not allowed.
    """
    model_type = config["model_type"]
    values, rope = read_keys(config), rope_of(config)
    dense = {
        "qkv_bias": False,
        "qk_layernorm": False,
        "num_experts": 0,
        "experts_per_token": 0,
        "moe_ffn_hidden_size": 0,
        "norm_topk_prob": False,
        "moe_layers": (False,) * values["num_hidden_layers"],
    }
    return Architecture(
        model_type=model_type,
        num_layers=values["num_hidden_layers"],
        hidden_size=values["hidden_size"],
        ffn_hidden_size=values["intermediate_size"],
        num_heads=values["num_attention_heads"],
        num_kv_heads=values["num_key_value_heads"],
        head_dim=values["head_dim"],
        vocab_size=values["vocab_size"],
        max_position_embeddings=values["max_position_embeddings"],
        rms_norm_eps=values["rms_norm_eps"],
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        tie_embeddings=values["tie_word_embeddings"],
        rotary_fraction=rope.fraction,
        **(dense | FAMILIES[model_type].features(values)),
    )
