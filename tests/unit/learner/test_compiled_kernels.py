"""Triton's compiler takes every kernel of exact mode for an H100."""

from __future__ import annotations

import pytest

from tests.support.compiled_kernels import run
from tests.support.te import MISSING

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

PRODUCTS = {"_linear", "_grouped", "_attend", "_attend_part"}
ROWS = {
    "_rms_norm",
    "_rotate",
    "_gated_silu",
    "_route",
    "_combine",
    "_token_statistics",
    "_join_parts",
    "_sort_by_expert",
}


@pytest.fixture(scope="module")
def found():
    return run()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_kernel_compiles(found, dtype):
    assert set(found[dtype]) == PRODUCTS | ROWS
    assert all(kernel["bytes"] for kernel in found[dtype].values())


def test_16_bit_products_are_those_of_the_tensor_cores(found):
    assert all(found["bfloat16"][name]["tensor cores"] for name in PRODUCTS)
    assert not any(found["float32"][name]["tensor cores"] for name in PRODUCTS), "fp32 in full"


def test_attention_fuses_no_product_with_a_sum(found):
    """Its kernels share their arithmetic, and a compiler may fuse it in one of them and not in another."""
    assert not any(found["bfloat16"][name]["fused"] for name in ("_attend", "_attend_part", "_join_parts"))
