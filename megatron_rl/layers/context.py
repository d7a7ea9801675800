"""Context parallelism: which tokens of a packed row a rank has (`ContextShare`).

`gather_tokens` brings their log-probs together again. Every sequence is cut into 2·size chunks of one length, and rank
r has chunks r and 2·size - 1 - r, as Megatron-Core and TransformerEngine have it: under a causal mask an early chunk
and a late one together cost the same on every rank.

Shapes: N packed tokens of a whole row, n = N / size of them on this rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state


@dataclass(frozen=True)
class ContextShare:
    """One rank's place among the ``size`` ranks that a row is cut over. Size 1: the whole row, and no padding."""

    size: int = 1
    rank: int = 0

    @classmethod
    def of_this_rank(cls) -> ContextShare:
        return cls(parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank())

    @property
    def multiple(self) -> int:
        """What the length of every sequence is a multiple of, with its padding."""
        return 1 if self.size == 1 else 2 * self.size

    def padded(self, length: int) -> int:
        """Return ``length`` with the padding that makes whole chunks."""
        return -(-length // self.multiple) * self.multiple

    def row_multiple(self, tensor: int) -> int:
        """What a whole row's length is a multiple of, so that ``tensor`` ranks can share this rank's part of it."""
        return math.lcm(self.multiple, self.size * tensor)

    def chunks(self, padded: int) -> list[tuple[int, int]]:
        """(start, stop) of what this rank has of a sequence of ``padded`` tokens, in order."""
        if self.size == 1:
            return [(0, padded)]
        length = padded // self.multiple
        return [(j * length, (j + 1) * length) for j in (self.rank, 2 * self.size - 1 - self.rank)]

    def ranges(self, padded: Sequence[int]) -> list[tuple[int, int]]:
        """(start, stop) of what this rank has of a row of such sequences, in order."""
        starts = np.cumsum([0, *padded]).tolist()
        return [(start + a, start + b) for start, n in zip(starts, padded) for a, b in self.chunks(n)]

    def positions(self, padded: int) -> np.ndarray:
        """[n] positions in its sequence of each token that this rank has of it."""
        return np.concatenate([np.arange(a, b) for a, b in self.chunks(padded)])


WHOLE_ROW = ContextShare()


def cut_ranges(ranges: Sequence[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Rows ``start`` to ``stop`` - 1 of those that ``ranges`` name one after another, as ranges."""
    chunks, before = [], 0
    for a, b in ranges:
        first, last = max(start - before, 0), min(stop - before, b - a)
        if first < last:
            chunks.append((a + first, a + last))
        before += b - a
    return chunks


def gather_tokens(own: torch.Tensor, places: torch.Tensor, total: int) -> torch.Tensor:
    """Values of all context-parallel ranks' tokens, on each: [..., total] of ``own`` [..., m] at ``places`` [m].

    The gradient of a value goes to the rank that computed it, once: every rank has the same loss of all values, and
    the sum over the ranks of what each makes of its own is the gradient of that loss. Collective.
    """
    return _Gathered.apply(own, places, total)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own: torch.Tensor, places: torch.Tensor, total: int) -> torch.Tensor:
        ctx.save_for_backward(places)
        whole = own.new_zeros(*own.shape[:-1], total)
        whole[..., places] = own
        dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())  # each place has one summand
        return whole

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad[..., ctx.saved_tensors[0]], None, None
