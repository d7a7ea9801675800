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
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch.utils.checkpoint import checkpoint

from megatron_rl.learner.context import ContextShare
from megatron_rl.learner.layers.softmax_attention import attend

# Entries of a mask that are made at once: 64 MiB in fp32. Smaller ones are made once for all layers of a microbatch.
MASK_ENTRIES = 2**24


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
        place = np.empty_like(order)  # of each gathered key its place in the row
        place[order] = np.arange(len(order))
        self._order, self._place = (torch.from_numpy(x).to(device) for x in (order, place))
        self.padding: tuple[torch.Tensor, torch.Tensor] | None = None  # as `padding_indices` gives it, of the keys
        self._masks: dict[int | None, torch.Tensor] = {}
        self._positions = [share.positions(n) for n in lengths]

    def gather(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """``key`` and ``value`` [n, 1, G, D] → both side by side of the whole row, in its order, [N, G, 2·D]."""
        both = torch.cat([key, value], dim=-1).squeeze(1)
        both = gather_from_sequence_parallel_region(
            both, tensor_parallel_output_grad=True, group=parallel_state.get_context_parallel_group()
        )
        return _Permute.apply(both, self._order, self._place)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        number: int | None = None,
    ) -> torch.Tensor:
        """``query`` [S, H, Q, D], ``key`` and ``value`` [S, G, M, D] of all sequences, padded to the longest, or of
        sequence ``number`` → [S, H, Q, D]."""
        last_keys, longest = self._last_keys(number), key.size(2)
        num_sequences, width = last_keys.shape
        rows = max(1, MASK_ENTRIES // (num_sequences * longest))
        if rows >= width:
            if number not in self._masks:
                self._masks[number] = _mask(torch.from_numpy(last_keys).to(query.device), longest, query.dtype)
            return attend(query, key, value, scale, self._masks[number])
        found, on_device = [], torch.from_numpy(last_keys).to(query.device)
        for first in range(0, width, rows):
            block = slice(first, first + rows)
            seen = int(last_keys[:, block].max()) + 1
            inputs = (query[:, :, block], key[:, :, :seen], value[:, :, :seen], on_device[:, block], scale)
            found.append(checkpoint(_block, *inputs, use_reentrant=False, preserve_rng_state=False))
        return torch.cat(found, dim=2)

    def _last_keys(self, number: int | None) -> np.ndarray:
        """[S, Q]: the last key that each query sees. Padding sees one."""
        chosen = self._positions if number is None else [self._positions[number]]
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


def _mask(last_keys: torch.Tensor, num_keys: int, dtype: torch.dtype) -> torch.Tensor:
    """[S, 1, Q, M] to be added to scores."""
    hidden = torch.arange(num_keys, device=last_keys.device) > last_keys[:, None, :, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=last_keys.device).masked_fill_(hidden, float("-inf"))


def _block(query, key, value, last_keys, scale) -> torch.Tensor:
    return attend(query, key, value, scale, _mask(last_keys, key.size(2), query.dtype))
