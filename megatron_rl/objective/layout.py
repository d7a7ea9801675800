"""Where sequences lie among tokens: reductions over sequences and back, alike for padded rows and packed tokens.

Shapes: ``B`` sequences, ``T`` padded length, ``N`` packed tokens; "tokens" is [B, T] when padded and [N] when packed.
No operation waits for the device, and none uses atomics: equal inputs give equal bits.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Layout(Protocol):
    num_sequences: int

    def sum(self, values: Tensor) -> Tensor:
        """tokens → [B]: sum over each sequence; differentiable."""

    def max(self, values: Tensor) -> Tensor:
        """tokens → [B]: largest value of each sequence; not differentiable. Values must be >= 0."""

    def expand(self, per_sequence: Tensor) -> Tensor:
        """[B] → tokens: each token gets its sequence's value; differentiable where floating point."""

    def rank(self, mask: Tensor) -> Tensor:
        """bool tokens → int64 tokens: how many masked-in tokens of the same sequence come before this one."""


class Padded:
    """One sequence per row of [B, T]."""

    def __init__(self, mask: Tensor):
        self.num_sequences, self._width = mask.shape

    def sum(self, values: Tensor) -> Tensor:
        return values.sum(dim=-1)

    def max(self, values: Tensor) -> Tensor:
        return values.amax(dim=-1) if self._width else values.new_zeros(self.num_sequences)

    def expand(self, per_sequence: Tensor) -> Tensor:
        return per_sequence[:, None].expand(-1, self._width)

    def rank(self, mask: Tensor) -> Tensor:
        counted = mask.to(torch.int64)
        return counted.cumsum(dim=-1) - counted


class Packed:
    """Sequences one after another in [N]; sequence i holds tokens cu_seqlens[i] to cu_seqlens[i + 1] - 1.

    Tokens beyond the last offset (padding of the pack) belong to no sequence and must be masked out.
    """

    def __init__(self, mask: Tensor, cu_seqlens: Tensor):
        self.num_sequences = cu_seqlens.numel() - 1
        self._offsets = cu_seqlens.to(device=mask.device, dtype=torch.int64)
        tail = mask.numel() - self._offsets[-1:]
        owners = torch.arange(self.num_sequences + 1, device=mask.device).clamp_(max=max(self.num_sequences - 1, 0))
        counts = torch.cat([self._offsets.diff(), tail])
        # The size is known here; left out, it would be read back from the device.
        self._sequence = owners.repeat_interleave(counts, output_size=mask.numel())

    def sum(self, values: Tensor) -> Tensor:
        return _SegmentSum.apply(values, self._offsets, self._sequence)

    def max(self, values: Tensor) -> Tensor:
        return torch.segment_reduce(values.detach(), "max", offsets=self._offsets, initial=0.0, unsafe=True)

    def expand(self, per_sequence: Tensor) -> Tensor:
        return _SegmentExpand.apply(per_sequence, self._offsets, self._sequence)

    def rank(self, mask: Tensor) -> Tensor:
        counted = mask.to(torch.int64)
        before = counted.cumsum(dim=0) - counted
        starts = torch.cat([before, before.new_zeros(1)]).index_select(0, self._offsets[:-1])
        return before - starts.index_select(0, self._sequence)


class _SegmentSum(torch.autograd.Function):
    """tokens [N] → [B]. Written out because index_add adds in any order on a GPU."""

    @staticmethod
    def forward(ctx, values, offsets, sequence):
        ctx.save_for_backward(sequence)
        return torch.segment_reduce(values, "sum", offsets=offsets, initial=0.0, unsafe=True)

    @staticmethod
    def backward(ctx, grad):
        (sequence,) = ctx.saved_tensors
        return grad.index_select(0, sequence), None, None


class _SegmentExpand(torch.autograd.Function):
    """[B] → tokens [N]; its gradient is the sum over each sequence."""

    @staticmethod
    def forward(ctx, per_sequence, offsets, sequence):
        ctx.save_for_backward(offsets)
        return per_sequence.index_select(0, sequence)

    @staticmethod
    def backward(ctx, grad):
        (offsets,) = ctx.saved_tensors
        summed = torch.segment_reduce(grad.contiguous(), "sum", offsets=offsets, initial=0.0, unsafe=True)
        return summed, None, None
