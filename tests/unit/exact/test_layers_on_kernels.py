"""Exact mode on its Triton kernels, in Triton's interpreter: generation, gate and gradients of a small model."""

import pytest
import torch

from tests.support.exact_on_kernels import DTYPES, KERNELS, run
from tests.support.rounding import gamma
from tests.support.slow import slow_but
from tests.support.te import MISSING

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

SUMS = 20 * 128
"""Roundings in fp32 on the longest way: twenty products, forward and back, whose sums have 128 terms."""
STORED = 64
"""Roundings to 16 bits on it: what each of them and of the functions between them puts out."""


@pytest.mark.parametrize("dtype", slow_but(["bf16"], DTYPES))
def test_the_gate_is_zero_on_kernels(dtype):
    result = run(dtype)
    assert result["gate"] == result["rho_std"] == 0.0
    assert set(result["calls"]) == set(KERNELS), "a kernel that the model does not call"
    assert not result["calls after"], "the CPU's functions call kernels"


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [
        pytest.param("fp32", gamma(SUMS, torch.float32), marks=pytest.mark.slow),
        ("bf16", gamma(STORED, torch.bfloat16)),
    ],
)
def test_gradients_are_those_of_the_cpu(dtype, bound):
    """Where forward passes differ by rounding, gradients do. Not in fp16, whose range the cut model's leave."""
    assert run(dtype)["nonzero"] > 10
    assert run(dtype)["error"] <= bound
