"""Weights rounded to fp8, int8 or int4 and back, as an engine computes with them that stores codes and scales.

A scale is shared by a block of a matrix. Codes are weight / scale, rounded to nearest even; a weight becomes code ·
scale, rounded once to its own dtype. fp8 is e4m3fn, with the scales and the order of operations of vLLM 0.30's own
quantization while loading: amax / 448 with its floors, and the factor 1 / scale but for one scale a row, which divides.
int8 and int4 are symmetric: amax / 127 and amax / 7.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_rl.config.rollout import Block, WeightType

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
INT_MAX = {"int8": 127.0, "int4": 7.0}
BLOCK_FLOOR = 1e-4  # of the largest magnitude in a block
ROW_FLOOR = 1.0 / (FP8_MAX * 512.0)  # of a row's scale
Reduce = Callable[[torch.Tensor], torch.Tensor]


def rounded(weight: torch.Tensor, kind: WeightType, block: Block, over_ranks: Reduce | None = None) -> torch.Tensor:
    """``weight`` [outputs, inputs] after a way through ``kind``; same shape and dtype.

    ``block``: rows and columns that share a scale; None: all of them. Blocks start at the first row and column, and
    those at the end may be smaller. ``over_ranks``: largest magnitudes of this part → of the matrix, where other ranks
    hold parts that share its scales.
    """
    rows, columns = block[0] or weight.shape[0], block[1] or weight.shape[1]
    padding = (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows)
    blocks = torch.nn.functional.pad(weight.float(), padding)
    padded = blocks.shape
    blocks = blocks.view(padded[0] // rows, rows, padded[1] // columns, columns)
    largest = blocks.abs().amax(dim=(1, 3), keepdim=True)
    if over_ranks is not None:
        largest = over_ranks(largest)
    back = _through_fp8(blocks, largest, block) if kind == "fp8" else _through_int(blocks, largest, INT_MAX[kind])
    return back.view(padded)[: weight.shape[0], : weight.shape[1]].to(weight.dtype)


def _through_fp8(blocks: torch.Tensor, largest: torch.Tensor, block: Block) -> torch.Tensor:
    if block == (1, None):
        scale = (largest / FP8_MAX).clamp_min(ROW_FLOOR)
        codes = blocks / scale
    elif block == (None, None):
        scale = _nonzero(largest / FP8_MAX)
        codes = blocks * (1.0 / scale)
    else:
        scale = largest.clamp(BLOCK_FLOOR) / FP8_MAX
        codes = blocks * (1.0 / scale)
    return codes.clamp_(-FP8_MAX, FP8_MAX).to(FP8).float() * scale


def _through_int(blocks: torch.Tensor, largest: torch.Tensor, top: float) -> torch.Tensor:
    scale = _nonzero(largest / top)
    return (blocks / scale).round_().clamp_(-top, top) * scale


def _nonzero(scale: torch.Tensor) -> torch.Tensor:
    """A block of zeros has any scale."""
    return torch.where(scale == 0, 1.0, scale)
