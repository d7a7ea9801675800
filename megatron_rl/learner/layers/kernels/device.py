"""What all kernels share: how products are taken, and checks of what they are given."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Kernels run on CPU tensors, in Python. Decided by TRITON_INTERPRET when Triton is imported."""
NUM_WARPS = 4
"""Of every launch: a tile's reduction is a tree over the warps."""
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
