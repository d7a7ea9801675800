"""Between packed rows [tokens, heads, width] and padded sequences [sequences, longest, heads, width]."""

from itertools import pairwise

import torch

Tensor = torch.Tensor


def convert_thd_to_bshd(tensor: Tensor, cu_seqlens: Tensor, b: int, max_seq_len: int) -> Tensor:
    """Padded with zeros; ``cu_seqlens`` [b + 1]."""
    padded = tensor.new_zeros(b, max_seq_len, *tensor.shape[1:])
    bounds = cu_seqlens.tolist()
    for row, (start, end) in zip(padded, pairwise(bounds), strict=True):
        row[: end - start] = tensor[start:end]
    return padded


def convert_bshd_to_thd(tensor: Tensor, cu_seqlens: Tensor, t: int) -> Tensor:
    """Packed; zeros behind the last sequence of ``t`` tokens."""
    packed = tensor.new_zeros(t, *tensor.shape[2:])
    bounds = cu_seqlens.tolist()
    for row, (start, end) in zip(tensor, pairwise(bounds), strict=True):
        packed[start:end] = row[: end - start]
    return packed
