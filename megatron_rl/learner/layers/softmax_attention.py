"""PyTorch's attention, as all layers call it that compute without TransformerEngine."""

from __future__ import annotations

import torch
import torch.nn.functional as F

PACKS_IN_VAIN = "pack_vnni2 is only supported"


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """softmax(``scale`` · query · keyᵀ) · value, [B, H, S, D]; keys may have fewer heads, shared in groups."""

    def attention(*qkv: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        grouped = query.size(1) != key.size(1)
        return F.scaled_dot_product_attention(
            *qkv, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
        )

    try:
        return attention(query, key, value, mask=mask)
    except RuntimeError as error:
        # torch 2.13 packs long 16-bit rows for AMX where the processor has it, though ATEN_CPU_CAPABILITY asks for code
        # of other processors, which cannot. In fp32 it does not, at the cost of copies that `plan` does not count.
        if PACKS_IN_VAIN not in str(error):
            raise
    wide = mask.float() if mask is not None and mask.is_floating_point() else mask
    return attention(query.float(), key.float(), value.float(), mask=wide).to(query.dtype)
