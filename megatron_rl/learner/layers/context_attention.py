"""Causal attention of a rank's chunks over whole sequences: keys and values of all context-parallel ranks, gathered.

The ranks exchange keys and values once a layer, in one collective, and their gradients in another; queries stay. Where
scores of one call would not fit, queries go in blocks, whose scores the backward pass computes again.

Shapes: N packed tokens of a whole row, n = N / size of them on this rank, S sequences, M longest of them, Q = M / size
queries of it here, H heads, G key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch.utils.checkpoint import checkpoint

from megatron_rl.learner.context import ContextShare

# Entries of a mask that are made at once: with fp32 scores of one head 128 MiB.
MASK_ENTRIES = 2**25


class ContextKeys:
    """Of one packed row: where each sequence's keys lie among the gathered ones, and which of them a query sees.

    ``lengths``: of the whole sequences, with padding to whole chunks.
    """

    def __init__(self, lengths: Sequence[int], share: ContextShare, device: torch.device):
        self.lengths, self.share = list(lengths), share
        self.own = [n // share.size for n in lengths]  # queries of each sequence
        num_own = sum(self.own)
        order = np.empty(sum(lengths), dtype=np.int64)  # of each key its place among the gathered
        for rank in range(share.size):
            ranges = ContextShare(share.size, rank).ranges(lengths)
            rows = np.concatenate([np.arange(a, b) for a, b in ranges])
            order[rows] = np.arange(num_own) + rank * num_own
        self._order = torch.from_numpy(order).to(device)
        self._place = torch.empty_like(self._order)  # of each gathered key its place in the row
        self._place[self._order] = torch.arange(len(order), device=device)
        self.padding: tuple[torch.Tensor, torch.Tensor] | None = None  # as `padding_indices` gives it, of the keys
        self._positions = [share.positions(n) for n in lengths]

    def gather(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """``key`` and ``value`` [n, 1, G, D] → both side by side of the whole row, in its order, [N, G, 2·D]."""
        both = torch.cat([key, value], dim=-1).squeeze(1)
        both = gather_from_sequence_parallel_region(
            both, tensor_parallel_output_grad=True, group=parallel_state.get_context_parallel_group()
        )
        return _Permute.apply(both, self._order, self._place)

    def positions(self, first: int = 0, last: int | None = None) -> np.ndarray:
        """[S, Q] of the sequences ``first`` to ``last`` - 1: the last key that each query sees. Padding sees one."""
        chosen = self._positions[first:last]
        found = np.zeros((len(chosen), max(len(p) for p in chosen)), dtype=np.int64)
        for row, positions in zip(found, chosen):
            row[: len(positions)] = positions
        return found


class _Permute(torch.autograd.Function):
    """Rows in another order; ``back`` undoes it."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, last_keys: np.ndarray, scale: float | None
) -> torch.Tensor:
    """``query`` [S, H, Q, D], ``key`` and ``value`` [S, G, M, D] → [S, H, Q, D]; query (s, q) sees the keys 0 …
    ``last_keys[s, q]``."""
    num_sequences, width = last_keys.shape
    rows = max(1, MASK_ENTRIES // (num_sequences * key.size(2)))
    on_device = torch.from_numpy(last_keys).to(query.device)
    if rows >= width:
        return _block(query, key, value, on_device, scale)
    found = []
    for first in range(0, width, rows):
        block = slice(first, first + rows)
        seen = int(last_keys[:, block].max()) + 1
        inputs = (query[:, :, block], key[:, :, :seen], value[:, :, :seen], on_device[:, block], scale)
        found.append(checkpoint(_block, *inputs, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(found, dim=2)


def _block(query, key, value, last_keys, scale) -> torch.Tensor:
    mask = torch.arange(key.size(2), device=key.device) <= last_keys[:, None, :, None]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=query.size(1) != key.size(1)
    )
