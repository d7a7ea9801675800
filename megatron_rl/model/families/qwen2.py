"""Qwen2 and Qwen2.5, dense: biases on query, key and value; a head is hidden_size / num_attention_heads wide."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron_rl.model.families.form import Family, shape
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


_SMALL = partial(shape, vocab=151936, theta=1e6, tied=True)
_LARGE = partial(shape, vocab=152064, theta=1e6)
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
        "Qwen/Qwen2.5-0.5B-Instruct": _SMALL(24, 896, 4864, 14, 2, longest=32768),
        "Qwen/Qwen2.5-1.5B": _SMALL(28, 1536, 8960, 12, 2, longest=131072),
        "Qwen/Qwen2.5-1.5B-Instruct": _SMALL(28, 1536, 8960, 12, 2, longest=32768),
        "Qwen/Qwen2.5-3B": _SMALL(36, 2048, 11008, 16, 2, longest=32768),
        "Qwen/Qwen2.5-3B-Instruct": _SMALL(36, 2048, 11008, 16, 2, longest=32768),
        "Qwen/Qwen2.5-7B": _LARGE(28, 3584, 18944, 28, 4, longest=131072),
        "Qwen/Qwen2.5-7B-Instruct": _LARGE(28, 3584, 18944, 28, 4, longest=32768),
        "Qwen/Qwen2.5-32B": _LARGE(64, 5120, 27648, 40, 8, longest=131072, eps=1e-5),
        "Qwen/Qwen2.5-Math-7B": _LARGE(28, 3584, 18944, 28, 4, longest=4096, theta=1e4),
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _SMALL(
            28, 1536, 8960, 12, 2, longest=131072, theta=1e4, tied=False
        ),
        "Qwen/Qwen2.5-Math-1.5B": _SMALL(28, 1536, 8960, 12, 2, longest=4096, theta=1e4),
        "Qwen/Qwen2.5-Math-1.5B-Instruct": _SMALL(28, 1536, 8960, 12, 2, longest=4096, theta=1e4),
    },
)
