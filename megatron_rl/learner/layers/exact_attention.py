"""Core attention that gives a token the same bits in training, in a prompt and in a step of generation.

Shapes: N packed tokens, S sequences, M longest sequence rounded up to whole blocks of keys, H heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.learner.layers.attention import PackedSequences, SDPACoreAttention, padding_indices, padding_pays
from megatron_rl.learner.layers.invariant import KEY_BLOCK, attention, kernel_ops, on_kernels, step_attention
from megatron_rl.learner.layers.softmax_attention import attend


class PagedCache:
    """Keys and values of the tokens that were seen, per layer, in pages of `KEY_BLOCK` tokens.

    Whoever writes says in which page; sequences may share the pages of a common prompt. Page 0 is for rows of padding.
    What was never written is zero: attention multiplies what its mask hides by zero, and so it must be finite.
    """

    SCRATCH = 0

    def __init__(
        self, num_pages: int, num_layers: int, kv_heads: int, width: int, like: torch.Tensor, first_layer: int = 0
    ):
        """``like``: has the device and the dtype of keys and values. ``first_layer``: of this pipeline stage."""
        self._first_layer = first_layer
        shape = (num_pages, kv_heads, KEY_BLOCK, width)
        self.num_pages = num_pages
        self._layers = [(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(num_layers)]

    @staticmethod
    def page_bytes(num_layers: int, kv_heads: int, width: int, element: int) -> int:
        """Of one page in all layers; ``element``: bytes of a number."""
        return 2 * num_layers * kv_heads * KEY_BLOCK * width * element

    def write(
        self, layer: int, pages: torch.Tensor, offsets: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """``pages`` and ``offsets`` [N] int64, where each token goes; ``key`` and ``value`` [N, H/groups, D]."""
        for stored, new in zip(self._layers[layer - self._first_layer], (key, value)):
            stored[pages, :, offsets] = new

    def whole(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [pages, H/groups, `KEY_BLOCK`, D]."""
        return self._layers[layer - self._first_layer]

    def read(self, layer: int, tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [n, P, H/groups, `KEY_BLOCK`, D] of the pages ``tables`` [n, P] int64."""
        key, value = self._layers[layer - self._first_layer]
        return key[tables], value[tables]

    def copy(self, source: list[int], target: list[int]) -> None:
        """Pages to pages, in all layers."""
        for stored in (part for pair in self._layers for part in pair):
            stored[target] = stored[source]


@dataclass
class CachedPrompts(PackedSequences):
    """Packed whole prompts, whose keys and values go into the cache."""

    cache: PagedCache | None = None
    pages: torch.Tensor | None = None  # [N] int64, of each token
    offsets: torch.Tensor | None = None  # [N] int64


@dataclass
class CachedStep(PackedSeqParams):
    """One further token of each of N sequences."""

    cache: PagedCache | None = None
    tables: torch.Tensor | None = None  # [N, P] int64, pages of each sequence from its first token on
    positions: torch.Tensor | None = None  # [N] int64
    pages: torch.Tensor | None = None  # [N] int64, where its key and value go
    offsets: torch.Tensor | None = None  # [N] int64

    @classmethod
    def of(cls, cache: PagedCache, tables: torch.Tensor, positions: torch.Tensor) -> CachedStep:
        longest = tables.size(1) * KEY_BLOCK  # a bound that the host knows: what Megatron makes rotary angles for
        step = cls("sbhd", max_seqlen_q=longest, max_seqlen_kv=longest, cache=cache, tables=tables, positions=positions)
        step.pages = tables.gather(1, (positions // KEY_BLOCK)[:, None]).squeeze(1)
        step.offsets = positions % KEY_BLOCK
        return step

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Put ``key`` and ``value`` [N, H/groups, D] into the cache, and attend to those of all tokens there: ``query``
        [N, H, D] → [N, H, D]."""
        self.cache.write(layer, self.pages, self.offsets, key, value)
        if on_kernels(query):
            return kernel_ops().paged_attention(query, *self.cache.whole(layer), self.tables, self.positions, scale)
        return step_attention(query, *self.cache.read(layer, self.tables), self.positions, scale)


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
        layer = self.layer_number - 1
        if isinstance(packed, CachedStep):
            out = packed.attend(layer, query, key, value, self._scale(query))
        else:
            if isinstance(packed, CachedPrompts):
                packed.cache.write(layer, packed.pages, packed.offsets, key, value)
            if on_kernels(query):
                lengths = list(packed.lengths) if packed is not None else [len(query)]
                out = kernel_ops().packed_attention(query, key, value, lengths, self._scale(query))
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
            out = attend(*qkv, ctx.scale, is_causal=True)
        return (*torch.autograd.grad(out, qkv, grad), None)


def _whole_blocks(num_tokens: int) -> int:
    return -(-num_tokens // KEY_BLOCK) * KEY_BLOCK
