"""Rounding of weights: closed forms, an implementation in numpy from the definitions, and vLLM's own function."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from megatron_rl.config.rollout import OWN_BLOCK
from megatron_rl.rollout.weights import rounded
from tests.support.plain_rounding import E4M3, plain_rounded, to_e4m3

KINDS = ("fp8", "int8", "int4")
BLOCKS = ((128, 128), (1, None), (None, None), (1, 128), (64, None))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CASES = list(itertools.product(KINDS, BLOCKS, DTYPES))


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_our_table_of_e4m3_is_torchs_type():
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert codes.double().tolist() == E4M3.tolist()
    assert E4M3[-1] == 448
    middles = (E4M3[1:] + E4M3[:-1]) / 2
    points = np.concatenate([E4M3, middles, np.nextafter(np.float32(middles), np.float32(0))]).astype(np.float32)
    assert torch.from_numpy(points).to(torch.float8_e4m3fn).double().tolist() == to_e4m3(points).tolist()


@pytest.mark.parametrize(("kind", "block", "dtype"), CASES)
def test_bit_for_bit_what_numpy_makes_of_the_definitions(kind, block, dtype):
    """300 × 200 is no multiple of any block; a block of zeros, one of tiny numbers and an outlier are in it."""
    weight = normal(300, 200, dtype=dtype)
    weight[128:256, :128], weight[256:, 128:], weight[3, 5] = 0, weight[256:, 128:] * 1e-6, 300
    rounding = rounded(weight, kind, block)
    assert rounding.dtype == dtype
    assert torch.equal(bits(rounding), bits(plain_rounded(weight, kind, block)))
    assert not torch.equal(rounding, weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bit_for_bit_what_vllm_makes_of_blocks(dtype):
    """Uncompiled: Inductor's cache may hold code for another instruction set, which computes wrong scales."""
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    weight = normal(300, 200, dtype=dtype)
    with torch.compiler.set_stance("force_eager"):  # Inductor's cache may hold code for other vector instructions
        codes, scales = per_block_cast_to_fp8(weight, block_size=[128, 128])
    every = scales.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
    assert torch.equal(rounded(weight, "fp8", (128, 128)), (codes.float() * every).to(dtype))


@pytest.mark.parametrize(("kind", "block", "dtype"), CASES)
def test_what_is_rounded_stays_as_it_is(kind, block, dtype):
    """In 16 bits exactly: the largest number of a block gives the same scale again. In fp32 to one rounding of it."""
    once = rounded(normal(300, 200, dtype=dtype), kind, block)
    again = rounded(once, kind, block)
    if dtype == torch.float32:
        assert ((again - once).abs() <= 2 * torch.finfo(dtype).eps * once.abs()).all()
    else:
        assert torch.equal(again, once)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_the_type_has_pass(kind):
    """Times a power of two, which every scale then is."""
    numbers = torch.tensor(E4M3) if kind == "fp8" else torch.arange({"int8": 128, "int4": 8}[kind])
    row = torch.cat([numbers, -numbers]).float()[None] / 64
    assert torch.equal(rounded(row, kind, (1, None)), row)
    between = row + torch.where(row == row.max(), 0.0, 2.0**-20)
    assert torch.equal(rounded(between, kind, (1, None)), row)


@pytest.mark.parametrize("kind", KINDS)
def test_no_weight_moves_further_than_half_a_step_of_its_block(kind):
    """Steps: of integers the scale; of e4m3 an eighth of the power of two below a number, at least 2^-9 scales."""
    weight, (rows, columns) = normal(256, 256), OWN_BLOCK[kind]
    columns = columns or 256
    largest = weight.view(256 // rows, rows, 256 // columns, columns).abs().amax((1, 3), keepdim=True)
    scale = (largest / {"fp8": 448, "int8": 127, "int4": 7}[kind]).expand(-1, rows, -1, columns).reshape(256, 256)
    step = scale
    if kind == "fp8":
        step = scale * torch.exp2(torch.floor(torch.log2((weight / scale).abs())).clamp(min=-6) - 3)
    moved = (rounded(weight, kind, OWN_BLOCK[kind]) - weight).abs()
    assert (moved <= step / 2 + 4 * torch.finfo(torch.float32).eps * weight.abs().max()).all()
    assert (moved > step / 4).float().mean() > 0.3  # evenly spread: a half of them


def test_blocks_do_not_know_of_each_other():
    weight = normal(256, 256)
    other = weight.clone()
    other[:128, :128] *= 7
    same = rounded(other, "fp8", (128, 128)) == rounded(weight, "fp8", (128, 128))
    assert same[128:].all()
    assert same[:128, 128:].all()
    assert not same[:128, :128].any()


def test_parts_on_several_ranks_share_the_scale_that_spans_them():
    whole = normal(128, 64)
    halves = whole.split(64)
    largest = whole.abs().max()
    parts = [rounded(half, "fp8", (None, None), lambda own: torch.maximum(own, largest)) for half in halves]
    assert torch.equal(torch.cat(parts), rounded(whole, "fp8", (None, None)))
    assert not torch.equal(torch.cat([rounded(half, "fp8", (None, None)) for half in halves]), torch.cat(parts))
