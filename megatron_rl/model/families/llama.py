"""Llama, dense: no biases, no norms of heads; Llama 3's scaling of rotary frequencies."""

from __future__ import annotations

from typing import Any

from megatron_rl.model.families.form import Family
from megatron_rl.model.families.keys import HEADS, IN_ALL, POSITIONS, WINDOW, Implemented, Neutral, or_null
from megatron_rl.model.families.weights import DENSE_LAYER

_LLAMA_3_2_3B = {
    "num_hidden_layers": 28,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": True,
}
_LLAMA_3_2_1B = {
    **_LLAMA_3_2_3B,
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "head_dim": 64,
}
_LLAMA_3_1_8B = {
    **_LLAMA_3_2_3B,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "rope_scaling": {**_LLAMA_3_2_3B["rope_scaling"], "factor": 8.0},
    "tie_word_embeddings": False,
}


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
        "OctoThinker-3B-Hybrid-Base": _LLAMA_3_2_3B,
        "Llama-3.2-1B-Instruct": _LLAMA_3_2_1B,
        "Llama-3.2-3B-Instruct": _LLAMA_3_2_3B,
        "Llama-3.1-8B-Instruct": _LLAMA_3_1_8B,
    },
    organizations={"OctoThinker": "OctoThinker", "Llama": "meta-llama"},
)
