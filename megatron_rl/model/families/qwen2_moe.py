"""Qwen2 with experts (Qwen1.5-MoE-A2.7B): biases on query, key and value, and a shared expert with a gate."""

from __future__ import annotations

from typing import Any

from megatron_rl.model.families import qwen2, qwen3_moe
from megatron_rl.model.families.form import Family, shape
from megatron_rl.model.families.keys import (
    EXPERTS,
    HEADS,
    IN_ALL,
    LAYER_NUMBERS,
    LAYERS,
    POSITIONS,
    UNUSED_WINDOW,
    WIDTH,
    YES_OR_NO,
    Implemented,
    Neutral,
    or_null,
)
from megatron_rl.model.families.weights import MOE_LAYER, SHARED_EXPERT_GATE, shared_experts

_QWEN1_5_MOE_A2_7B = shape(
    *(24, 2048, 5632, 16, 16, 151936, 8192, 1e6),
    num_experts=60,
    num_experts_per_tok=4,
    moe_intermediate_size=1408,
    shared_expert_intermediate_size=5632,
    norm_topk_prob=False,
)


def _features(values: dict[str, Any]) -> dict[str, Any]:
    shared = {"shared_ffn_hidden_size": values["shared_expert_intermediate_size"], "shared_expert_gate": True}
    return {"qkv_bias": True, **shared, **qwen3_moe.features(values)}


FAMILY = Family(
    model_type="qwen2_moe",
    hf_class="Qwen2MoeForCausalLM",
    implemented={
        **IN_ALL,
        "max_position_embeddings": Implemented(POSITIONS, 32768),
        "num_key_value_heads": Implemented(or_null(HEADS), 16),  # null: as many as heads
        "head_dim": Implemented(HEADS, None),  # absent: hidden_size / num_attention_heads
        "num_experts": Implemented(EXPERTS, 60),
        "num_experts_per_tok": Implemented(EXPERTS, 4),
        "moe_intermediate_size": Implemented(WIDTH, 1408),
        "shared_expert_intermediate_size": Implemented(WIDTH, 5632),
        "norm_topk_prob": Implemented(YES_OR_NO, False),
        "decoder_sparse_step": Implemented(LAYERS, 1),
        "mlp_only_layers": Implemented(or_null(LAYER_NUMBERS), None),
    },
    others={
        "sliding_window": UNUSED_WINDOW,
        "qkv_bias": Neutral((True,), "no biases of query, key and value; vLLM adds them whatever it says"),
    },
    features=_features,
    relate=lambda config, values: qwen2.relate(config, values) + qwen3_moe.relate(config, values),
    layer=(*MOE_LAYER, *shared_experts("shared_expert"), SHARED_EXPERT_GATE),
    known={"Qwen/Qwen1.5-MoE-A2.7B": _QWEN1_5_MOE_A2_7B, "Qwen/Qwen1.5-MoE-A2.7B-Chat": _QWEN1_5_MOE_A2_7B},
)
