"""What a checkpoint's config.json says of its model: the numbers that layouts, conversion and plans need. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError


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
        reason = "; Megatron-Core's router weights experts against each other, one has none" * (
            self.experts_per_token == 1
        )
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

# Per model_type: (bias on q/k/v, RMSNorm on q and k). Other types have no converter and are refused.
_FAMILIES = {
    "qwen3_moe": (False, True),
    "qwen3": (False, True),
    "qwen2": (True, False),
    "llama": (False, False),
}


def read_architecture(path: Path) -> Architecture:
    """Read ``path/config.json``. Raises `InputError` where it is missing, broken or of another architecture."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise InputError(f"model.path: {file} does not exist; expected a checkpoint folder in Hugging Face layout")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"model.path: {file} is not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise InputError(f"model.path: {file} holds a {type(config).__name__}; expected an object of keys")
    model_type = config.get("model_type")
    if model_type not in _FAMILIES:
        raise InputError(
            f"model.path: {file} has model_type {model_type!r}; supported architectures: {', '.join(_FAMILIES)}"
        )
    try:
        return architecture_from(config)
    except KeyError as error:
        raise InputError(f"model.path: {file} lacks the key {error.args[0]!r}") from error
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise InputError(f"model.path: {file} describes no model ({error}); is it the model's own?") from error


def architecture_from(config: dict[str, Any]) -> Architecture:
    """The architecture that the keys of a config.json describe; `KeyError` where one is missing."""
    qkv_bias, qk_layernorm = _FAMILIES[config["model_type"]]
    num_layers, is_moe = config["num_hidden_layers"], config["model_type"].endswith("_moe")
    # transformers 5 writes `rope_parameters`, earlier releases `rope_theta` and `rope_scaling`.
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope_theta = float(rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    step, dense = config.get("decoder_sparse_step", 1), set(config.get("mlp_only_layers") or ())
    for key in ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        if type(config[key]) is not int or config[key] < 1:
            raise ValueError(f"{key} is {config[key]!r}")
    return Architecture(
        model_type=config["model_type"],
        num_layers=num_layers,
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config.get("num_key_value_heads", config["num_attention_heads"]),
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        vocab_size=config["vocab_size"],
        max_position_embeddings=config["max_position_embeddings"],
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope if scaled else None,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bool(config.get("attention_bias", False)) or qkv_bias,
        qk_layernorm=qk_layernorm,
        num_experts=(config.get("num_experts") or config["num_local_experts"]) if is_moe else 0,
        experts_per_token=config["num_experts_per_tok"] if is_moe else 0,
        moe_ffn_hidden_size=config["moe_intermediate_size"] if is_moe else 0,
        norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        moe_layers=tuple(is_moe and i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
    )
