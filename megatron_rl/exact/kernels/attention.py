"""Attention of packed queries to keys in a paged cache or back to back: one arithmetic for prompt, step and training.

Each query attends to keys 0 … its own position. Keys come in blocks of `KEY_BLOCK` from the first one on, with a
running softmax, `SPLIT` of them at a time, whose sums are joined in their order: what lies beyond the last key adds
exactly nothing. Weights are rounded to the type of the values, as their product on tensor cores wants them; sums are
fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_rl.exact.kernels.gemm import INTERPRETED, NUM_WARPS, check, dot, rounded, whole

KEY_BLOCK = 32
"""Keys that are taken at a time, and tokens of a page of the cache."""
ROWS = 64
"""Pairs of query and head of a program. One number for prompts and single steps: the tree by which a row of a tile is
summed depends on the tile's shape."""


SPLIT = 16
"""Blocks of keys that are summed by themselves; these sums are then joined in their order. A number of its own, so
that it is one program's work in a long prompt and that of many where a single query meets a long cache."""
FP32_NUM_WARPS = 16
"""Of fp32, whose products need the whole tile in registers: with 4 warps 18 KB of a thread's values would spill to
memory, with 16 none does."""


def launch(dtype: torch.dtype) -> dict[str, int | bool]:
    """How the kernels are compiled for queries of ``dtype``, the same for all of them.

    They share functions: products must not be fused with sums in one of them and not in another, and a tile's
    reduction is a tree over its warps.
    """
    return {"num_warps": FP32_NUM_WARPS if dtype == torch.float32 else NUM_WARPS, "enable_fp_fusion": False}


@triton.jit
def _join(top, total, result, other_top, other_total, other):
    """Running softmax: largest score, sum of weights and weighted values of more keys. Of none it adds exactly 0."""
    new_top = tl.maximum(top, other_top)
    keep, share = tl.exp(top - new_top), tl.exp(other_top - new_top)
    total = total * keep + other_total * share
    result = result * keep[:, None] + other * share[:, None]
    return new_top, total, result


