"""Ling 2.0 and Ring 2.0: GLM-4.5's function with experts in groups, under names of its own.

transformers has no class for this family. `model.transformers_classes` adds one.
"""

from __future__ import annotations

from typing import Any

from megatron_rl.model.families import deepseek_v3, glm4_moe
from megatron_rl.model.families.form import Family, shape
from megatron_rl.model.families.keys import (
    ANYTHING,
    EXPERTS,
    FRACTION,
    HEADS,
    IN_ALL,
    POSITIONS,
    REQUIRED,
    SCALE,
    WIDTH,
    WINDOW,
    YES_OR_NO,
    Implemented,
    Neutral,
    WithoutEffect,
    only,
    whole,
)
from megatron_rl.model.families.weights import (
    EMBEDDING,
    MOE_BLOCK,
    ROUTER_BIAS,
    named,
    packed_attention,
    shared_experts,
)

_LING_MINI = shape(
    *(20, 2048, 5120, 16, 4, 157184, 32768, 6e5),
    head_dim=128,
    partial_rotary_factor=0.5,
    use_qk_norm=True,
    use_rmsnorm=True,
    num_experts=256,
    num_shared_experts=1,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    moe_shared_expert_intermediate_size=512,
    first_k_dense_replace=1,
    n_group=8,
    topk_group=4,
    score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    router_dtype="fp32",
    routed_scaling_factor=2.5,
)


_IN_LEARNER = "which the learner has"  # the reason of `only`


def _features(values: dict[str, Any]) -> dict[str, Any]:
    names = {"n_routed_experts": values["num_experts"], "n_shared_experts": values["num_shared_experts"]}
    return {
        **glm4_moe.experts({**values, **names, "num_nextn_predict_layers": 0}),
        "router_groups": (values["n_group"], values["topk_group"]),
        "qk_layernorm": values["use_qk_norm"],
        "router_in_fp32": True,
    }


def _relate(config: dict[str, Any], values: dict[str, Any]) -> list[str]:
    problems = glm4_moe.relate(config, values) + deepseek_v3.group_problems(values["num_experts"], values)
    width, shared = values["moe_intermediate_size"], values["moe_shared_expert_intermediate_size"]
    if shared not in (None, width):
        problems.append(f"moe_shared_expert_intermediate_size: {shared}; allowed: moe_intermediate_size ({width})")
    rope = next((config[key] for key in ("rope_parameters", "rope_scaling") if isinstance(config.get(key), dict)), {})
    if "rope_theta" not in rope and "rope_theta" not in config:
        problems.append("lacks the key 'rope_theta', for which the checkpoint's own code has another default")
    if rope.get("partial_rotary_factor", values["partial_rotary_factor"]) != values["partial_rotary_factor"]:
        problems.append(f"partial_rotary_factor: two values; allowed: {values['partial_rotary_factor']} in both places")
    return problems


def _register() -> None:
    from megatron_rl.model import transformers_classes  # seconds to import: only where an engine starts

    transformers_classes.register()


FAMILY = Family(
    model_type="bailing_moe",
    hf_class="BailingMoeV2ForCausalLM",
    implemented={
        **IN_ALL,
        "tie_word_embeddings": Implemented(only(False, _IN_LEARNER), False),
        "max_position_embeddings": Implemented(POSITIONS, 32768),
        "num_key_value_heads": Implemented(HEADS, 4),
        "head_dim": Implemented(HEADS, 128),
        "num_experts": Implemented(EXPERTS, REQUIRED),
        "num_shared_experts": Implemented(whole(1, 64), 1),
        "num_experts_per_tok": Implemented(EXPERTS, REQUIRED),
        "moe_intermediate_size": Implemented(WIDTH, REQUIRED),
        "moe_shared_expert_intermediate_size": Implemented(WIDTH, None),  # absent: moe_intermediate_size
        "first_k_dense_replace": Implemented(whole(0, 1023), REQUIRED),
        "n_group": Implemented(EXPERTS, REQUIRED),
        "topk_group": Implemented(EXPERTS, REQUIRED),
        "routed_scaling_factor": Implemented(SCALE, REQUIRED),
        "use_qk_norm": Implemented(YES_OR_NO, REQUIRED),
        "use_rmsnorm": Implemented(only(True, _IN_LEARNER), REQUIRED),  # vLLM has norms of another kind without it
        "score_function": Implemented(only("sigmoid", _IN_LEARNER), REQUIRED),
        "moe_router_enable_expert_bias": Implemented(only(True, _IN_LEARNER), REQUIRED),
        "router_dtype": Implemented(only("fp32", _IN_LEARNER), REQUIRED),
        "partial_rotary_factor": Implemented(FRACTION, REQUIRED),  # read with the rotary embedding
    },
    others={
        "norm_topk_prob": Neutral((True,), "weights of experts that do not add up to one; Megatron-Core's always do"),
        "use_bias": Neutral((False,), "biases that the learner does not add"),
        "use_qkv_bias": Neutral((False,), "biases that the learner does not add"),
        "norm_head": Neutral((False,), "a head whose columns vLLM divides by their norms"),
        "num_nextn_predict_layers": Neutral((0,), "layers for guesses of later tokens, which vLLM does not load here"),
        **{
            other: Neutral((), f"another name for {name}, which vLLM does not read")
            for other, name in (
                ("num_local_experts", "num_experts"),
                ("n_routed_experts", "num_experts"),
                ("n_shared_experts", "num_shared_experts"),
            )
        },
        "rotary_dim": Neutral((None,), "another name for the turned part of a head; use partial_rotary_factor"),
        "sliding_window": Neutral((None,), WINDOW),
        "embedding_dropout": WithoutEffect(FRACTION, "for training by other code"),
        "output_dropout": WithoutEffect(FRACTION, "for training by other code"),
        "mtp_loss_scaling_factor": WithoutEffect(ANYTHING, "for layers that are refused"),
    },
    features=_features,
    relate=_relate,
    register=_register,
    rotary_fraction=1.0,
    embedding=named(EMBEDDING, "model.word_embeddings.weight"),
    layer=(
        *packed_attention("query_key_value", "dense", ("query_layernorm", "key_layernorm")),
        *MOE_BLOCK,
        named(ROUTER_BIAS, "mlp.gate.expert_bias"),
        *shared_experts("shared_experts"),
    ),
    known={"inclusionAI/Ling-mini-2.0": _LING_MINI, "inclusionAI/Ring-mini-2.0": _LING_MINI},
)
