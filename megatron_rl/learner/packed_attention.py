"""Which attention TransformerEngine takes for packed rows on this GPU: asked of it, not guessed.

Its fused attention (cuDNN) has packed rows on compute capability 9.0 and later, flash-attn from 8.0 on. Where neither
can run it falls back, without a word, to an attention that stores every score: [sequences, heads, longest, longest].
"""

from __future__ import annotations

from typing import Literal

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.errors import InputError

FLASH_ATTN = "flash-attn>=2.7.3,<2.8.4"  # what TransformerEngine 2.20 takes
CONTEXT_COMMUNICATION = "p2p"
"""Keys and values go round a ring of context-parallel ranks while attention to those that are here is computed."""
_SEQUENCES, _LENGTH = 4, 4096  # a row that stands for all: the choice depends on neither


def packed_attention(config: TransformerConfig) -> Literal["flash", "fused", "unfused"]:
    """What TransformerEngine selects in training for rows packed as the learner packs them."""
    from transformer_engine.pytorch.attention.dot_product_attention.utils import AttentionParams, get_attention_backend

    parameters = AttentionParams(
        qkv_dtype=config.params_dtype,
        qkv_layout="thd_thd_thd",
        batch_size=_SEQUENCES,
        num_heads=config.num_attention_heads // config.tensor_model_parallel_size,
        num_gqa_groups=config.num_query_groups // config.tensor_model_parallel_size,
        max_seqlen_q=_LENGTH,
        max_seqlen_kv=_LENGTH,
        num_tokens_q=_SEQUENCES * _LENGTH,
        num_tokens_kv=_SEQUENCES * _LENGTH,
        head_dim_qk=config.kv_channels,
        head_dim_v=config.kv_channels,
        attn_mask_type="padding_causal",
        window_size=(-1, 0),
        context_parallel=config.context_parallel_size > 1,
        cp_comm_type=CONTEXT_COMMUNICATION,
    )
    flash, _, fused, *_ = get_attention_backend(parameters)
    return "flash" if flash else "fused" if fused else "unfused"


def refuse_unfused_attention(config: TransformerConfig) -> None:
    """Raise `InputError` where TransformerEngine would store every score. fp32 is let through: it has no other, and
    none at all for parts of sequences."""
    if config.params_dtype == torch.float32 and config.context_parallel_size > 1:
        raise InputError(
            f"learner.parallel.context: {config.context_parallel_size} with learner.dtype fp32, for which "
            "TransformerEngine has no attention over parts of sequences; use bf16 or fp16, or uninstall "
            "transformer-engine for torch's attention"
        )
    if config.params_dtype == torch.float32 or packed_attention(config) != "unfused":
        return
    major, minor = torch.cuda.get_device_capability()
    raise InputError(
        f"TransformerEngine has no fused attention over packed sequences on this GPU (compute capability {major}."
        f"{minor}) and would store every attention score; install '{FLASH_ATTN}' (requirements.txt says how), or "
        "uninstall transformer-engine for torch's attention"
    )
