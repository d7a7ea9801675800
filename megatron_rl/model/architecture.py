"""What a checkpoint's config.json says of its model: the numbers that layouts, conversion and plans need. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.model.config_keys import FAMILIES, architectures_problem, read_keys, rope_of, unknown_keys


@dataclass(frozen=True)
class Architecture:
    """The numbers of a decoder that layout checks, the converter and the planner need."""

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    tie_embeddings: bool
    qkv_bias: bool
    qk_layernorm: bool
    num_experts: int  # 0 for a dense model
    experts_per_token: int
    moe_ffn_hidden_size: int
    norm_topk_prob: bool
    moe_layers: tuple[bool, ...]  # per layer: MoE (True) or dense

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def llama3_factor(self) -> float | None:
        """The factor by which Llama 3's rope scaling slows low rotary frequencies; None for other models."""
        return float(self.rope_scaling["factor"]) if self.rope_scaling and not self._rope_problems() else None

    def padded_vocab_size(self, tensor_parallel: int) -> int:
        """The vocabulary rounded up to what ``tensor_parallel`` ranks share evenly.

        Padding rows never reach a softmax: `learner.layers.logprobs` masks them, so pi is over the same tokens as mu.
        """
        return -(-self.vocab_size // tensor_parallel) * tensor_parallel

    def problems(self) -> list[str]:
        """Why the learner cannot build this model; empty where it can."""
        return self._rope_problems() + self._expert_problems()

    def _expert_problems(self) -> list[str]:
        if not self.is_moe or 1 < self.experts_per_token <= self.num_experts:
            return []
        reason = ""
        if self.experts_per_token == 1:
            reason = "; Megatron-Core's router weights experts against each other, one has none"
        return [
            f"model.path: num_experts_per_tok is {self.experts_per_token} of {self.num_experts} experts; from 2 to "
            f"{self.num_experts} are supported{reason}"
        ]

    def _rope_problems(self) -> list[str]:
        scaling = dict(self.rope_scaling or {})
        scaling["rope_type"] = scaling.pop("rope_type", None) or scaling.pop("type", None)
        if self.rope_scaling is None or (scaling.pop("factor", 0) > 0 and scaling == _LLAMA3_SCALING):
            return []
        return [
            f"model.path: rope scaling {self.rope_scaling} is not supported, only Llama 3's ({_LLAMA3_SCALING}, any "
            "factor); take it out of config.json only where that kind leaves sequences of the run's length alone"
        ]


# The constants of Llama 3's scaling in Megatron-Core's RotaryEmbedding, which takes the factor alone.
_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


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
    is_moe, num_layers = model_type == "qwen3_moe", values["num_hidden_layers"]
    step, dense = values.get("decoder_sparse_step", 1), set(values.get("mlp_only_layers", ()))
    return Architecture(
        model_type=model_type,
        num_layers=num_layers,
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
        qkv_bias=model_type == "qwen2",
        qk_layernorm=model_type in ("qwen3", "qwen3_moe"),
        num_experts=values.get("num_experts", 0),
        experts_per_token=values.get("num_experts_per_tok", 0),
        moe_ffn_hidden_size=values.get("moe_intermediate_size", 0),
        norm_topk_prob=values.get("norm_topk_prob", False),
        moe_layers=tuple(is_moe and i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
    )
