"""Exact mode's Triton kernels with the gradients of the plain functions: what `invariant` calls where it uses kernels.

Forward is a kernel of `exact.kernels`, backward is PyTorch's. Importing this imports Triton.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from megatron_rl.exact.kernels import attention as attention_kernels
from megatron_rl.exact.kernels import gemm, rows
from megatron_rl.exact.kernels.rows import sort_by_expert
from megatron_rl.layers import cpu_layers
from megatron_rl.layers.attention import attend

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
    """Return `torch.nn.functional.rms_norm` over the last dimension."""
    if weight is None or weight.dim() != 1 or tuple(normalized_shape) != weight.shape:
        raise NotImplementedError(f"batch-invariant norm over {tuple(normalized_shape)} of {tuple(x.shape)}")
    return _Norm.apply(x, weight, torch.finfo(x.dtype).eps if eps is None else eps)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rows.rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = (part[:, None].to(grad.dtype) for part in ctx.saved_tensors)
        first, second = grad.chunk(2, dim=-1)
        return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, heads, D] by the angles of which ``cos`` and ``sin`` [N, D/2] are, as `invariant.rotate`."""
    return _Rotate.apply(x, cos, sin)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, top: int, normalize: bool) -> tuple[Tensor, Tensor]:
        experts, probs = rows.route(logits, top, normalize)
        experts = experts.long()
        ctx.save_for_backward(logits, experts)
        ctx.normalize = normalize
        ctx.mark_non_differentiable(experts)
        return probs.to(logits.dtype), experts

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _grad_experts: Any) -> tuple[Tensor, None, None]:
        logits, experts = ctx.saved_tensors
        logits = logits.detach().requires_grad_()
        with torch.enable_grad():
            if ctx.normalize:
                probs = torch.softmax(logits.gather(1, experts), -1, dtype=torch.float32)
            else:
                probs = torch.softmax(logits, -1, dtype=torch.float32).gather(1, experts)
            probs = probs.to(logits.dtype)
        return *torch.autograd.grad(probs, logits, grad), None, None


def route(logits: Tensor, top: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Of logits [N, E], the probabilities [N, top] in their dtype of the chosen experts, and these [N, top] int64 in
    ascending order."""
    return _Route.apply(logits, top, normalize)


def experts(
    x: Tensor, probs: Tensor, chosen: Tensor, fc1: list[Tensor], fc2: list[Tensor], first: int
) -> tuple[Tensor, Tensor]:
    """silu(x·w_gate) · (x·w_up) · prob, times w_down, of each row [n, H] and each of its experts here, without gradient
    and without a look at any value.

    Args:
        probs, chosen: [n, K].
        fc1, fc2: of experts ``first`` … (w_gate, w_up) [2F, H] and w_down [H, F].

    Returns:
        [n·K, H], sorted by expert, and the place [n, K] of each among them; the rows of experts elsewhere, which come
        last, have no value.
    """
    tokens, sorted_probs, places, ends = sort_by_expert(chosen, probs, first, len(fc1))
    hidden = gemm.grouped_linear(x[tokens], fc1, ends)
    return gemm.grouped_linear(rows.gated_silu(hidden, sorted_probs), fc2, ends), places


class _Experts(cpu_layers.Experts):
    """`trained_experts`: the gradient of the functions for a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, counts: Tensor, *weights: Tensor) -> Tensor:
        ends, number = counts.to(x.device).cumsum(0), len(counts)
        hidden = gemm.grouped_linear(x, weights[:number], ends)
        ctx.save_for_backward(x, probs, hidden, *weights)
        ctx.counts = counts.tolist()
        return gemm.grouped_linear(rows.gated_silu(hidden, probs), weights[number:], ends)


def trained_experts(x: Tensor, probs: Tensor, counts: Tensor, fc1: list[Tensor], fc2: list[Tensor]) -> Tensor:
    """`experts` of rows [M, H] that are sorted already, with a gradient. ``counts`` [E] int64: rows of each expert,
    which the host reads."""
    return _Experts.apply(x.contiguous(), probs, counts, *fc1, *fc2)


class _AddRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, target: Tensor, places: Tensor, source: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.mark_dirty(target)
        order = places.argsort(stable=True)
        targets = torch.arange(len(target), device=places.device)
        ends = torch.searchsorted(places[order], targets, right=True)
        return rows.add_rows(target, source.contiguous(), order, ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        return grad, None, grad.index_select(0, ctx.saved_tensors[0])


def add_rows(target: Tensor, places: Tensor, source: Tensor) -> Tensor:
    """Each row of ``source`` [M, H] added to the row ``places`` [M] of ``target`` [N, H] in place, those of one place
    one after the other; the sum is fp32, rounded once."""
    return _AddRows.apply(target, places, source)


def combine(parts: Tensor, places: Tensor) -> Tensor:
    """[M, H] → [N, H]: the rows ``places`` [N, K] of each token added in their order as in `add_rows`, without
    gradient."""
    return rows.combine(parts, places)


token_statistics = rows.token_statistics


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
        results = []
        parts = (tensor.split(ctx.lengths) for tensor in (*ctx.saved_tensors, grad))
        for *qkv, grad_out in zip(*parts, strict=True):
            leaves = [x.detach().transpose(0, 1)[None].requires_grad_() for x in qkv]
            with torch.enable_grad():
                out = attend(*leaves, ctx.scale, is_causal=True)
            grads = torch.autograd.grad(out, leaves, grad_out.transpose(0, 1)[None])
            results.append([g[0].transpose(0, 1) for g in grads])
        return (*(torch.cat(column) for column in zip(*results, strict=True)), None, None)


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
    return attention_kernels.step_attention(query, *(x.transpose(1, 2) for x in (key, value)), positions, tables, scale)
