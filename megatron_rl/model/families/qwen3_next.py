"""Qwen3-Next: gated delta nets, and gated attention in every fourth layer; experts and a shared expert with a gate.

Its tensors of guesses of later tokens (`mtp.`) are neither loaded nor trained.
"""

from __future__ import annotations

from typing import Any

from megatron_rl.model.decoder import LinearAttention
from megatron_rl.model.families import qwen3_moe
from megatron_rl.model.families.form import Family, shape
from megatron_rl.model.families.keys import (
    EXPERTS,
    FRACTION,
    HEADS,
    IN_ALL,
    LAYER_NUMBERS,
    LAYERS,
    POSITIONS,
    WIDTH,
    WINDOW,
    YES_OR_NO,
    Implemented,
    Kind,
    Neutral,
    or_null,
    shown,
)
from megatron_rl.model.families.weights import (
    ATTENTION_AMONG_DELTA_NETS,
    MOE_BLOCK,
    SHARED_EXPERT_GATE,
    delta_net,
    shared_experts,
)

_KINDS = ("linear_attention", "full_attention")
_FOUR = Kind("4, the width of the published models", lambda value: type(value) is int and value == 4)
IMPLEMENTED = {
    **IN_ALL,
    "max_position_embeddings": Implemented(POSITIONS, 32768),
    "num_key_value_heads": Implemented(HEADS, 2),
    "head_dim": Implemented(HEADS, 256),
    "num_experts": Implemented(EXPERTS, 512),
    "num_experts_per_tok": Implemented(EXPERTS, 10),
    "moe_intermediate_size": Implemented(WIDTH, 512),
    "shared_expert_intermediate_size": Implemented(WIDTH, 512),
    "linear_num_key_heads": Implemented(HEADS, 16),
    "linear_num_value_heads": Implemented(HEADS, 32),
    "linear_key_head_dim": Implemented(WIDTH, 128),
    "linear_value_head_dim": Implemented(WIDTH, 128),
    "linear_conv_kernel_dim": Implemented(_FOUR, 4),
    "full_attention_interval": Implemented(LAYERS, 4),
    "partial_rotary_factor": Implemented(or_null(FRACTION), None),  # read with the rotary embedding
}
"""The keys of models of delta nets and attention."""
OTHERS = {
    "attn_output_gate": Neutral((True,), "attention without a gate on its output, which transformers always has"),
    "output_gate_type": Neutral(("silu", "swish"), "another gate behind a delta net than SiLU's"),
    "mamba_ssm_dtype": Neutral((None, "float32"), "states of delta nets in 16 bits in vLLM; the learner's are fp32"),
    "sliding_window": Neutral((None,), WINDOW),
    "layer_scale": Neutral((None, False), "layers whose outputs are scaled"),
}
IGNORED = {"mtp.": "layers for guesses of later tokens; neither loaded nor trained"}
LAYER_BEHIND_MIXER = (*MOE_BLOCK, *shared_experts("shared_expert"), SHARED_EXPERT_GATE)


def features(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of `Architecture` that these models have beside those of experts."""
    widths = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    return {
        "qk_layernorm": True,
        "shared_ffn_hidden_size": values["shared_expert_intermediate_size"],
        "shared_expert_gate": True,
        "linear": LinearAttention(*(values[f"linear_{width}"] for width in widths)),
        "linear_layers": tuple(kind == _KINDS[0] for kind in values["layer_types"]),
        "output_gate": True,
        "zero_centred_norms": True,
    }


def relate(config: dict[str, Any], values: dict[str, Any]) -> list[str]:
    """Which layers have delta nets: as `layer_types` says, else as `full_attention_interval` does."""
    problems, layers, interval = [], values["num_hidden_layers"], values["full_attention_interval"]
    in_turn = [_KINDS[(layer + 1) % interval == 0] for layer in range(layers)]
    types = config.get("layer_types")
    types = values["layer_types"] = in_turn if types is None else types
    if type(types) is not list or len(types) != layers or set(map(str, types)) != set(_KINDS):
        problems.append(
            f"layer_types: {shown(types)}; allowed: a list of {layers} × {' or '.join(_KINDS)}, each at least once"
        )
    elif "full_attention_interval" in config and types != in_turn:
        problems.append(f"full_attention_interval: {interval}, but layer_types says otherwise; allowed: one of the two")
    keys, of_values = values["linear_num_key_heads"], values["linear_num_value_heads"]
    if of_values % keys:
        problems.append(f"linear_num_key_heads: {keys} does not divide linear_num_value_heads {of_values}")
    return problems


def _known(longest: int) -> dict[str, Any]:
    return shape(*(48, 2048, 5120, 16, 2, 151936, longest, 1e7), norm_topk_prob=True)


FAMILY = Family(
    model_type="qwen3_next",
    hf_class="Qwen3NextForCausalLM",
    implemented={
        **IMPLEMENTED,
        "norm_topk_prob": Implemented(YES_OR_NO, True),
        "decoder_sparse_step": Implemented(LAYERS, 1),
        "mlp_only_layers": Implemented(or_null(LAYER_NUMBERS), None),
    },
    others=OTHERS,
    features=lambda values: {**qwen3_moe.features(values), **features(values)},
    relate=lambda config, values: qwen3_moe.relate(config, values) + relate(config, values),
    layer_types=None,
    rotary_fraction=0.25,
    layer=(
        *ATTENTION_AMONG_DELTA_NETS,
        *delta_net(
            "in_proj_qkvz.weight in_proj_ba.weight",
            "delta_by_head",
            lambda m, h: ((sum(m.sections[:4]), h), (sum(m.sections[4:]), h)),
        ),
        *LAYER_BEHIND_MIXER,
    ),
    ignored=IGNORED,
    known={
        "Qwen/Qwen3-Next-80B-A3B-Instruct": _known(262144),
        "Qwen/Qwen3-Next-80B-A3B-Thinking": _known(262144),
    },
)
