"""Classes of families that transformers, and with it vLLM, has none of: Ling 2.0 and Ring 2.0.

`register` adds them, so that no code of a checkpoint runs. The model computes with transformers' modules of GLM-4.5,
which is the same function; weights and keys have the names of the published checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Glm4MoeForCausalLM, PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, ConversionOps, WeightConverter, WeightRenaming


class BailingMoeConfig(PreTrainedConfig):
    """config.json of Ling-mini-2.0, whose values are the defaults."""

    model_type = "bailing_moe"
    attribute_map = {  # what GLM-4.5's modules read: what the file has
        "num_local_experts": "num_experts",
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "attention_bias": "use_qkv_bias",
    }

    vocab_size: int = 157184
    hidden_size: int = 2048
    intermediate_size: int = 5120
    num_hidden_layers: int = 20
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    head_dim: int = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    tie_word_embeddings: bool = False
    rope_parameters: dict | None = None
    partial_rotary_factor: float = 0.5
    use_bias: bool = False
    use_qkv_bias: bool = False
    use_qk_norm: bool = True
    use_rmsnorm: bool = True
    norm_head: bool = False
    attention_dropout: float = 0.0
    embedding_dropout: float = 0.0
    output_dropout: float = 0.0
    num_experts: int = 256
    num_shared_experts: int = 1
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 512
    first_k_dense_replace: int = 1
    norm_topk_prob: bool = True
    n_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = 2.5
    score_function: str = "sigmoid"
    router_dtype: str | None = "fp32"
    moe_router_enable_expert_bias: bool = True
    output_router_logits: bool = False
    num_nextn_predict_layers: int = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None


class BailingMoeV2ForCausalLM(Glm4MoeForCausalLM):
    """GLM-4.5's modules with Ling's weights."""

    config_class = BailingMoeConfig


class _SplitQKV(ConversionOps):
    """One tensor of all queries, keys and values → three."""

    def convert(self, input_dict: dict[str, Any], source_patterns: Any, target_patterns: list[str], **more: Any) -> Any:
        (packed,) = input_dict.values()
        packed, config = packed[0] if isinstance(packed, list) else packed, more["config"]
        keys = config.num_key_value_heads * config.head_dim
        parts = packed.split((config.num_attention_heads * config.head_dim, keys, keys))
        return dict(zip(target_patterns, map(torch.Tensor.contiguous, parts), strict=True))

    @property
    def reverse_op(self) -> ConversionOps:
        return Concatenate(dim=0)


_RENAMED = {
    "word_embeddings": "embed_tokens",
    "attention.dense": "self_attn.o_proj",
    "attention.query_layernorm": "self_attn.q_norm",
    "attention.key_layernorm": "self_attn.k_norm",
    "mlp.gate.expert_bias": "mlp.gate.e_score_correction_bias",
}


def register() -> None:
    """Make transformers and vLLM know the classes of this module. A second call changes nothing."""
    name = BailingMoeConfig.model_type
    AutoConfig.register(name, BailingMoeConfig, exist_ok=True)
    AutoModelForCausalLM.register(BailingMoeConfig, BailingMoeV2ForCausalLM, exist_ok=True)
    qkv = WeightConverter(
        "attention.query_key_value.weight",
        [f"self_attn.{part}_proj.weight" for part in "qkv"],
        operations=[_SplitQKV()],
    )
    renamed = [WeightRenaming(ours, theirs) for ours, theirs in _RENAMED.items()]
    mapping = [*renamed, qkv, *get_checkpoint_conversion_mapping("qwen2_moe")]
    register_checkpoint_conversion_mapping(name, mapping, overwrite=True)
