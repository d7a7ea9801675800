"""What is computed row by row: norm, rotation, gated SiLU, router, the sum over a token's experts, log-probs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_rl.learner.layers.kernels.device import INTERPRETED, NUM_WARPS, check, rounded, whole

VOCABULARY_BLOCK = 1024
MOST_EXPERTS = 1024


@triton.jit
def _rms_norm(x, weight, out, width, eps, stride_x, stride_out, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride_x + place, mask=place < width, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / width + eps)
    weights = tl.load(weight + place, mask=place < width, other=0.0).to(tl.float32)
    tl.store(
        out + row * stride_out + place,
        rounded(values * scale * weights, out.dtype.element_ty, INTERPRETED),
        mask=place < width,
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / √(mean x² + eps) · weight over the last dimension, in fp32, [N, H] → [N, H] in the dtype of ``x``."""
    check("rms_norm", x, weight)
    if x.dim() != 2 or weight.shape != x.shape[1:] or x.stride(1) != 1:
        raise ValueError(f"rms_norm: {tuple(x.shape)} and {tuple(weight.shape)}; expected [N, H] and [H]")
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel():
        _rms_norm[(len(x),)](
            x,
            weight,
            out,
            x.size(1),
            eps,
            x.stride(0),
            out.stride(0),
            whole(x.size(1)),
            INTERPRETED,
            num_warps=NUM_WARPS,
        )
    return out


