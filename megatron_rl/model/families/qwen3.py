"""Qwen3, dense: grouped queries, a norm of each head's query and key."""

from __future__ import annotations

from typing import Any

from megatron_rl.model.families.form import Family
from megatron_rl.model.families.keys import HEADS, IN_ALL, POSITIONS, UNUSED_WINDOW, Implemented, Neutral, or_null
from megatron_rl.model.families.weights import DENSE_LAYER


def _qwen3(layers: int, hidden: int, ffn: int, heads: int, tied: bool, longest: int = 32768) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": longest,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": tied,
    }


FAMILY = Family(
    model_type="qwen3",
    hf_class="Qwen3ForCausalLM",
    implemented={
        **IN_ALL,
        "max_position_embeddings": Implemented(POSITIONS, 32768),
        "num_key_value_heads": Implemented(or_null(HEADS), 32),  # null: as many as heads
        "head_dim": Implemented(HEADS, 128),
    },
    others={"sliding_window": UNUSED_WINDOW, "qk_norm": Neutral((True, False), "")},
    features=lambda values: {"qk_layernorm": True},
    layer=DENSE_LAYER,
    known={
        "Qwen3-0.6B": _qwen3(28, 1024, 3072, 16, tied=True, longest=40960),
        "Qwen3-1.7B": _qwen3(28, 2048, 6144, 16, tied=True, longest=40960),
        "Qwen3-4B": _qwen3(36, 2560, 9728, 32, tied=True, longest=40960),
        "Qwen3-8B": _qwen3(36, 4096, 12288, 32, tied=False, longest=40960),
        "Qwen3-14B": _qwen3(40, 5120, 17408, 40, tied=False, longest=40960),
        "Qwen3-32B": _qwen3(64, 5120, 25600, 64, tied=False, longest=40960),
        "Qwen3-4B-Base": _qwen3(36, 2560, 9728, 32, tied=True),
        "Qwen3-4B-Instruct-2507": {**_qwen3(36, 2560, 9728, 32, tied=True, longest=262144), "rope_theta": 5e6},
        "Qwen3-8B-Base": _qwen3(36, 4096, 12288, 32, tied=False),
        "Qwen3-14B-Base": _qwen3(40, 5120, 17408, 40, tied=False),
    },
    organizations={"Qwen": "Qwen"},
)
