"""Core attention that gives a token the same bits in training, in a prompt and in a step of generation.

Shapes: N packed tokens, S sequences, M longest sequence rounded up to whole blocks of keys, H heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.learner.layers.attention import PackedSequences, SDPACoreAttention, padding_indices, padding_pays
from megatron_rl.learner.layers.invariant import KEY_BLOCK, attention


class KeyValueCache:
    """Keys and values of the tokens that were seen, per layer, in the slot of each sequence."""

    def __init__(self, num_slots: int, num_tokens: int):
        self.num_slots, self.num_tokens = num_slots, _whole_blocks(num_tokens)
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def write(
        self, layer: int, slots: torch.Tensor, positions: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """``slots`` and ``positions`` [N] int64; ``key`` and ``value`` [N, H/groups, D]."""
        if layer not in self._layers:
            shape = (self.num_slots, self.num_tokens, *key.shape[1:])
            self._layers[layer] = (key.new_zeros(shape), value.new_zeros(shape))
        for stored, new in zip(self._layers[layer], (key, value)):
            stored[slots, positions] = new

    def read(self, layer: int, slots: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [len(slots), H/groups, M, D] of the first ``num_tokens``, rounded up to whole blocks."""
        end = _whole_blocks(num_tokens)
        key, value = (stored[slots, :end].transpose(1, 2) for stored in self._layers[layer])
        return key, value


@dataclass
class CachedPrompts(PackedSequences):
    """Packed whole prompts, whose keys and values go into the cache."""

    cache: KeyValueCache | None = None
    slots: torch.Tensor | None = None  # [N] int64, of each token
    positions: torch.Tensor | None = None  # [N] int64


@dataclass
class CachedStep(PackedSeqParams):
    """One further token of each of N sequences; ``max_seqlen_kv``: the longest of them, this token included."""

    cache: KeyValueCache | None = None
    slots: torch.Tensor | None = None  # [N] int64
    positions: torch.Tensor | None = None  # [N] int64


class ExactCoreAttention(SDPACoreAttention):
    """Drop-in for `DotProductAttention`: causal, block-wise, the same for a token whatever is computed beside it."""

    def __init__(self, config: TransformerConfig, layer_number: int, *args: Any, **kwargs: Any):
        super().__init__(config, layer_number, *args, **kwargs)
        self.layer_number = layer_number

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """``query`` [N, 1, H, D], ``key`` and ``value`` [N, 1, H/groups, D] → [N, 1, H·D]."""
        packed = packed_seq_params
        query, key, value = (x.squeeze(1) for x in (query, key, value))
        if isinstance(packed, (CachedPrompts, CachedStep)):
            packed.cache.write(self.layer_number, packed.slots, packed.positions, key, value)
        if isinstance(packed, CachedStep):
            keys, values = packed.cache.read(self.layer_number, packed.slots, packed.max_seqlen_kv)
            scale = self._scale(query)
            out = attention(query.unsqueeze(2), keys, values, packed.positions[:, None], scale).squeeze(2)
        else:
            out = torch.cat([self._attend_packed(*qkv) for qkv in self._parts(packed, query, key, value)])
        return out.flatten(1).unsqueeze(1)

    def _parts(self, packed: PackedSequences | None, *qkv: torch.Tensor) -> Any:
        """(lengths, q, k, v) of sequences that are attended to in one call."""
        lengths = list(packed.lengths) if packed is not None else [qkv[0].size(0)]
        if padding_pays(lengths):
            return [(lengths, *qkv)]
        return [([len(part[0])], *part) for part in zip(*(x.split(lengths) for x in qkv), strict=True)]

    def _attend_packed(
        self, lengths: list[int], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Sequences of ``lengths`` back to back, [N, H, D] → [N, H, D]."""
        pad, unpad = padding_indices(lengths, _whole_blocks(max(lengths)), query.device)
        padded = (x[pad].transpose(1, 2) for x in (query, key, value))  # [S, H, M, D]
        out = _Attend.apply(*padded, self._scale(query)).transpose(1, 2)
        return out.flatten(0, 1)[unpad]

    def _scale(self, query: torch.Tensor) -> float:
        return self.softmax_scale or query.size(-1) ** -0.5


class _Attend(torch.autograd.Function):
    """Invariant forward; the gradient is that of PyTorch's attention, the same function."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
        last_key = torch.arange(query.size(2), device=query.device).expand(query.size(0), -1)
        return attention(query, key, value, last_key, scale)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        qkv = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = F.scaled_dot_product_attention(
                *qkv, is_causal=True, scale=ctx.scale, enable_gqa=qkv[0].size(1) != qkv[1].size(1)
            )
        return (*torch.autograd.grad(out, qkv, grad), None)


def _whole_blocks(num_tokens: int) -> int:
    return -(-num_tokens // KEY_BLOCK) * KEY_BLOCK