@triton.jit
def _places(
    tiles, num_heads, groups, width, ROWS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, SINGLE: tl.constexpr
):  # fmt: skip
    """Of a tile's rows, pairs of query and head: their places in queries and results, which of these there are, their
    queries, and which rows there are. ``SINGLE``: a tile is one query, with the heads that share one key head."""
    row = tl.arange(0, ROWS)
    if SINGLE:
        number, num_queries = tl.program_id(0).to(tl.int64) + row // GROUPS, 1
    else:
        number = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64) + row // GROUPS
        num_queries = tl.load(tiles + 2 * tl.program_id(0) + 1)
    member = row % GROUPS
    used = (row // GROUPS < num_queries) & (member < groups)
    d = tl.arange(0, WIDTH)
    place = (number[:, None] * num_heads + tl.program_id(1) * groups + member[:, None]) * width + d[None, :]
    return place, used[:, None] & (d < width)[None, :], number, used


@triton.jit
def _split(
    q, last, key, value, start, pages, scale, split, width, stride_page, stride_token, stride_head,
    ROWS: tl.constexpr, KEY_BLOCK: tl.constexpr, SPLIT: tl.constexpr, WIDTH: tl.constexpr, PAGED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Queries ``ROWS`` × ``WIDTH``, whose last keys are ``last``, and the keys of one split: largest score, sum of
    weights and weighted values. The keys begin at token ``start``, or lie in ``pages``."""
    d = tl.arange(0, WIDTH)
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    result = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    longest = tl.max(last, axis=0)
    # Blocks beyond a row's own last key multiply by 1 and add 0.
    for block in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, longest // KEY_BLOCK + 1)):
        inside = tl.arange(0, KEY_BLOCK)
        token = block * KEY_BLOCK + inside
        if PAGED:
            base = tl.load(pages + block).to(tl.int64) * stride_page + inside.to(tl.int64) * stride_token
        else:
            base = (start + token) * stride_token
        there = token <= longest
        base += tl.program_id(1) * stride_head
        k = tl.load(key + base[None, :] + d[:, None], mask=there[None, :] & (d < width)[:, None], other=0.0)
        v = tl.load(value + base[:, None] + d[None, :], mask=there[:, None] & (d < width)[None, :], other=0.0)
        scores = dot(q, k, INTERPRETED) * scale
        scores = tl.where(token[None, :] <= last[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # of a row that sees none of these keys
        keep = tl.exp(top - shift)
        weights = tl.exp(scores - shift[:, None])
        total = total * keep + tl.sum(weights, axis=1)
        product = dot(rounded(weights, value.dtype.element_ty, INTERPRETED), v, INTERPRETED)
        result = result * keep[:, None] + product
        top = new_top
    return top, total, result


@triton.jit
def _attend(
    query, key, value, out, tiles, sequences, positions, starts, scale,
    num_heads, groups, width, stride_token, stride_head,
    ROWS: tl.constexpr, KEY_BLOCK: tl.constexpr, SPLIT: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Some queries of one sequence that follow each other, and all splits of its keys, one after the other."""
    place, row_mask, number, used = _places(tiles, num_heads, groups, width, ROWS, GROUPS, WIDTH, False)
    q = tl.load(query + place, mask=row_mask, other=0.0)
    last = tl.load(positions + number, mask=used, other=0).to(tl.int32)
    sequence = tl.load(sequences + tl.load(tiles + 2 * tl.program_id(0))).to(tl.int64)
    start = tl.load(starts + sequence).to(tl.int64)
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    result = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for split in range(tl.max(last, axis=0) // (KEY_BLOCK * SPLIT) + 1):
        part_top, part_total, part = _split(
            q, last, key, value, start, starts, scale, split, width, 0, stride_token, stride_head,
            ROWS, KEY_BLOCK, SPLIT, WIDTH, False, INTERPRETED,
        )  # fmt: skip
        top, total, result = _join(top, total, result, part_top, part_total, part)
    tl.store(out + place, rounded(result / total[:, None], out.dtype.element_ty, INTERPRETED), mask=row_mask)


@triton.jit
def _attend_part(
    query, key, value, tops, totals, parts, positions, pages, scale,
    num_heads, groups, width, most_pages, stride_page, stride_token, stride_head,
    ROWS: tl.constexpr, KEY_BLOCK: tl.constexpr, SPLIT: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A single query and one split of its keys; a program whose split is not there ends at once."""
    split = tl.program_id(2)
    if tl.load(positions + tl.program_id(0)) >= split * KEY_BLOCK * SPLIT:
        place, row_mask, number, used = _places(positions, num_heads, groups, width, ROWS, GROUPS, WIDTH, True)
        q = tl.load(query + place, mask=row_mask, other=0.0)
        last = tl.load(positions + number, mask=used, other=0).to(tl.int32)
        top, total, result = _split(
            q, last, key, value, 0, pages + tl.program_id(0).to(tl.int64) * most_pages, scale, split, width,
            stride_page, stride_token, stride_head,
            ROWS, KEY_BLOCK, SPLIT, WIDTH, True, INTERPRETED,
        )  # fmt: skip
        row, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
        tile = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        at = (tile * tl.num_programs(2) + split) * GROUPS + row
        tl.store(tops + at, top, mask=row < GROUPS)
        tl.store(totals + at, total, mask=row < GROUPS)
        tl.store(parts + at[:, None] * WIDTH + d[None, :], result, mask=(row < GROUPS)[:, None])


@triton.jit
def _join_parts(
    tops, totals, parts, out, positions, num_heads, groups, width, num_splits,
    ROWS: tl.constexpr, KEY_BLOCK: tl.constexpr, SPLIT: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """What `_attend` does with the splits of a query."""
    place, row_mask, _, _ = _places(positions, num_heads, groups, width, ROWS, GROUPS, WIDTH, True)
    row, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    begin = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * num_splits * GROUPS
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    result = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for split in range(tl.load(positions + tl.program_id(0)).to(tl.int32) // (KEY_BLOCK * SPLIT) + 1):
        at = begin + split * GROUPS + row
        part_top = tl.load(tops + at, mask=row < GROUPS, other=0.0)
        part_total = tl.load(totals + at, mask=row < GROUPS, other=1.0)
        part = tl.load(parts + at[:, None] * WIDTH + d[None, :], mask=(row < GROUPS)[:, None], other=0.0)
        top, total, result = _join(top, total, result, part_top, part_total, part)
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
        tiles: `query_tiles`.
        sequences: [N] integers, the sequence of each token.
        positions: [N] integers, the place of each token in its sequence.
        starts: [S] integers, the first token of each sequence.
        scale: of the scores.

    Returns:
        [N, H, D] in the dtype of ``query``; scores and sums are fp32.
    """
    _fits("packed_attention", query, key, value, sequences, positions)
    query = query.contiguous()
    out = torch.empty_like(query)
    num_heads, width, kv_heads = query.size(1), query.size(2), key.size(-2)
    groups = num_heads // kv_heads
    if out.numel():
        _attend[(len(tiles), kv_heads)](
            query, key, value, out, tiles, sequences, positions, starts, scale,
            num_heads, groups, width, key.stride(0), key.stride(1),
            ROWS, KEY_BLOCK, SPLIT, whole(groups), max(16, whole(width)), INTERPRETED, **launch(query.dtype),
        )  # fmt: skip
    return out


def step_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    pages: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """As `packed_attention` of one query of each of n sequences to keys in a cache, with the same bits: the splits of a
    query's keys are programs of their own, and another kernel joins them. Sequences may share pages: those of a common
    prompt.

    Args:
        query: [n, H, D].
        key, value: [pages, KEY_BLOCK, H/groups, D], with the same strides.
        positions: [n] integers, the last key that each query sees.
        pages: [n, most] integers, the page of each block of `KEY_BLOCK` tokens of a sequence.
    """
    _fits("step_attention", query, key, value, positions)
    if key.dim() != 4 or key.size(1) != KEY_BLOCK or pages.dim() != 2 or len(pages) != len(query):
        raise ValueError(
            f"step_attention: keys {tuple(key.shape)}, pages {tuple(pages.shape)} of {len(query)} queries; expected "
            f"[pages, {KEY_BLOCK}, H/groups, D] and [n, most]"
        )
    query, pages = query.contiguous(), pages.contiguous()
    out = torch.empty_like(query)
    num_heads, width, kv_heads = query.size(1), query.size(2), key.size(-2)
    groups, members, padded = num_heads // kv_heads, whole(num_heads // kv_heads), max(16, whole(width))
    num_splits = triton.cdiv(pages.size(1), SPLIT)
    tops, totals = query.new_empty(2, len(query), kv_heads, num_splits, members, dtype=torch.float32).unbind()
    parts = query.new_empty(len(query), kv_heads, num_splits, members, padded, dtype=torch.float32)
    if out.numel():
        _attend_part[(len(query), kv_heads, num_splits)](
            query, key, value, tops, totals, parts, positions, pages, scale,
            num_heads, groups, width, pages.size(1), key.stride(0), key.stride(1), key.stride(2),
            ROWS, KEY_BLOCK, SPLIT, members, padded, INTERPRETED, **launch(query.dtype),
        )  # fmt: skip
        _join_parts[(len(query), kv_heads)](
            tops, totals, parts, out, positions, num_heads, groups, width, num_splits,
            ROWS, KEY_BLOCK, SPLIT, members, padded, INTERPRETED, **launch(query.dtype),
        )  # fmt: skip
    return out


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
