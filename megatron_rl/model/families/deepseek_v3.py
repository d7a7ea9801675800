"""DeepSeek-V3 and Moonlight-16B-A3B: latent attention, a sigmoid router with a bias, shared experts."""

from __future__ import annotations

from typing import Any

from megatron_rl.model.decoder import LatentAttention
from megatron_rl.model.families import glm4_moe
from megatron_rl.model.families.form import Family, shape
from megatron_rl.model.families.keys import (
    EXPERTS,
    HEADS,
    IN_ALL,
    POSITIONS,
    REQUIRED,
    SCALE,
    WIDTH,
    WINDOW,
    Implemented,
    Neutral,
    WithoutEffect,
    only,
    or_null,
    whole,
)
from megatron_rl.model.families.weights import LATENT_ATTENTION, MOE_BLOCK, ROUTER_BIAS, shared_experts

_SPARSE = Neutral((), "attention to chosen tokens; the learner attends to all of them")
_SPARSE_KEYS = (
    "index_topk index_head_dim index_n_heads index_skip_topk_offset index_topk_freq index_topk_pattern "
    "indexer_rope_interleave"
)
_MOONLIGHT_16B_A3B = shape(
    *(27, 2048, 11264, 16, 16, 163840, 8192, 5e4),
    eps=1e-5,
    q_lora_rank=None,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=64,
    n_shared_experts=2,
    num_experts_per_tok=6,
    moe_intermediate_size=1408,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    norm_topk_prob=True,
    routed_scaling_factor=2.446,
    num_nextn_predict_layers=0,
)
_YARN = {"type": "yarn", "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
_DEEPSEEK_V3 = {
    **_MOONLIGHT_16B_A3B,
    **shape(61, 7168, 18432, 128, 128, 129280, 163840, 1e4),
    "rope_scaling": {**_YARN, "factor": 40, "beta_fast": 32, "beta_slow": 1},
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
}
_KIMI_K2 = {
    **_DEEPSEEK_V3,
    **shape(61, 7168, 18432, 64, 64, 163840, 131072, 5e4),
    "rope_scaling": {**_YARN, "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "num_nextn_predict_layers": 0,
}  # its config.json has the model_type kimi_k2, and is otherwise DeepSeek-V3's


_NAMED = "which vLLM does not take for granted"  # the reason of `only`


def _features(values: dict[str, Any]) -> dict[str, Any]:
    return {
        **glm4_moe.experts(values),
        "router_groups": (values["n_group"], values["topk_group"]),
        "latent": LatentAttention(
            query_rank=values["q_lora_rank"],
            rank=values["kv_lora_rank"],
            plain_width=values["qk_nope_head_dim"],
            rotary_width=values["qk_rope_head_dim"],
            value_width=values["v_head_dim"],
        ),
    }


def _relate(config: dict[str, Any], values: dict[str, Any]) -> list[str]:
    problems = glm4_moe.relate(config, values)
    if config.get("head_dim") not in (None, values["qk_rope_head_dim"]):
        problems.append(f"head_dim: {config['head_dim']}; allowed: qk_rope_head_dim")
    values["head_dim"] = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    if values["qk_rope_head_dim"] % 2:
        problems.append(f"qk_rope_head_dim: {values['qk_rope_head_dim']}; allowed: even numbers")
    if values["num_key_value_heads"] not in (None, values["num_attention_heads"]):
        problems.append(f"num_key_value_heads: {values['num_key_value_heads']}; allowed: num_attention_heads, or null")
    return problems + group_problems(values["n_routed_experts"], values)


def group_problems(experts: int, values: dict[str, Any]) -> list[str]:
    """Why ``experts`` cannot be chosen by groups as the keys say."""
    problems = []
    groups, chosen, k = values["n_group"], values["topk_group"], values["num_experts_per_tok"]
    per_group = experts // groups
    if experts % groups or chosen > groups or per_group < 2 or chosen * per_group < k:
        problems.append(
            f"n_group: {groups} and topk_group: {chosen}; allowed: groups of at least two that hold k experts"
        )
    elif groups > 1 and k // chosen != 2:
        problems.append(
            f"topk_group: {chosen}; Megatron-Core scores a group by its best {k // chosen} experts, transformers and "
            f"vLLM by two; allowed: {k // 2}"
        )
    return problems


FAMILY = Family(
    model_type="deepseek_v3",
    hf_class="DeepseekV3ForCausalLM",
    implemented={
        **IN_ALL,
        "max_position_embeddings": Implemented(POSITIONS, 4096),
        "num_key_value_heads": Implemented(or_null(HEADS), 128),  # null: as many as heads, which is all that is allowed
        "head_dim": Implemented(HEADS, None),  # the width that is turned, where it is named
        "q_lora_rank": Implemented(or_null(WIDTH), 1536),
        "kv_lora_rank": Implemented(WIDTH, 512),
        "qk_nope_head_dim": Implemented(HEADS, 128),
        "qk_rope_head_dim": Implemented(HEADS, 64),
        "v_head_dim": Implemented(HEADS, 128),
        "n_routed_experts": Implemented(EXPERTS, 256),
        "n_shared_experts": Implemented(whole(1, 64), 1),
        "num_experts_per_tok": Implemented(EXPERTS, 8),
        "moe_intermediate_size": Implemented(WIDTH, 2048),
        "first_k_dense_replace": Implemented(whole(0, 1023), 3),
        "n_group": Implemented(EXPERTS, 8),
        "topk_group": Implemented(EXPERTS, 4),
        "topk_method": Implemented(only("noaux_tc", _NAMED), REQUIRED),
        "scoring_func": Implemented(only("sigmoid", _NAMED), REQUIRED),
        "routed_scaling_factor": Implemented(SCALE, 2.5),
        "num_nextn_predict_layers": Implemented(whole(0, 64), 1),
    },
    others={
        "norm_topk_prob": Neutral((True,), "weights of experts that do not add up to one; Megatron-Core's always do"),
        "rope_interleave": Neutral((True,), "rotary embeddings of halves; the learner and vLLM turn neighbours"),
        "num_local_experts": Neutral((), "another name for n_routed_experts, which vLLM does not read"),
        "num_mtp_layers": Neutral((), "another name for num_nextn_predict_layers, which vLLM does not read"),
        **dict.fromkeys(_SPARSE_KEYS.split(), _SPARSE),
        "qk_head_dim": WithoutEffect(or_null(WIDTH), "qk_nope_head_dim and qk_rope_head_dim together"),
        "moe_router_dtype": Neutral((None,), "a router in another type; use precision.fp32_router"),
        "llama_4_scaling": Neutral((None,), "scaled queries"),
        "sliding_window": Neutral((None,), WINDOW),
        "moe_layer_freq": Neutral((1,), "layers with experts in another order"),
    },
    features=_features,
    relate=_relate,
    layer=(*LATENT_ATTENTION, *MOE_BLOCK, ROUTER_BIAS, *shared_experts("shared_experts")),
    known={
        "moonshotai/Moonlight-16B-A3B": _MOONLIGHT_16B_A3B,
        "moonshotai/Moonlight-16B-A3B-Instruct": _MOONLIGHT_16B_A3B,
        "deepseek-ai/DeepSeek-V3": _DEEPSEEK_V3,
        "moonshotai/Kimi-K2-Instruct": _KIMI_K2,
    },
)
