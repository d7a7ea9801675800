"""Qwen3 with experts (Qwen3-30B-A3B): as Qwen3, and experts chosen by a softmax over all of them."""

from __future__ import annotations

from functools import partial
from typing import Any

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
    shown,
)
from megatron_rl.model.families.weights import MOE_LAYER

_EXPERTS = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
_30B = partial(shape, 48, 2048, 6144, 32, 4, 151936, **_EXPERTS, moe_intermediate_size=768)


def sparse_layers(values: dict[str, Any]) -> tuple[bool, ...]:
    """Which layers have experts, as `decoder_sparse_step` and `mlp_only_layers` say."""
    step, dense = values["decoder_sparse_step"], set(values["mlp_only_layers"])
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(values["num_hidden_layers"]))


def features(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of `Architecture` that say what experts there are."""
    return {
        "num_experts": values["num_experts"],
        "experts_per_token": values["num_experts_per_tok"],
        "moe_ffn_hidden_size": values["moe_intermediate_size"],
        "norm_topk_prob": values["norm_topk_prob"],
        "moe_layers": sparse_layers(values),
    }


def relate(config: dict[str, Any], values: dict[str, Any]) -> list[str]:
    """What the keys of experts say together; `num_local_experts` is another name of `num_experts`."""
    problems, layers = [], values["num_hidden_layers"]
    other = values.pop("num_local_experts", None)
    if other is not None:
        if "num_experts" in config and config["num_experts"] != other:
            problems.append(
                f"num_experts: {config['num_experts']}, but num_local_experts is {other}; allowed: one number"
            )
        values["num_experts"] = other
    dense = values["mlp_only_layers"] = values["mlp_only_layers"] or []
    if any(layer >= layers for layer in dense):
        problems.append(f"mlp_only_layers: {shown(dense)}; allowed: {LAYER_NUMBERS.words} ({layers - 1})")
    return problems


FAMILY = Family(
    model_type="qwen3_moe",
    hf_class="Qwen3MoeForCausalLM",
    implemented={
        **IN_ALL,
        "max_position_embeddings": Implemented(POSITIONS, 32768),
        "num_key_value_heads": Implemented(HEADS, 4),
        "head_dim": Implemented(HEADS, None),  # absent: hidden_size / num_attention_heads
        "num_experts": Implemented(EXPERTS, 128),
        "num_local_experts": Implemented(EXPERTS, None),  # another name for num_experts
        "num_experts_per_tok": Implemented(EXPERTS, 8),
        "moe_intermediate_size": Implemented(WIDTH, 768),
        "norm_topk_prob": Implemented(YES_OR_NO, False),
        "decoder_sparse_step": Implemented(LAYERS, 1),
        "mlp_only_layers": Implemented(or_null(LAYER_NUMBERS), None),
    },
    others={"sliding_window": UNUSED_WINDOW, "qk_norm": Neutral((True, False), "")},
    features=lambda values: {"qk_layernorm": True, **features(values)},
    relate=relate,
    layer=MOE_LAYER,
    known={
        "Qwen/Qwen3-30B-A3B": _30B(40960, 1e6),
        "Qwen/Qwen3-30B-A3B-Base": _30B(32768, 1e6),
        "Qwen/Qwen3-30B-A3B-Thinking-2507": _30B(262144, 1e7),
        "Qwen/Qwen3-30B-A3B-Instruct-2507": _30B(262144, 1e7),
        "Qwen/Qwen3-235B-A22B": shape(
            *(94, 4096, 12288, 64, 4, 151936, 40960, 1e6), **_EXPERTS, moe_intermediate_size=1536
        ),
    },
)
