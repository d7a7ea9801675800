"""Attention of packed queries to keys in a paged cache or back to back: one arithmetic for prompt, step and training.

Each query attends to keys 0 … its own position. Keys come in blocks of `KEY_BLOCK` from the first one on, with a
running softmax, by one program: what lies beyond the last key adds exactly nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_rl.learner.layers.kernels.device import INTERPRETED, NUM_WARPS, check, dot, rounded, whole

KEY_BLOCK = 32
"""Keys that are taken at a time, and tokens of a page of the cache."""
ROWS = 64
"""Pairs of query and head of a program. One number for prompts and single steps: the tree by which a row of a tile is
summed depends on the tile's shape."""


@triton.jit
def _attend(
    query, key, value, out, tiles, sequences, positions, starts, pages, scale,
    num_heads, groups, width, most_pages, stride_page, stride_token, stride_head,
    ROWS: tl.constexpr, KEY_BLOCK: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    PAGED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Some queries of one sequence that follow each other, with the heads that share one key head."""
    first = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    num_queries = tl.load(tiles + 2 * tl.program_id(0) + 1)
    kv_head = tl.program_id(1)
    row = tl.arange(0, ROWS)
    number = first + row // GROUPS
    member = row % GROUPS
    used = (row // GROUPS < num_queries) & (member < groups)
    d = tl.arange(0, WIDTH)
    row_mask = used[:, None] & (d < width)[None, :]
    place = (number[:, None] * num_heads + kv_head * groups + member[:, None]) * width + d[None, :]
    q = tl.load(query + place, mask=row_mask, other=0.0)
    sequence = tl.load(sequences + first).to(tl.int64)
    last = tl.load(positions + number, mask=used, other=0)
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    result = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    # Blocks beyond a row's own last key multiply by 1 and add 0.
    for block in range(tl.max(last, axis=0) // KEY_BLOCK + 1):
        inside = tl.arange(0, KEY_BLOCK)
        token = block * KEY_BLOCK + inside
        if PAGED:
            page = tl.load(pages + sequence * most_pages + block).to(tl.int64)
            base = page * stride_page + inside.to(tl.int64) * stride_token
        else:
            base = (tl.load(starts + sequence).to(tl.int64) + token) * stride_token
        there = token <= tl.max(last, axis=0)
        base += kv_head * stride_head
        k = tl.load(key + base[None, :] + d[:, None], mask=there[None, :] & (d < width)[:, None], other=0.0)
        v = tl.load(value + base[:, None] + d[None, :], mask=there[:, None] & (d < width)[None, :], other=0.0)
        scores = dot(q, k, INTERPRETED) * scale
        scores = tl.where(token[None, :] <= last[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        keep = tl.exp(top - new_top)
        weights = tl.exp(scores - new_top[:, None])
        total = total * keep + tl.sum(weights, axis=1)
        result = result * keep[:, None] + dot(weights, v.to(tl.float32), INTERPRETED)
        top = new_top
    tl.store(out + place, rounded(result / total[:, None], out.dtype.element_ty, INTERPRETED), mask=row_mask)


def query_tiles(lengths: list[int], groups: int, device: torch.device) -> torch.Tensor:
    """Tiles [T, 2] of sequences of ``lengths`` queries back to back: first query and their number, none of two
    sequences. ``groups``: heads of a key head."""
    most = ROWS // whole(groups)
    tiles, begin = [], 0
    for length in lengths:
        tiles += [(begin + first, min(most, length - first)) for first in range(0, length, most)]
        begin += length
    return torch.tensor(tiles, dtype=torch.int32, device=device).view(-1, 2)


def single_tiles(num_queries: int, device: torch.device) -> torch.Tensor:
    """Tiles [N, 2] of queries of any sequences, one each: a step of generation, without a look at any value."""
    first = torch.arange(num_queries, dtype=torch.int32, device=device)
    return torch.stack([first, torch.ones_like(first)], dim=1)


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tiles: torch.Tensor,
    sequences: torch.Tensor,
    positions: torch.Tensor,
    starts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Causal attention within sequences that lie back to back, as in a training pass.

    Args:
        query: [N, H, D].
        key, value: [N, H/groups, D], with the same strides.
        tiles: `query_tiles` or `single_tiles`; which, changes no bit of the result.
        sequences: [N] integers, the sequence of each token.
        positions: [N] integers, the place of each token in its sequence.
        starts: [S] integers, the first token of each sequence.
        scale: of the scores.

    Returns:
        [N, H, D] in the dtype of ``query``; scores, weights and sums are fp32.
    """
    _fits("packed_attention", query, key, value, sequences, positions)
    return _launch(query, key, value, tiles, sequences, positions, starts, None, scale)


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tiles: torch.Tensor,
    sequences: torch.Tensor,
    positions: torch.Tensor,
    pages: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """As `packed_attention`, to keys in a cache. Sequences may share pages: those of a common prompt.

    Args:
        query: [N, H, D], queries of any sequences, prompts and single steps mixed.
        key, value: [pages, KEY_BLOCK, H/groups, D], with the same strides.
        tiles, sequences, positions: as there.
        pages: [S, most] integers, the page of each block of `KEY_BLOCK` tokens of a sequence.
    """
    _fits("paged_attention", query, key, value, sequences, positions)
    if key.dim() != 4 or key.size(1) != KEY_BLOCK or pages.dim() != 2:
        raise ValueError(
            f"paged_attention: keys {tuple(key.shape)}, pages {tuple(pages.shape)}; expected [pages, {KEY_BLOCK}, "
            "H/groups, D] and [S, most]"
        )
    return _launch(query, key, value, tiles, sequences, positions, None, pages.contiguous(), scale)


def _fits(name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *numbers: torch.Tensor) -> None:
    check(name, query, key, value)
    heads, width = key.shape[-2:]
    if query.dim() != 3 or query.size(2) != width or query.size(1) % heads or key.stride() != value.stride():
        raise ValueError(
            f"{name}: queries {tuple(query.shape)}, keys {tuple(key.shape)}; expected [N, H, D] and […, H/groups, D], "
            "keys and values with the same strides"
        )
    if key.stride(-1) != 1 or any(number.shape != query.shape[:1] for number in numbers):
        raise ValueError(f"{name}: D must be contiguous, and sequences and positions [N]")
    if query.size(1) // heads > ROWS:
        raise ValueError(f"{name}: {query.size(1) // heads} heads share a key head; at most {ROWS}")


def _launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tiles: torch.Tensor,
    sequences: torch.Tensor,
    positions: torch.Tensor,
    starts: torch.Tensor | None,
    pages: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    query = query.contiguous()
    out = torch.empty_like(query)
    num_heads, width, kv_heads = query.size(1), query.size(2), key.size(-2)
    groups = num_heads // kv_heads
    if out.numel():
        _attend[(len(tiles), kv_heads)](
            query, key, value, out, tiles, sequences, positions, starts, pages, scale,
            num_heads, groups, width, 0 if pages is None else pages.size(1),
            key.stride(0), key.stride(-3), key.stride(-2),
            ROWS, KEY_BLOCK, whole(groups), max(16, whole(width)), pages is not None, INTERPRETED,
            num_warps=NUM_WARPS,
        )  # fmt: skip
    return out
