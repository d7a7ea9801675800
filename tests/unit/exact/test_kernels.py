"""Exact mode's Triton kernels, in Triton's interpreter: bits of a row in any batch, values against float64.

70 random batches a kernel and type, in `make test` six in bf16. Errors are shares of bounds derived from the
arithmetic, for the kernel and for the CPU's function of the same algorithm.
"""

import pytest

from tests.support.kernels import KERNELS, assert_sound, run
from tests.support.slow import slow_but
from tests.support.te import MISSING

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

BATCHES = {"six batches": (6, 1), "70 batches": (70, 3)}  # and of how many types


@pytest.fixture(scope="module", params=slow_but(["six batches"], BATCHES))
def results(request):
    return run(*BATCHES[request.param])


@pytest.mark.parametrize("name", [kernel.__name__ for kernel in KERNELS])
def test_a_row_has_the_same_bits_in_every_batch_and_the_right_values(results, name):
    assert_sound(results[name], name)
