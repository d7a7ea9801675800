"""gpt-oss in bf16: attention with sinks, over a window in every other layer; biases; experts with a clamped gate.

vLLM reads less of config.json than transformers: it has 1e-5 in every norm, a head of its own, YaRN whatever
`rope_type` is, windows in the layers of even number, and gpt-oss's own numbers in the experts' activation.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron_rl.model.families.form import Family, shape
from megatron_rl.model.families.keys import (
    ANYTHING,
    EXPERTS,
    FIXED_IN_VLLM,
    HEADS,
    IN_ALL,
    POSITIONS,
    Implemented,
    Neutral,
    WithoutEffect,
    only,
    whole,
)
from megatron_rl.model.families.weights import (
    ATTENTION_OUTPUT,
    EXPERTS_IN_ONE,
    EXPERTS_NORM,
    INPUT_NORM,
    OUTPUT_BIAS,
    QKV,
    QKV_BIAS,
    ROUTER_WITH_BIAS,
    SINKS,
)

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
_SHAPE = partial(
    shape,
    *(24, 2880, 2880, 64, 8, 201088, 131072, 150000),
    eps=1e-5,
    head_dim=64,
    rope_scaling=_YARN,
    num_experts_per_tok=4,
    sliding_window=128,
)


def _layer_types(layers: int) -> list[str]:
    return ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]


def _features(values: dict[str, Any]) -> dict[str, Any]:
    layers = values["num_hidden_layers"]
    return {
        "qkv_bias": True,
        "linear_bias": True,
        "has_sinks": True,
        "clamped_gate": True,
        "windows": tuple(None if layer % 2 else values["sliding_window"] for layer in range(layers)),
        "num_experts": values["num_local_experts"],
        "experts_per_token": values["num_experts_per_tok"],
        "moe_ffn_hidden_size": values["intermediate_size"],
        "norm_topk_prob": True,  # a softmax over the chosen experts alone
        "moe_layers": (True,) * layers,
    }


FAMILY = Family(
    model_type="gpt_oss",
    hf_class="GptOssForCausalLM",
    implemented={
        **IN_ALL,
        "rms_norm_eps": Implemented(only(1e-5, FIXED_IN_VLLM), 1e-5),
        "tie_word_embeddings": Implemented(only(False, FIXED_IN_VLLM), False),
        "max_position_embeddings": Implemented(POSITIONS, 131072),
        "num_key_value_heads": Implemented(HEADS, 8),
        "head_dim": Implemented(HEADS, 64),
        "num_local_experts": Implemented(EXPERTS, 128),
        "num_experts_per_tok": Implemented(EXPERTS, 4),
        "sliding_window": Implemented(whole(2, 2**27), 128),
        "swiglu_alpha": Implemented(only(1.702, FIXED_IN_VLLM), 1.702),
        "swiglu_limit": Implemented(only(7.0, FIXED_IN_VLLM), 7.0),
    },
    others={
        "attention_bias": Neutral((True,), "attention without biases, which vLLM always has here"),
        "num_experts": Neutral((), "another name for num_local_experts, which vLLM does not read"),
        "original_max_position_embeddings": Neutral((), "YaRN of another length; name it in rope_scaling"),
        "experts_per_token": WithoutEffect(ANYTHING, "another name for num_experts_per_tok, which nobody reads"),
        "initial_context_length": WithoutEffect(ANYTHING, "of the published file; nobody reads it"),
    },
    features=_features,
    layer_types=_layer_types,
    rope_theta=150000.0,
    rope_scaling=_YARN,
    layer=(
        INPUT_NORM,
        QKV,
        QKV_BIAS,
        SINKS,
        ATTENTION_OUTPUT,
        OUTPUT_BIAS,
        EXPERTS_NORM,
        *ROUTER_WITH_BIAS,
        *EXPERTS_IN_ONE,
    ),
    known={
        "lmsys/gpt-oss-20b-bf16": _SHAPE(num_local_experts=32),
        "lmsys/gpt-oss-120b-bf16": _SHAPE(num_local_experts=128) | {"num_hidden_layers": 36},
    },
)
