"""Matrix products in tiles: dense, and grouped by expert; and what all kernels share."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Kernels run on CPU tensors, in Python. Decided by TRITON_INTERPRET when Triton is imported."""
NUM_WARPS = 4
"""Warps of every launch of the other kernels: they reduce a row by a tree over the warps."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def dot(a, b, INTERPRETED: tl.constexpr):
    """a [R, K] · b [K, C] in fp32. Interpreted, a sum of products: NumPy's product of matrices gives a row other bits
    in another place of the tile, and knows no bf16."""
    if INTERPRETED:
        result = tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], axis=1)
    else:
        result = tl.dot(a, b, input_precision="ieee")
    return result


@triton.jit
def rounded(x, kind: tl.constexpr, INTERPRETED: tl.constexpr):
    """fp32 ``x`` in the type ``kind``, to nearest, ties to even. The interpreter by itself cuts bf16 off."""
    if INTERPRETED and kind == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(kind)


def check(name: str, *tensors: torch.Tensor) -> None:
    """ValueError for a tensor of a type that the kernels do not take, or on another device than the first one's."""
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise ValueError(f"{name}: dtype {tensor.dtype}; allowed: {allowed}")
        if tensor.device != tensors[0].device:
            raise ValueError(f"{name}: tensors on {tensors[0].device} and {tensor.device}")
    if tensors[0].device.type == "cpu" and not INTERPRETED:
        raise ValueError(f"{name}: Triton compiles nothing for a CPU; set TRITON_INTERPRET=1 before Triton is imported")


def whole(size: int) -> int:
    """The power of two that a reduction over ``size`` elements is padded to."""
    return triton.next_power_of_2(size)


class Tile(NamedTuple):
    """What one program computes. It reduces nothing over warps, so that they may be as many as are fast."""

    rows: int
    columns: int
    terms: int  # of a sum, that one product takes
    warps: int


SMALL = Tile(64, 64, 32, 4)
LARGE = {
    torch.float32: Tile(64, 128, 32, 4),
    torch.bfloat16: Tile(128, 128, 64, 8),
    torch.float16: Tile(128, 128, 64, 8),
}
"""Of many rows. Compiled, a number has the same bits in every tile: its terms are added in their order, in fp32 one by
one and in 16 bits inside the tensor cores. tests/unit/exact/test_kernels_compiled.py reads that in the code; an H200
has shown it (docs/gpu.md)."""
MANY, MANY_OF_EXPERT = 1024, 128
"""Rows of a product, and of each expert on average, from which large tiles leave no processor of a GPU unused."""


def tile_of(dtype: torch.dtype, rows: int, experts: int = 1) -> Tile:
    """Return the tile of a product of ``rows``, spread over ``experts``. Interpreted, it is always the small one: NumPy
    adds each product's terms by themselves."""
    many = rows >= max(MANY, experts * MANY_OF_EXPERT)
    return LARGE[dtype] if many and not INTERPRETED else SMALL


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
    x, weight, offsets, out, ends, num_experts, num_columns, width, stride_x, stride_weight, stride_out,
    EXPERTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One of all experts' tiles, laid end to end: each finds its expert itself, so that no launch depends on counts."""
    number = tl.program_id(0)
    place = tl.arange(0, EXPERTS)
    stops = tl.load(ends + place, mask=place < num_experts, other=0).to(tl.int32)
    begins = tl.load(ends + place - 1, mask=(place > 0) & (place < num_experts), other=0).to(tl.int32)
    tiles = tl.where(place < num_experts, (stops - begins + BLOCK_ROWS - 1) // BLOCK_ROWS, 0)
    last_tiles = tl.cumsum(tiles, axis=0)
    is_mine = (number < last_tiles) & (number >= last_tiles - tiles)  # of one expert; of none beyond the last tile
    expert = tl.sum(tl.where(is_mine, place, 0), axis=0)
    first = tl.sum(tl.where(is_mine, begins + (number - last_tiles + tiles) * BLOCK_ROWS, 0), axis=0)
    end = tl.sum(tl.where(is_mine, stops, 0), axis=0)
    if end > 0:
        rows = first + tl.arange(0, BLOCK_ROWS)
        columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        _tile(
            x, weight + tl.load(offsets + expert), out, rows, rows < end, columns, num_columns, width,
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
    tile = tile_of(x.dtype, len(x))
    if out.numel():
        _linear[triton.cdiv(len(x), tile.rows), triton.cdiv(len(weight), tile.columns)](
            x, weight, out, len(x), len(weight), x.size(1), x.stride(0), weight.stride(0), out.stride(0),
            *tile[:3], INTERPRETED, num_warps=tile.warps,
        )  # fmt: skip
    return out


@functools.lru_cache(maxsize=1024)  # two a layer
def _offsets(places: tuple[int, ...], element: int, device: torch.device) -> torch.Tensor:
    """[E] int64: what lies between each weight and the first one, in elements of ``element`` bytes."""
    if any((place - places[0]) % element for place in places):
        raise ValueError(f"grouped_linear: weights that do not lie a whole number of {element} bytes apart")
    return torch.tensor([(place - places[0]) // element for place in places], dtype=torch.int64, device=device)


def weight_offsets(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the offsets of experts' weights in memory from the first one, made once for each place."""
    places = tuple(weight.data_ptr() for weight in weights)
    return _offsets(places, weights[0].element_size(), weights[0].device)


def grouped_linear(x: torch.Tensor, weights: Sequence[torch.Tensor], ends: torch.Tensor) -> torch.Tensor:
    """Rows of ``x``, sorted by expert, each times its expert's weight.

    Args:
        x: [N, K].
        weights: E of [M, K], each where it lies, with the same strides.
        ends: [E] int32 or int64 on the device, the number of rows of experts 0 … e. Rows behind the last end are not
            written: a fixed N of at least all rows lets a CUDA graph be replayed with other routes.

    Returns:
        [N, M] in the dtype of ``x``.

    Raises:
        ValueError: other shapes, layouts and types.
    """
    check("grouped_linear", x, *weights)
    first, num_experts = weights[0], len(weights)
    alike = all(w.shape == first.shape and w.stride() == first.stride() and w.dtype == first.dtype for w in weights)
    fits = alike and x.dim() == first.dim() == 2 and x.size(1) == first.size(1) and ends.shape == (num_experts,)
    if not fits or x.stride(1) != 1 or first.stride(1) != 1 or ends.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"grouped_linear: {tuple(x.shape)}, {num_experts} of {tuple(first.shape)} and {tuple(ends.shape)} "
            f"{ends.dtype}; expected [N, K], E of [M, K], all alike, and [E] of integers, rows contiguous"
        )
    out = x.new_empty(len(x), len(first))
    tile = tile_of(x.dtype, len(x), num_experts)
    most_tiles = len(x) // tile.rows + min(num_experts, len(x))  # an expert's last tile may be nearly empty
    if out.numel():
        _grouped[most_tiles, triton.cdiv(len(first), tile.columns)](
            x, first, weight_offsets(weights), out, ends, num_experts, len(first), x.size(1),
            x.stride(0), first.stride(0), out.stride(0),
            whole(num_experts), *tile[:3], INTERPRETED, num_warps=tile.warps,
        )  # fmt: skip
    return out
