"""Triton's compiler takes every kernel of exact mode for an A100, an H100 and a B200."""

import pytest

from tests.support.compiled_kernels import run
from tests.support.slow import slow_but
from tests.support.te import MISSING

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

LINEAR = {f"{name}{rows}" for name in ("_linear", "_grouped") for rows in ("", " of many rows")} | {
    "_grouped of few rows an expert"
}
PRODUCTS = LINEAR | {"_attend", "_attend_part"}
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
SHARED = {"80": 163 << 10, "90": 227 << 10, "100": 227 << 10}
"""Bytes of shared memory that one program may have (CUDA C++ Programming Guide, technical specifications)."""

MOST_SPILLED = {"80": 64, "90": 64, "100": 128}
"""Bytes of a thread: 16 and 32 of its 255 registers. What does not fit there is read from memory at every use."""


@pytest.fixture(scope="module", params=slow_but(["90"], SHARED))
def capability(request):
    return request.param


@pytest.fixture(scope="module")
def compiled(capability):
    return run(capability)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_kernel_compiles(compiled, dtype):
    assert set(compiled[dtype]) == PRODUCTS | ROWS
    assert all(kernel["bytes"] for kernel in compiled[dtype].values())


def test_every_program_has_the_memory_of_its_gpu(compiled, capability):
    """Shared memory and registers."""
    for dtype in compiled.values():
        assert {name: k["shared"] for name, k in dtype.items() if k["shared"] > SHARED[capability]} == {}
        assert {name: k["spilled"] for name, k in dtype.items() if k["spilled"] > MOST_SPILLED[capability]} == {}


def test_16_bit_products_are_those_of_the_tensor_cores(compiled):
    assert all(compiled["bfloat16"][name]["tensor cores"] for name in PRODUCTS)
    assert not any(compiled["float32"][name]["tensor cores"] for name in PRODUCTS), "fp32 in full"


def test_terms_of_a_product_are_added_in_their_order_whatever_the_tile(compiled):
    """No sum is made of parts: tensor cores add to the total itself, and fp32 fuses each product with its sum."""
    assert not any(compiled[dtype][name]["added"] for dtype in compiled for name in LINEAR)
    assert all(compiled["float32"][name]["fused"] for name in LINEAR)
    assert [compiled["bfloat16"][name]["warps"] for name in sorted(LINEAR)] == [4, 4, 8, 4, 8], (
        "large tiles: of many rows, and of every expert"
    )


def test_attention_fuses_no_product_with_a_sum(compiled):
    """Its kernels share their arithmetic, and a compiler may fuse it in one of them and not in another."""
    assert not any(compiled["bfloat16"][name]["fused"] for name in ("_attend", "_attend_part", "_join_parts"))
