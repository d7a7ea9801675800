"""Matrix products in tiles of one shape: dense, and grouped by expert."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_rl.learner.layers.kernels.device import INTERPRETED, NUM_WARPS, check, dot, rounded

BLOCK_ROWS = 64
BLOCK_COLUMNS = 64
BLOCK_K = 32
"""Terms of a sum that one product of a tile takes; the sums of blocks are added in order."""


@triton.jit
def _tile(
    x, weight, out, rows, row_mask, columns, num_columns, width,
    stride_x, stride_weight, stride_out,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out[rows, columns] = x[rows] · weight[columns]ᵀ, K from 0 on."""
    column_mask = columns < num_columns
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for start in range(0, width, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(
            x + rows[:, None].to(tl.int64) * stride_x + k[None, :],
            mask=row_mask[:, None] & (k < width)[None, :], other=0.0,
        )  # fmt: skip
        b = tl.load(
            weight + columns[None, :].to(tl.int64) * stride_weight + k[:, None],
            mask=column_mask[None, :] & (k < width)[:, None], other=0.0,
        )  # fmt: skip
        total += dot(a, b, INTERPRETED)
    place = out + rows[:, None].to(tl.int64) * stride_out + columns[None, :]
    tl.store(place, rounded(total, out.dtype.element_ty, INTERPRETED), mask=row_mask[:, None] & column_mask[None, :])


@triton.jit
def _linear(
    x, weight, out, num_rows, num_columns, width, stride_x, stride_weight, stride_out,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    _tile(
        x, weight, out, rows, rows < num_rows, columns, num_columns, width, stride_x, stride_weight, stride_out,
        BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_K, INTERPRETED,
    )  # fmt: skip


@triton.jit
def _grouped(
    x, weights, out, ends, num_experts, num_columns, width, stride_x, stride_expert, stride_weight, stride_out,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Tile t of all experts' tiles, laid end to end. The host knows only how many there can be at most."""
    left = tl.program_id(0)  # tiles from the beginning of expert's on
    expert, first, end, found = 0, 0, 0, 0
    begin = 0
    for number in range(num_experts):
        stop = tl.load(ends + number).to(tl.int32)
        tiles = (stop - begin + BLOCK_ROWS - 1) // BLOCK_ROWS
        here = (found == 0) & (left < tiles)
        expert = tl.where(here, number, expert)
        first = tl.where(here, begin + left * BLOCK_ROWS, first)
        end = tl.where(here, stop, end)
        found = tl.where(here, 1, found)
        left -= tl.where(found == 0, tiles, 0)
        begin = stop
    if found == 1:
        rows = first + tl.arange(0, BLOCK_ROWS)
        columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        _tile(
            x, weights + expert.to(tl.int64) * stride_expert, out, rows, rows < end, columns, num_columns, width,
            stride_x, stride_weight, stride_out,
            BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_K, INTERPRETED,
        )  # fmt: skip


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [N, K] · weight [M, K]ᵀ → [N, M] in the dtype of ``x``; rows of both must be contiguous.

    Raises ValueError for other shapes, layouts and types.
    """
    check("linear", x, weight)
    if x.dim() != 2 or weight.dim() != 2 or x.size(1) != weight.size(1) or x.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError(
            f"linear: {tuple(x.shape)} and {tuple(weight.shape)}; expected [N, K] and [M, K], rows contiguous"
        )
    out = x.new_empty(len(x), len(weight))
    grid = (triton.cdiv(len(x), BLOCK_ROWS), triton.cdiv(len(weight), BLOCK_COLUMNS))
    if out.numel():
        _linear[grid](
            x, weight, out, len(x), len(weight), x.size(1), x.stride(0), weight.stride(0), out.stride(0),
            BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_K, INTERPRETED, num_warps=NUM_WARPS,
        )  # fmt: skip
    return out


def grouped_linear(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows of ``x``, sorted by expert, each times its expert's weight.

    Args:
        x: [N, K].
        weights: [E, M, K].
        ends: [E] int32 or int64 on the device, the number of rows of experts 0 … e. Rows behind the last end are not
            written: a fixed N of at least all rows lets a CUDA graph be replayed with other routes.

    Returns:
        [N, M] in the dtype of ``x``.

    Raises:
        ValueError: other shapes, layouts and types.
    """
    check("grouped_linear", x, weights)
    fits = x.dim() == 2 and weights.dim() == 3 and x.size(1) == weights.size(2) and ends.shape == weights.shape[:1]
    if not fits or x.stride(1) != 1 or weights.stride(2) != 1 or ends.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"grouped_linear: {tuple(x.shape)}, {tuple(weights.shape)} and {tuple(ends.shape)} {ends.dtype}; expected "
            "[N, K], [E, M, K] and [E] of integers, rows contiguous"
        )
    out = x.new_empty(len(x), weights.size(1))
    most_tiles = triton.cdiv(len(x), BLOCK_ROWS) + len(weights)  # an expert's last tile may be nearly empty
    if out.numel():
        _grouped[(most_tiles, triton.cdiv(weights.size(1), BLOCK_COLUMNS))](
            x, weights, out, ends, len(weights), weights.size(1), x.size(1),
            x.stride(0), weights.stride(0), weights.stride(1), out.stride(0),
            BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_K, INTERPRETED, num_warps=NUM_WARPS,
        )  # fmt: skip
    return out
