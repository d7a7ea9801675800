"""Row kernels: norm, rotation, gated SiLU, router, sum over a token's experts, statistics of logits, expert order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_rl.exact.kernels.gemm import INTERPRETED, NUM_WARPS, check, rounded, whole

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
def _rotate(
    x, cos, sin, out, num_heads, half, HEADS: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head, place = tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    mask = (head < num_heads) & (place < half)
    c = tl.load(cos + row * half + place, mask=place < half, other=0.0).to(tl.float32)
    s = tl.load(sin + row * half + place, mask=place < half, other=0.0).to(tl.float32)
    target = (row * num_heads + head) * 2 * half + place
    first = tl.load(x + target, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + target + half, mask=mask, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    tl.store(out + target, rounded(first * c - second * s, kind, INTERPRETED), mask=mask)
    tl.store(out + target + half, rounded(second * c + first * s, kind, INTERPRETED), mask=mask)


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
        heads = x.size(1)
        _rotate[(len(x),)](x, cos, sin, out, heads, half, whole(heads), whole(half), INTERPRETED, num_warps=NUM_WARPS)
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
    x = tl.where(x == x, x, float("inf"))  # NaN is chosen, and makes probabilities NaN
    chosen = tl.zeros((BLOCK,), dtype=tl.int32)
    left = x
    for _ in tl.static_range(TOP):
        best = tl.max(left, axis=0)
        index = tl.min(tl.where((left == best) & (chosen == 0), place, BLOCK), axis=0)  # the lower one of equal ones
        chosen = tl.where(place == index, 1, chosen)
        left = tl.where(place == index, float("-inf"), left)
    weights = tl.exp(x - tl.max(x, axis=0))
    total = tl.sum(tl.where(chosen == 1, weights, 0.0) if NORMALIZE else weights, axis=0)
    target = row * TOP + tl.cumsum(chosen, axis=0) - 1
    tl.store(experts + target, place, mask=chosen == 1)
    tl.store(probs + target, weights / total, mask=chosen == 1)


def route(logits: torch.Tensor, top: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token, those of the ``top`` largest logits, and their probabilities by a softmax over all
    experts. The lower index of equal ones; ``normalize``: a softmax over the chosen ones.

    Args:
        logits: [N, E], E at most `MOST_EXPERTS`.

    Returns:
        experts [N, top] int32 in ascending order and probabilities [N, top] fp32.
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
def _combine(
    rows, order, ends, out, width, stride_rows, stride_out, EACH: tl.constexpr, ADDING: tl.constexpr,
    BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """``EACH``: rows of every token; 0: ``ends`` says."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    target = out + token * stride_out + column
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    if ADDING:
        total += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    if EACH > 0:
        begin = (token * EACH).to(tl.int32)
        end = begin + EACH
    else:
        begin = tl.load(ends + token - 1, mask=token > 0, other=0).to(tl.int32)
        end = tl.load(ends + token).to(tl.int32)
    for number in range(begin, end):
        place = tl.load(order + number).to(tl.int64)
        total += tl.load(rows + place * stride_rows + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, rounded(total, out.dtype.element_ty, INTERPRETED), mask=mask)


