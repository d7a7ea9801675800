"""A product of matrices by a Triton kernel that names no precision, as vLLM's experts and attention name none."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 32


@triton.jit
def _product(a, b, out, inner, A_ROW: tl.constexpr, B_ROW: tl.constexpr, TILE: tl.constexpr):
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    steps = tl.arange(0, TILE)
    result = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, inner, TILE):
        left = tl.load(a + rows * A_ROW + start + steps[None, :])
        right = tl.load(b + (start + steps[:, None]) * B_ROW + columns)
        result = tl.dot(left, right, acc=result)
    tl.store(out + rows * B_ROW + columns, result)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [R, K] · b [K, C] in fp32; R, K and C are multiples of `TILE`, both row by row in memory."""
    out = torch.empty(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    grid = (a.shape[0] // TILE, b.shape[1] // TILE)
    _product[grid](a, b, out, a.shape[1], a.shape[1], b.shape[1], TILE)
    return out
