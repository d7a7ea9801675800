"""GLM-4.5 and GLM-4.5-Air: sigmoid router with a bias, shared expert, dense layers first, half of each head turned."""

from __future__ import annotations

from typing import Any

from megatron_rl.model.families.form import Family, shape
from megatron_rl.model.families.keys import (
    EPSILON,
    EXPERTS,
    FRACTION,
    HEADS,
    IN_ALL,
    POSITIONS,
    SCALE,
    WIDTH,
    WINDOW,
    YES_OR_NO,
    Implemented,
    Neutral,
    or_null,
    whole,
)
from megatron_rl.model.families.weights import MOE_LAYER, ROUTER_BIAS, shared_experts

_GROUPS = Neutral((1,), "a choice of groups of experts before that of experts; the learner has one group")
_GLM_4_5_AIR = shape(
    *(46, 4096, 10944, 96, 8, 151552, 131072, 1e6),
    eps=1e-5,
    head_dim=128,
    partial_rotary_factor=0.5,
    attention_bias=True,
    use_qk_norm=False,
    n_routed_experts=128,
    n_shared_experts=1,
    num_experts_per_tok=8,
    moe_intermediate_size=1408,
    first_k_dense_replace=1,
    norm_topk_prob=True,
    routed_scaling_factor=1.0,
    num_nextn_predict_layers=1,
)


def experts(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of `Architecture` that say what experts there are, and how a sigmoid router chooses them."""
    dense = values["first_k_dense_replace"]
    return {
        "num_experts": values["n_routed_experts"],
        "experts_per_token": values["num_experts_per_tok"],
        "moe_ffn_hidden_size": values["moe_intermediate_size"],
        "norm_topk_prob": True,
        "moe_layers": tuple(i >= dense for i in range(values["num_hidden_layers"])),
        "shared_ffn_hidden_size": values["moe_intermediate_size"] * values["n_shared_experts"],
        "sigmoid_router": True,
        "routed_scale": values["routed_scaling_factor"],
        "unused_layers": values["num_nextn_predict_layers"],
    }


def _features(values: dict[str, Any]) -> dict[str, Any]:
    return {
        **experts(values),
        "qkv_bias": values["attention_bias"],
        "qk_layernorm": values["use_qk_norm"],
        "is_unscaled_in_fp16": values["routed_scaling_factor"] != 1.0,  # vLLM 0.30 divides the shared expert instead
        "router_in_fp32": True,
    }


def relate(config: dict[str, Any], values: dict[str, Any]) -> list[str]:
    """Why no layer would have experts."""
    dense, layers = values["first_k_dense_replace"], values["num_hidden_layers"]
    if dense < layers:
        return []
    return [f"first_k_dense_replace: {dense}; allowed: below num_hidden_layers ({layers}), so that a layer has experts"]


FAMILY = Family(
    model_type="glm4_moe",
    hf_class="Glm4MoeForCausalLM",
    implemented={
        **IN_ALL,
        "rms_norm_eps": Implemented(EPSILON, 1e-5),
        "max_position_embeddings": Implemented(POSITIONS, 131072),
        "num_key_value_heads": Implemented(HEADS, 8),
        "head_dim": Implemented(HEADS, None),  # absent: hidden_size / num_attention_heads
        "attention_bias": Implemented(YES_OR_NO, False),
        "use_qk_norm": Implemented(YES_OR_NO, False),
        "n_routed_experts": Implemented(EXPERTS, 128),
        "n_shared_experts": Implemented(whole(1, 64), 1),
        "num_experts_per_tok": Implemented(EXPERTS, 8),
        "moe_intermediate_size": Implemented(WIDTH, 1408),
        "first_k_dense_replace": Implemented(whole(0, 1023), 1),
        "routed_scaling_factor": Implemented(SCALE, 1.0),
        "partial_rotary_factor": Implemented(or_null(FRACTION), None),  # read with the rotary embedding
        "num_nextn_predict_layers": Implemented(whole(0, 64), 1),
    },
    others={
        "norm_topk_prob": Neutral((True,), "weights of experts that do not add up to one; Megatron-Core's always do"),
        "sliding_window": Neutral((None,), WINDOW),
        "num_local_experts": Neutral((), "another name for n_routed_experts, which vLLM does not read"),
        "num_mtp_layers": Neutral((), "another name for num_nextn_predict_layers, which vLLM does not read"),
        "n_group": _GROUPS,
        "topk_group": _GROUPS,
    },
    features=_features,
    relate=relate,
    rotary_fraction=0.5,
    layer=(*MOE_LAYER, ROUTER_BIAS, *shared_experts("shared_experts")),
    known={"zai-org/GLM-4.5-Air": _GLM_4_5_AIR},
)
