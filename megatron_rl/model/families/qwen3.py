"""Qwen3, dense: grouped queries, a norm of each head's query and key."""

from __future__ import annotations

from functools import partial

from megatron_rl.model.families.form import Family, shape
from megatron_rl.model.families.keys import HEADS, IN_ALL, POSITIONS, UNUSED_WINDOW, Implemented, Neutral, or_null
from megatron_rl.model.families.weights import DENSE_LAYER

_SHAPE = partial(shape, kv_heads=8, head_dim=128, vocab=151936, theta=1e6)
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
        "Qwen/Qwen3-0.6B": _SHAPE(28, 1024, 3072, 16, longest=40960, tied=True),
        "Qwen/Qwen3-1.7B": _SHAPE(28, 2048, 6144, 16, longest=40960, tied=True),
        "Qwen/Qwen3-4B": _SHAPE(36, 2560, 9728, 32, longest=40960, tied=True),
        "Qwen/Qwen3-8B": _SHAPE(36, 4096, 12288, 32, longest=40960),
        "Qwen/Qwen3-14B": _SHAPE(40, 5120, 17408, 40, longest=40960),
        "Qwen/Qwen3-32B": _SHAPE(64, 5120, 25600, 64, longest=40960),
        "Qwen/Qwen3-4B-Base": _SHAPE(36, 2560, 9728, 32, longest=32768, tied=True),
        "Qwen/Qwen3-4B-Instruct-2507": _SHAPE(36, 2560, 9728, 32, longest=262144, theta=5e6, tied=True),
        "Qwen/Qwen3-8B-Base": _SHAPE(36, 4096, 12288, 32, longest=32768),
        "Qwen/Qwen3-14B-Base": _SHAPE(40, 5120, 17408, 40, longest=32768),
    },
)
