"""Core attention without TransformerEngine: PyTorch's scaled_dot_product_attention over packed sequences.

Megatron's own `DotProductAttention` materialises the [heads, tokens, tokens] scores and refuses packed sequences.
Here one microbatch is one row of ``N`` tokens that holds ``S`` sequences back to back. Sequences of one length are
attended to together as they lie. Sequences of several lengths are padded to the longest, or go one by one where padding
costs more than it saves.
The result is the same function in every case: a causal mask never lets a token see what follows it.

Shapes: N packed tokens, S sequences, M longest sequence, H heads, D head width; GQA groups are expanded by SDPA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.learner.context import WHOLE, ContextShare
from megatron_rl.learner.layers.context_attention import ContextKeys
from megatron_rl.learner.layers.softmax_attention import attend

# All sequences go in one padded call while the padded score matrix has at most this many times the entries of the real
# ones: one call saves about 50 µs of dispatch a sequence, and an entry costs a fraction of a nanosecond.
_MAX_PADDED_WORK = 4.0


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's packed-sequence parameters plus the index that pads and unpads.

    ``qkv_format`` stays off "thd" on purpose: Megatron then treats the row as one sequence of N positions, which is
    what `PackedRotaryEmbedding` expects, and applies rotary embeddings in one call instead of one per sequence.
    """

    lengths: tuple[int, ...] = ()
    pad_index: torch.Tensor | None = None  # [S, M], see `padding_indices`
    unpad_index: torch.Tensor | None = None  # [N]
    keys: ContextKeys | None = None  # where the row is cut over context-parallel ranks; the indices are then of queries

    @classmethod
    def from_lengths(
        cls, lengths: list[int], device: torch.device, thd: bool = False, share: ContextShare = WHOLE
    ) -> PackedSequences:
        """Parameters for sequences of these lengths (≥ 1), in this order. ``share``: the part of each that is here;
        lengths are those of the whole sequences, of whole chunks.

        ``thd``: for TransformerEngine's attention and Megatron's own rotary embedding, which tell sequences apart by
        their offsets alone; with "sbhd" they would take the row for one sequence and attend across its parts.
        """
        if thd:
            offsets = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
            longest = max(lengths)
            return cls("thd", offsets, offsets, max_seqlen_q=longest, max_seqlen_kv=longest, lengths=tuple(lengths))
        params = cls(qkv_format="sbhd", max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths), lengths=tuple(lengths))
        if share.size > 1:
            params.keys = ContextKeys(lengths, share, device)
            lengths = params.keys.own
        if len(set(lengths)) > 1 and padding_pays(lengths):
            params.pad_index, params.unpad_index = padding_indices(lengths, max(lengths), device)
            if params.keys is not None:
                whole = params.keys.lengths
                params.keys.padding = padding_indices(whole, max(whole), device)
        return params


def padding_pays(lengths: Sequence[int]) -> bool:
    """Whether sequences of these lengths are better attended to in one padded call than one by one."""
    return len(lengths) * max(lengths) ** 2 <= _MAX_PADDED_WORK * sum(n * n for n in lengths)


