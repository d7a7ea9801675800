"""Qwen2 and Qwen2.5, dense: biases on query, key and value; a head is hidden_size / num_attention_heads wide."""

from __future__ import annotations

from typing import Any

from megatron_rl.model.families.form import Family
from megatron_rl.model.families.keys import (
    HEADS,
    IN_ALL,
    POSITIONS,
    UNUSED_WINDOW,
    YES_OR_NO,
    Implemented,
    WithoutEffect,
    or_null,
)
from megatron_rl.model.families.weights import DENSE_LAYER


def relate(config: dict[str, Any], values: dict[str, Any]) -> list[str]:
    """Why a head may not have another width than vLLM gives it."""
    derived = values["hidden_size"] // values["num_attention_heads"]
    if values["head_dim"] == derived:
        return []
    return [
        f"head_dim: {values['head_dim']}; vLLM gives this family hidden_size / num_attention_heads = {derived}; "
        "allowed: that"
    ]


def _qwen2(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, tied: bool, longest: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 152064 if hidden > 3000 else 151936,
        "max_position_embeddings": longest,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": tied,
    }


_QWEN2_1_5B = {
    "num_hidden_layers": 28,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}
_QWEN2_5_MATH_1_5B = {**_QWEN2_1_5B, "max_position_embeddings": 4096, "tie_word_embeddings": True}
FAMILY = Family(
    model_type="qwen2",
    hf_class="Qwen2ForCausalLM",
    implemented={
        **IN_ALL,
        "max_position_embeddings": Implemented(POSITIONS, 32768),
        "num_key_value_heads": Implemented(or_null(HEADS), 32),  # null: as many as heads
        "head_dim": Implemented(HEADS, None),  # absent: hidden_size / num_attention_heads
    },
    others={
        "sliding_window": UNUSED_WINDOW,
        "attention_bias": WithoutEffect(YES_OR_NO, "q, k and v of this family have biases, whatever it says"),
    },
    features=lambda values: {"qkv_bias": True},
    relate=relate,
    layer=DENSE_LAYER,
    known={
        "Qwen2.5-0.5B-Instruct": _qwen2(24, 896, 4864, 14, 2, tied=True, longest=32768),
        "Qwen2.5-1.5B": _qwen2(28, 1536, 8960, 12, 2, tied=True, longest=131072),
        "Qwen2.5-1.5B-Instruct": _qwen2(28, 1536, 8960, 12, 2, tied=True, longest=32768),
        "Qwen2.5-3B": _qwen2(36, 2048, 11008, 16, 2, tied=True, longest=32768),
        "Qwen2.5-3B-Instruct": _qwen2(36, 2048, 11008, 16, 2, tied=True, longest=32768),
        "Qwen2.5-7B": _qwen2(28, 3584, 18944, 28, 4, tied=False, longest=131072),
        "Qwen2.5-7B-Instruct": _qwen2(28, 3584, 18944, 28, 4, tied=False, longest=32768),
        "Qwen2.5-32B": {**_qwen2(64, 5120, 27648, 40, 8, tied=False, longest=131072), "rms_norm_eps": 1e-5},
        "Qwen2.5-Math-7B": {**_qwen2(28, 3584, 18944, 28, 4, tied=False, longest=4096), "rope_theta": 1e4},
        "DeepSeek-R1-Distill-Qwen-1.5B": {
            **_QWEN2_1_5B,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
        },
        "Qwen2.5-Math-1.5B": _QWEN2_5_MATH_1_5B,
        "Qwen2.5-Math-1.5B-Instruct": _QWEN2_5_MATH_1_5B,
    },
    organizations={"Qwen": "Qwen", "DeepSeek": "deepseek-ai"},
)
