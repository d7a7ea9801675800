"""Exact mode's Triton kernels with the gradients of the plain functions: what `invariant` calls where it uses kernels.

Every function is that of PyTorch whose place it takes; forward is a kernel of `learner.layers.kernels`, backward is
PyTorch's. Importing this imports Triton.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from megatron_rl.learner.layers.kernels import attention as attention_kernels
from megatron_rl.learner.layers.kernels import gemm, rows

Tensor = torch.Tensor


class _Product(torch.autograd.Function):
    """x [N, K] · weight [M, K]ᵀ."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return gemm.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, K] · weight [M, K]ᵀ → [N, M]."""
    return _Product.apply(x.contiguous(), weight if weight.stride(1) == 1 else weight.contiguous())


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return rows.rms_norm(x.reshape(-1, x.size(-1)), weight, eps).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            out = torch.rms_norm(x, weight.shape, weight, ctx.eps)
        return (*torch.autograd.grad(out, (x, weight), grad), None)


def rms_norm(x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """As `torch.nn.functional.rms_norm`, over the last dimension, with a weight."""
    if weight is None or weight.dim() != 1 or tuple(normalized_shape) != weight.shape:
        raise NotImplementedError(f"batch-invariant norm over {tuple(normalized_shape)} of {tuple(x.shape)}")
    return _Norm.apply(x, weight, torch.finfo(x.dtype).eps if eps is None else eps)


def row_sums(x: Tensor) -> Tensor:
    """[N, V] fp32 → [N]: from the first column on, without gradient."""
    return rows.row_sums(x)


@functools.lru_cache(maxsize=2)
def _layout(lengths: tuple[int, ...], groups: int, device: torch.device) -> tuple[Tensor, ...]:
    """Of a packed row, for all layers: tiles of queries; of each token its sequence and place; first tokens."""
    sizes = torch.tensor(lengths)
    starts = sizes.cumsum(0) - sizes
    sequences = torch.arange(len(lengths)).repeat_interleave(sizes)
    positions = torch.arange(len(sequences)) - starts[sequences]
    tiles = attention_kernels.query_tiles(list(lengths), groups, device)
    return tiles, *(x.to(device) for x in (sequences, positions, starts))


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.lengths, ctx.scale = lengths, scale
        query, key, value = (x.contiguous() for x in (query, key, value))
        layout = _layout(tuple(lengths), query.size(1) // key.size(1), query.device)
        return attention_kernels.packed_attention(query, key, value, *layout, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = []
        parts = (tensor.split(ctx.lengths) for tensor in (*ctx.saved_tensors, grad))
        for *qkv, grad_out in zip(*parts, strict=True):
            leaves = [x.detach().transpose(0, 1)[None].requires_grad_() for x in qkv]
            with torch.enable_grad():
                grouped = leaves[0].size(1) != leaves[1].size(1)
                out = F.scaled_dot_product_attention(*leaves, is_causal=True, scale=ctx.scale, enable_gqa=grouped)
            grads = torch.autograd.grad(out, leaves, grad_out.transpose(0, 1)[None])
            found.append([g[0].transpose(0, 1) for g in grads])
        return (*(torch.cat(column) for column in zip(*found, strict=True)), None, None)


def packed_attention(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float) -> Tensor:
    """Causal attention within sequences of ``lengths`` back to back: query [N, H, D], key and value [N, H/groups, D] →
    [N, H, D]."""
    return _Attend.apply(query, key, value, lengths, scale)


def paged_attention(
    query: Tensor, key: Tensor, value: Tensor, tables: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """One query of each of n sequences to keys in a cache, without gradient and without a look at any value.

    Args:
        query: [n, H, D].
        key, value: [pages, H/groups, block, D], of the whole cache.
        tables: [n, P] pages of each sequence.
        positions: [n], the last key that each query sees.
    """
    number = torch.arange(len(query), device=query.device)
    tiles = attention_kernels.single_tiles(len(query), query.device)
    pages = (x.transpose(1, 2) for x in (key, value))
    return attention_kernels.paged_attention(query, *pages, tiles, number, positions, tables, scale)