def padding_indices(lengths: Sequence[int], width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """[S, width] int64 into N, whose padding repeats the sequence's first token, and its inverse [N] into S·width."""
    size = torch.tensor(lengths)
    start = torch.cumsum(size, 0) - size
    column = torch.arange(width)
    valid = column < size[:, None]
    pad = torch.where(valid, start[:, None] + column, start[:, None])
    return pad.to(device), valid.flatten().nonzero().flatten().to(device)


class SDPACoreAttention(MegatronModule):
    """Drop-in for `DotProductAttention` in a layer spec. Causal self-attention, no dropout."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: object | None = None,
    ):
        super().__init__(config=config)
        assert attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal), attn_mask_type
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> torch.Tensor:
        """``query`` [N, b, H, D], ``key`` and ``value`` [N, b, H/groups, D] → [N, b, H·D]."""
        if packed_seq_params is not None and packed_seq_params.keys is not None:
            return self._attend_chunks(query, key, value, packed_seq_params)
        if packed_seq_params is None or len(packed_seq_params.lengths) == 1:
            return self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value))).permute(2, 0, 1, 3).flatten(2)
        assert query.size(1) == 1, "packed sequences are one row"
        if packed_seq_params.pad_index is None and len(set(packed_seq_params.lengths)) == 1:
            whole = (x.unflatten(0, (-1, packed_seq_params.max_seqlen_q)).squeeze(2) for x in (query, key, value))
            out = self._attend(*(x.transpose(1, 2) for x in whole)).transpose(1, 2)
            return out.flatten(0, 1).flatten(1).unsqueeze(1)
        if packed_seq_params.pad_index is not None:
            index = (packed_seq_params.pad_index, packed_seq_params.unpad_index)
            padded = (_Pad.apply(x.squeeze(1), *index).transpose(1, 2) for x in (query, key, value))  # [S, H, M, D]
            out = _Unpad.apply(self._attend(*padded).transpose(1, 2), *index)
            return out.flatten(1).unsqueeze(1)
        pieces = [
            self._attend(*(x.permute(1, 2, 0, 3) for x in qkv)).permute(2, 0, 1, 3)
            for qkv in zip(*(x.split(packed_seq_params.lengths) for x in (query, key, value)), strict=True)
        ]
        return torch.cat(pieces).flatten(2)

    def _attend_chunks(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSequences
    ) -> torch.Tensor:
        """As `forward` for this rank's chunks of every sequence, whose keys lie on all context-parallel ranks."""
        keys, width = packed.keys, query.size(-1)
        both, query = keys.gather(key, value), query.squeeze(1)
        if packed.pad_index is None and len(set(keys.lengths)) > 1:
            found = []
            for i, parts in enumerate(zip(query.split(keys.own), both.split(keys.lengths), strict=True)):
                q, kv = (x.transpose(0, 1).unsqueeze(0) for x in parts)
                out = keys.attend(q, *kv.split(width, dim=-1), self.softmax_scale, i)
                found.append(out.squeeze(0).transpose(0, 1))
            return torch.cat(found).flatten(1).unsqueeze(1)
        if packed.pad_index is None:
            q, kv = (x.unflatten(0, (len(keys.lengths), -1)).transpose(1, 2) for x in (query, both))
        else:
            q = _Pad.apply(query, packed.pad_index, packed.unpad_index).transpose(1, 2)
            kv = _Pad.apply(both, *keys.padding).transpose(1, 2)
        out = keys.attend(q, *kv.split(width, dim=-1), self.softmax_scale).transpose(1, 2)
        if packed.pad_index is None:
            return out.flatten(0, 1).flatten(1).unsqueeze(1)
        return _Unpad.apply(out, packed.pad_index, packed.unpad_index).flatten(1).unsqueeze(1)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend(query, key, value, self.softmax_scale, is_causal=True)


class _Pad(torch.autograd.Function):
    """[N, …] → [S, M, …]. A causal mask hides padding from real tokens, so padding has no gradient."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, pad_index: torch.Tensor, unpad_index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(unpad_index)
        return x.index_select(0, pad_index.flatten()).unflatten(0, pad_index.shape)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad.flatten(0, 1).index_select(0, ctx.saved_tensors[0]), None, None


class _Unpad(torch.autograd.Function):
    """[S, M, …] → [N, …], the adjoint of a padding with zeros."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, pad_index: torch.Tensor, unpad_index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(unpad_index)
        ctx.padded = x.shape
        return x.flatten(0, 1).index_select(0, unpad_index)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        padded = grad.new_zeros(ctx.padded)
        padded.view(-1, *grad.shape[1:]).index_copy_(0, ctx.saved_tensors[0], grad)
        return padded, None, None


class PackedRotaryEmbedding(torch.nn.Module):
    """Wraps Megatron's `RotaryEmbedding`: angles by each token's position in its own sequence.

    The learner sets ``position_ids`` [N] before every forward pass, because Megatron's model asks its rotary module
    for angles by total length alone.
    """

    def __init__(self, rotary: torch.nn.Module):
        super().__init__()
        self.rotary = rotary
        self.position_ids: torch.Tensor | None = None

    def get_rotary_seq_len(self, *args: object, **kwargs: object) -> int:
        return self.rotary.get_rotary_seq_len(*args, **kwargs)

    def forward(self, max_seq_len: int, **kwargs: object) -> torch.Tensor:
        # Not this rank's two ends of one long sequence, which Megatron would cut out under context parallelism.
        angles = self.rotary(max_seq_len, packed_seq=True)  # [M, 1, 1, D]
        return angles if self.position_ids is None else angles[self.position_ids]