def combine(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The sum of each token's rows in the order given, which is that of the experts.

    Args:
        rows: [M, H], contiguous rows.
        places: [N, top] int32 or int64, rows of each token.

    Returns:
        [N, H] in the dtype of ``rows``, added in fp32.
    """
    if places.dim() != 2:
        raise ValueError(f"combine: places {tuple(places.shape)}; expected [N, top]")
    out = rows.new_empty(len(places), rows.size(-1))
    return _launch_combine(rows, places.contiguous(), places, out, each=places.size(1), adding=False)


def add_rows(target: torch.Tensor, rows: torch.Tensor, order: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Add to each row of ``target`` [N, H] its ``rows`` [M, H], one after the other in fp32, rounded once, in place.

    ``order`` [M]: rows, those of the first target first; ``ends`` [N]: how many of them targets 0 … n have.
    """
    if len(ends) != len(target):
        raise ValueError(f"add_rows: {len(ends)} ends of {len(target)} targets")
    return _launch_combine(rows, order, ends, target, each=0, adding=True)


def _launch_combine(
    rows: torch.Tensor, order: torch.Tensor, ends: torch.Tensor, out: torch.Tensor, each: int, adding: bool
) -> torch.Tensor:
    check("combine", rows, out)
    if rows.dim() != 2 or rows.stride(1) != 1 or out.dim() != 2 or out.stride(1) != 1:
        raise ValueError(f"combine: {tuple(rows.shape)} to {tuple(out.shape)}; expected [M, H] to [N, H]")
    block = 256
    if out.numel():
        _combine[(len(out), triton.cdiv(rows.size(1), block))](
            rows, order, ends, out, rows.size(1), rows.stride(0), out.stride(0), each, adding, block, INTERPRETED,
            num_warps=NUM_WARPS,
        )  # fmt: skip
    return out


@triton.jit
def _token_statistics(
    logits, places, labels, out, count, width, first, inverse_temperature, stride, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    begin = logits + tl.load(places + row).to(tl.int64) * stride
    top = float("-inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        x = tl.load(begin + place, mask=place < width, other=float("-inf")).to(tl.float32) * inverse_temperature
        new_top = tl.maximum(top, tl.max(x, axis=0))
        keep = tl.exp(top - new_top)
        weights = tl.exp(x - new_top)
        total = total * keep + tl.sum(weights, axis=0)
        # A weight of 0 may be that of -inf, beside which a product is not a number.
        weighted = weighted * keep + tl.sum(weights * tl.where(weights == 0.0, 0.0, x), axis=0)
        top = new_top
    label = tl.load(labels + row).to(tl.int64) - first
    inside = (label >= 0) & (label < width)
    chosen = tl.load(begin + label, mask=inside, other=0.0).to(tl.float32) * inverse_temperature
    tl.store(out + row, top)
    tl.store(out + count + row, total)
    tl.store(out + 2 * count + row, chosen)
    tl.store(out + 3 * count + row, weighted)


def token_statistics(
    logits: torch.Tensor,
    places: torch.Tensor,
    labels: torch.Tensor,
    *,
    first: int = 0,
    width: int | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """What log softmax(logits / temperature) at ``labels`` and the entropy are made of, the vocabulary in blocks from
    its first entry on.

    Args:
        logits: [N, V/tp], rows contiguous and finite; columns first … of the vocabulary.
        places: [n] int64, rows of ``logits``.
        labels: [n] int64, numbers in the whole vocabulary.
        width: columns that are no padding; None: all.

    Returns:
        [4, n] fp32 of z = logits / temperature: top = max z, Σ exp(z − top), the label's z or 0 where it is not here,
        Σ exp(z − top)·z.
    """
    check("token_statistics", logits)
    if logits.dim() != 2 or logits.stride(1) != 1 or places.shape != labels.shape or not temperature > 0:
        raise ValueError(
            f"token_statistics: {tuple(logits.shape)}, {tuple(places.shape)}, {tuple(labels.shape)}, temperature "
            f"{temperature}; expected [N, V], [n], [n] and a positive temperature"
        )
    out = torch.empty(4, len(labels), dtype=torch.float32, device=logits.device)
    if len(labels):
        _token_statistics[(len(labels),)](
            logits, places, labels, out, len(labels), logits.size(1) if width is None else width, first,
            1.0 / temperature, logits.stride(0), VOCABULARY_BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip
    return out


CHOICES = 1024  # that a program looks at a time


@triton.jit
def _sort_by_expert(
    chosen, probs, tokens, sorted_probs, places, ends, number, first, num_local, TOP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One of ``num_local`` experts and, as the last one, all that are elsewhere: where their choices begin is how many
    go before."""
    own_expert = tl.program_id(0)
    at = 0
    for start in range(0, number, BLOCK):
        place = start + tl.arange(0, BLOCK)
        expert = tl.load(chosen + place, mask=place < number, other=first - 1).to(tl.int32) - first
        at += tl.sum(((expert >= 0) & (expert < own_expert)).to(tl.int32), axis=0)
    for start in range(0, number, BLOCK):
        place = start + tl.arange(0, BLOCK)
        expert = tl.load(chosen + place, mask=place < number, other=0).to(tl.int32) - first
        expert = tl.where((expert < 0) | (expert > num_local), num_local, expert)
        is_own = (expert == own_expert) & (place < number)
        target = at + tl.cumsum(is_own.to(tl.int32), axis=0) - 1
        tl.store(tokens + target, place // TOP, mask=is_own)
        tl.store(sorted_probs + target, tl.load(probs + place, mask=is_own, other=0.0), mask=is_own)
        tl.store(places + place, target, mask=is_own)
        at += tl.sum(is_own.to(tl.int32), axis=0)
    tl.store(ends + own_expert, at)


def sort_by_expert(
    chosen: torch.Tensor, probs: torch.Tensor, first: int, num_local: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choices sorted by expert, those of one expert in the order of the tokens, those of experts elsewhere last.

    Args:
        chosen: [N, K] int32 or int64, experts of each token.
        probs: [N, K], their probabilities.
        first, num_local: the experts that are here.

    Returns:
        of each of N·K choices, sorted, the token [N·K] int64 and the probability [N·K]; of each choice its place
        [N, K] int64 among them; [num_local] int32, the number of choices of the experts that are here up to each one.
    """
    check("sort_by_expert", probs)
    if chosen.dim() != 2 or probs.shape != chosen.shape or chosen.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"sort_by_expert: {tuple(chosen.shape)} {chosen.dtype} and {tuple(probs.shape)}; expected [N, K] of "
            "integers and [N, K]"
        )
    chosen, probs, number = chosen.contiguous(), probs.contiguous(), chosen.numel()
    tokens = torch.empty(number, dtype=torch.int64, device=probs.device)
    places = torch.empty(chosen.shape, dtype=torch.int64, device=probs.device)
    sorted_probs = probs.new_empty(number)
    ends = torch.empty(num_local + 1, dtype=torch.int32, device=probs.device)
    _sort_by_expert[(num_local + 1,)](
        chosen, probs, tokens, sorted_probs, places, ends, number, first, num_local, chosen.size(1), CHOICES,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return tokens, sorted_probs, places, ends[:-1]
