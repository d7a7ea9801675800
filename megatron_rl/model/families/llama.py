"""Llama, dense: no biases, no norms of heads; Llama 3's scaling of rotary frequencies."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron_rl.model.families.form import Family, shape
from megatron_rl.model.families.keys import HEADS, IN_ALL, POSITIONS, WINDOW, Implemented, Neutral, or_null
from megatron_rl.model.families.weights import DENSE_LAYER

_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_SHAPE = partial(
    shape, kv_heads=8, vocab=128256, longest=131072, theta=5e5, eps=1e-5, head_dim=128, rope_scaling=_SCALING
)
_LLAMA_3_2_3B = _SHAPE(28, 3072, 8192, 24, tied=True)


def _relate(config: dict[str, Any], values: dict[str, Any]) -> list[str]:
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if config.get("head_dim") is None or hidden % heads == 0:
        return []
    return [f"num_attention_heads: {heads} does not divide hidden_size {hidden}; allowed: what does"]


FAMILY = Family(
    model_type="llama",
    hf_class="LlamaForCausalLM",
    implemented={
        **IN_ALL,
        "max_position_embeddings": Implemented(POSITIONS, 2048),
        "num_key_value_heads": Implemented(or_null(HEADS), None),
        "head_dim": Implemented(or_null(HEADS), None),
    },
    others={"sliding_window": Neutral((None,), WINDOW)},
    relate=_relate,
    layer=DENSE_LAYER,
    known={
        "OctoThinker/OctoThinker-3B-Hybrid-Base": _LLAMA_3_2_3B,
        "meta-llama/Llama-3.2-1B-Instruct": _SHAPE(16, 2048, 8192, 32, head_dim=64, tied=True),
        "meta-llama/Llama-3.2-3B-Instruct": _LLAMA_3_2_3B,
        "meta-llama/Llama-3.1-8B-Instruct": _SHAPE(32, 4096, 14336, 32, rope_scaling={**_SCALING, "factor": 8.0}),
    },
)
