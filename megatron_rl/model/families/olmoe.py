"""OLMoE: a norm over all queries and one over all keys of a token, experts in every layer, whose weights stay as they
are.

vLLM reads less of config.json than transformers: it has 1e-5 in every norm, a head of its own, and never divides the
weights of chosen experts by their sum.
"""

from __future__ import annotations

from typing import Any

from megatron_rl.model.families import qwen2
from megatron_rl.model.families.form import Family, shape
from megatron_rl.model.families.keys import (
    EXPERTS,
    FIXED_IN_VLLM,
    HEADS,
    IN_ALL,
    POSITIONS,
    WINDOW,
    Implemented,
    Neutral,
    only,
    or_null,
)
from megatron_rl.model.families.weights import ATTENTION_OUTPUT, INPUT_NORM, MOE_BLOCK, QKV, WIDE_K_NORM, WIDE_Q_NORM

_OLMOE_1B_7B = shape(
    *(16, 2048, 1024, 16, 16, 50304, 4096, 1e4),
    eps=1e-5,
    num_experts=64,
    num_experts_per_tok=8,
    norm_topk_prob=False,
)


def _features(values: dict[str, Any]) -> dict[str, Any]:
    return {
        "qk_layernorm": True,
        "wide_qk_norm": True,
        "num_experts": values["num_experts"],
        "experts_per_token": values["num_experts_per_tok"],
        "moe_ffn_hidden_size": values["intermediate_size"],
        "moe_layers": (True,) * values["num_hidden_layers"],
    }


def _relate(config: dict[str, Any], values: dict[str, Any]) -> list[str]:
    problems = qwen2.relate(config, values)
    other = values.pop("num_local_experts", None)
    if other is not None and config.get("num_experts", other) != other:
        problems.append(f"num_experts: {config['num_experts']}, but num_local_experts is {other}; allowed: one number")
    values["num_experts"] = other or values["num_experts"]
    return problems


FAMILY = Family(
    model_type="olmoe",
    hf_class="OlmoeForCausalLM",
    implemented={
        **IN_ALL,
        "rms_norm_eps": Implemented(only(1e-5, FIXED_IN_VLLM), 1e-5),
        "tie_word_embeddings": Implemented(only(False, FIXED_IN_VLLM), False),
        "max_position_embeddings": Implemented(POSITIONS, 4096),
        "num_key_value_heads": Implemented(or_null(HEADS), None),  # null: as many as heads
        "head_dim": Implemented(HEADS, None),  # absent: hidden_size / num_attention_heads
        "num_experts": Implemented(EXPERTS, 64),
        "num_local_experts": Implemented(EXPERTS, None),  # another name for num_experts
        "num_experts_per_tok": Implemented(EXPERTS, 8),
    },
    others={
        "norm_topk_prob": Neutral((False,), "weights of experts divided by their sum; vLLM does not do it here"),
        "clip_qkv": Neutral((None,), "queries, keys and values cut off; neither the learner nor vLLM does it"),
        "sliding_window": Neutral((None,), WINDOW),
    },
    features=_features,
    relate=_relate,
    layer=(INPUT_NORM, QKV, WIDE_Q_NORM, WIDE_K_NORM, ATTENTION_OUTPUT, *MOE_BLOCK),
    known={
        f"allenai/OLMoE-1B-7B-{release}": _OLMOE_1B_7B for release in ("0924", "0924-Instruct", "0125", "0125-Instruct")
    },
)
