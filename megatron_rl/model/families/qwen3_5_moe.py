"""Qwen3.5 and Qwen3.6 with experts: as Qwen3-Next, with a projection for each part of a delta net.

The published models also read pictures. Their part that reads text is trained, and exported by itself.
"""

from __future__ import annotations

from typing import Any

from megatron_rl.model.families import qwen3_moe, qwen3_next
from megatron_rl.model.families.form import Family, Wrapper, shape
from megatron_rl.model.families.keys import ANYTHING, EXPERTS, TOKEN, Implemented, Neutral, WithoutEffect
from megatron_rl.model.families.weights import ATTENTION_AMONG_DELTA_NETS, delta_net

_PICTURES = WithoutEffect(ANYTHING, "for pictures, which are not trained on")
_LATER = WithoutEffect(ANYTHING, "for guesses of later tokens, which are neither loaded nor trained")


def _in_all_layers(values: dict[str, Any]) -> dict[str, Any]:
    every = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    return {**qwen3_moe.features(values | every), **qwen3_next.features(values)}


def _relate(config: dict[str, Any], values: dict[str, Any]) -> list[str]:
    values["intermediate_size"] = values["moe_intermediate_size"]  # of layers without experts: there are none
    return qwen3_next.relate(config, values)


FAMILY = Family(
    model_type="qwen3_5_moe_text",
    hf_class="Qwen3_5MoeForCausalLM",
    implemented={
        **{key: rule for key, rule in qwen3_next.IMPLEMENTED.items() if key != "intermediate_size"},
        "num_experts": Implemented(EXPERTS, 256),
        "num_experts_per_tok": Implemented(EXPERTS, 8),
    },
    others={
        **qwen3_next.OTHERS,
        "norm_topk_prob": Neutral((True,), "weights of experts that do not add up to one, which transformers' do"),
        "mlp_only_layers": Neutral(([], None), "layers without experts, which transformers does not have here"),
        "decoder_sparse_step": Neutral((1,), "layers without experts, which transformers does not have here"),
        "intermediate_size": WithoutEffect(ANYTHING, "of layers without experts, which there are not"),
        "mtp_num_hidden_layers": _LATER,
        "mtp_use_dedicated_embeddings": _LATER,
    },
    features=_in_all_layers,
    relate=_relate,
    layer_types=None,
    rope_idle=("mrope_section", "mrope_interleaved"),  # without pictures all three positions are the same
    rotary_fraction=0.25,
    layer=(
        *ATTENTION_AMONG_DELTA_NETS,
        *delta_net(
            "in_proj_qkv.weight in_proj_z.weight in_proj_b.weight in_proj_a.weight",
            "delta",
            lambda m, h: tuple((rows, h) for rows in (sum(m.sections[:3]), *m.sections[3:])),
        ),
        *qwen3_next.LAYER_BEHIND_MIXER,
    ),
    ignored=qwen3_next.IGNORED | {"model.visual.": "the part that reads pictures; neither loaded nor trained"},
    wrapper=Wrapper(
        model_type="qwen3_5_moe",
        hf_class="Qwen3_5MoeForConditionalGeneration",
        prefix="model.language_model.",
        others={
            "vision_config": _PICTURES,
            "image_token_id": WithoutEffect(TOKEN, "for pictures"),
            "video_token_id": WithoutEffect(TOKEN, "for pictures"),
            "vision_start_token_id": WithoutEffect(TOKEN, "for pictures"),
            "vision_end_token_id": WithoutEffect(TOKEN, "for pictures"),
            "language_model_only": _PICTURES,
        },
    ),
    known=dict.fromkeys(
        ("Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3.6-35B-A3B"), shape(*(40, 2048, 512, 16, 2, 248320, 262144, 1e7))
    ),
)