@triton.jit
def _rotate(x, cos, sin, out, num_heads, half, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    mask = place < half
    angle = (row // num_heads) * half + place
    c = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
    first = tl.load(x + row * 2 * half + place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + row * 2 * half + half + place, mask=mask, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    tl.store(out + row * 2 * half + place, rounded(first * c - second * s, kind, INTERPRETED), mask=mask)
    tl.store(out + row * 2 * half + half + place, rounded(second * c + first * s, kind, INTERPRETED), mask=mask)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of ``x`` [N, heads, D] with ``cos`` and ``sin`` [N, D/2] of each token's angles:
    (x₁, x₂) → (x₁·cos − x₂·sin, x₂·cos + x₁·sin) for the halves of D, in fp32, in the dtype of ``x``."""
    check("rotate", x, cos, sin)
    if x.dim() != 3 or x.size(2) % 2 or cos.shape != (len(x), x.size(2) // 2) or sin.shape != cos.shape:
        raise ValueError(f"rotate: {tuple(x.shape)}, {tuple(cos.shape)}; expected [N, heads, D], [N, D/2]")
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    out = torch.empty_like(x)
    if out.numel():
        half = x.size(2) // 2
        _rotate[(len(x) * x.size(1),)](x, cos, sin, out, x.size(1), half, whole(half), INTERPRETED, num_warps=NUM_WARPS)
    return out


@triton.jit
def _gated_silu(hidden, probs, out, width, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    mask = place < width
    gate = tl.load(hidden + row * 2 * width + place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(hidden + row * 2 * width + width + place, mask=mask, other=0.0).to(tl.float32)
    prob = tl.load(probs + row).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up * prob
    tl.store(out + row * width + place, rounded(value, out.dtype.element_ty, INTERPRETED), mask=mask)


def gated_silu(hidden: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up · prob [M, F] of ``hidden`` = (gate, up) [M, 2F] and ``probs`` [M]: fp32, stored in its dtype."""
    check("gated_silu", hidden, probs)
    if hidden.dim() != 2 or hidden.size(1) % 2 or probs.shape != hidden.shape[:1]:
        raise ValueError(f"gated_silu: {tuple(hidden.shape)} and {tuple(probs.shape)}; expected [M, 2F] and [M]")
    hidden, width = hidden.contiguous(), hidden.size(1) // 2
    out = hidden.new_empty(len(hidden), width)
    if out.numel():
        _gated_silu[(len(hidden),)](
            hidden, probs.contiguous(), out, width, whole(width), INTERPRETED, num_warps=NUM_WARPS
        )
    return out


@triton.jit
def _route(logits, experts, probs, num_experts, TOP: tl.constexpr, NORMALIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    x = tl.load(logits + row * num_experts + place, mask=place < num_experts, other=float("-inf")).to(tl.float32)
    weights = tl.exp(x - tl.max(x, axis=0))
    weights = weights / tl.sum(weights, axis=0)
    total = 0.0
    left = tl.where(place < num_experts, weights, -1.0)
    for number in tl.static_range(TOP):
        best = tl.max(left, axis=0)
        index = tl.min(tl.where(left == best, place, BLOCK), axis=0)  # the lower index of equal ones
        tl.store(experts + row * TOP + number, index)
        tl.store(probs + row * TOP + number, best)
        total += best
        left = tl.where(place == index, -1.0, left)
    if NORMALIZE:
        for number in tl.static_range(TOP):
            value = tl.load(probs + row * TOP + number)
            tl.store(probs + row * TOP + number, value / total)


def route(logits: torch.Tensor, top: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``top`` experts of each token and their probabilities: softmax over all experts, largest first, the lower
    index of equal ones; ``normalize``: probabilities divided by their sum.

    Args:
        logits: [N, E], E at most `MOST_EXPERTS`.

    Returns:
        experts [N, top] int32 and probabilities [N, top] fp32.
    """
    check("route", logits)
    if logits.dim() != 2 or not 1 <= top <= logits.size(1) <= MOST_EXPERTS:
        raise ValueError(f"route: {tuple(logits.shape)}, top {top}; expected [N, E], 1 ≤ top ≤ E ≤ {MOST_EXPERTS}")
    logits = logits.contiguous()
    experts = torch.empty(len(logits), top, dtype=torch.int32, device=logits.device)
    probs = torch.empty(len(logits), top, dtype=torch.float32, device=logits.device)
    if len(logits):
        _route[(len(logits),)](
            logits, experts, probs, logits.size(1), top, normalize, whole(logits.size(1)), num_warps=NUM_WARPS
        )
    return experts, probs


@triton.jit
def _combine(rows, places, out, width, stride_rows, TOP: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for number in tl.static_range(TOP):
        place = tl.load(places + token * TOP + number).to(tl.int64)
        total += tl.load(rows + place * stride_rows + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, rounded(total, out.dtype.element_ty, INTERPRETED), mask=column < width)


def combine(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The sum of each token's rows in the order given, which is that of the experts.

    Args:
        rows: [M, H], contiguous rows.
        places: [N, top] int32 or int64, rows of each token.

    Returns:
        [N, H] in the dtype of ``rows``, added in fp32.
    """
    check("combine", rows)
    if rows.dim() != 2 or places.dim() != 2 or rows.stride(1) != 1:
        raise ValueError(f"combine: {tuple(rows.shape)} and {tuple(places.shape)}; expected [M, H] and [N, top]")
    out, block = rows.new_empty(len(places), rows.size(1)), 256
    if out.numel():
        _combine[(len(places), triton.cdiv(rows.size(1), block))](
            rows,
            places.contiguous(),
            out,
            rows.size(1),
            rows.stride(0),
            places.size(1),
            block,
            INTERPRETED,
            num_warps=NUM_WARPS,
        )
    return out


@triton.jit
def _row_sums(x, out, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = 0.0
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x + row * stride + place, mask=place < width, other=0.0), axis=0)
    tl.store(out + row, total)


def row_sums(x: torch.Tensor) -> torch.Tensor:
    """Sums [N] of the rows of ``x`` [N, V] fp32, in blocks from the first column on."""
    check("row_sums", x)
    if x.dim() != 2 or x.dtype != torch.float32 or x.stride(1) != 1:
        raise ValueError(f"row_sums: {tuple(x.shape)} {x.dtype}; expected [N, V] float32, rows contiguous")
    out = x.new_empty(len(x))
    if len(x):
        _row_sums[(len(x),)](x, out, x.size(1), x.stride(0), VOCABULARY_BLOCK, num_warps=NUM_WARPS)
    return out


@triton.jit
def _log_prob(logits, tokens, out, vocabulary, inverse_temperature, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    top = float("-inf")
    total = 0.0
    for start in range(0, vocabulary, BLOCK):
        place = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + place, mask=place < vocabulary, other=float("-inf")).to(tl.float32)
        x = x * inverse_temperature
        new_top = tl.maximum(top, tl.max(x, axis=0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top), axis=0)
        top = new_top
    chosen = tl.load(logits + row * stride + tl.load(tokens + row)).to(tl.float32) * inverse_temperature
    tl.store(out + row, chosen - top - tl.log(total))


def log_prob(logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """log softmax(logits / temperature) at ``tokens``, the vocabulary in blocks from its first entry on.

    Args:
        logits: [N, V], rows contiguous and finite.
        tokens: [N] int64.

    Returns:
        [N] fp32.
    """
    check("log_prob", logits)
    if logits.dim() != 2 or tokens.shape != logits.shape[:1] or logits.stride(1) != 1 or not temperature > 0:
        raise ValueError(
            f"log_prob: {tuple(logits.shape)}, {tuple(tokens.shape)}, temperature {temperature}; expected [N, V], [N] "
            "and a positive temperature"
        )
    out = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _log_prob[(len(logits),)](
            logits, tokens, out, logits.size(1), 1.0 / temperature, logits.stride(0), VOCABULARY_BLOCK,
            num_warps=NUM_WARPS,
        )  # fmt: skip
    return out
