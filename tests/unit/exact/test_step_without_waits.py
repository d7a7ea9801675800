"""A step of exact generation on CUDA makes no host wait, and its launches depend on shapes alone."""

import pytest

from megatron_rl.instruments.plan import generation as model
from tests.support.step_without_values import ROWS, run
from tests.support.te import MISSING

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

KERNELS = {
    "_linear",
    "_grouped",
    "_rms_norm",
    "_rotate",
    "_gated_silu",
    "_route",
    "_sort_by_expert",
    "_combine",
    "_token_statistics",
    "_attend_part",
    "_join_parts",
}


@pytest.fixture(scope="module")
def steps():
    return run()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_step_reads_nothing_and_launches_every_kernel(steps, dtype):
    """Eight experts of which a row takes two: 128 rows of experts are two tiles, and eight that may not be full."""
    grids = steps[dtype]["grids"]
    assert set(grids) == KERNELS
    assert grids["_grouped"] == [2 * ROWS // 64 + 8, 2]
    assert grids["_attend_part"] == [ROWS, 2, 3], "40 pages are three splits of 16"
    assert not steps[dtype]["exchanged"]


def test_ranks_that_share_weights_read_nothing_and_exchange_known_amounts(steps):
    """Two ranks have half of the rows each, four see each other's, and each returns a place for every choice."""
    width, own = 128, ROWS // 2
    of_layer = [
        ("all_gather_into_tensor", ROWS * width),  # partial sums of attention
        ("all_gather_into_tensor", own * width),  # rows to the experts
        ("all_to_all_single", 4 * own * 2 * width),  # and back
        ("all_gather_into_tensor", own * width),  # to the ranks that share the rows
    ]
    exchanged = [tuple(one) for one in steps["TP2 EP4"]["exchanged"]]
    assert exchanged == [("all_gather_into_tensor", ROWS * width), *of_layer]
    assert set(steps["TP2 EP4"]["grids"]) == KERNELS


def test_plan_counts_the_kernels_of_a_layer(steps):
    assert steps["bf16"]["of_layer"] == model.KERNELS
    assert steps["TP2 EP4"]["of_layer"] == model.KERNELS + 3 + model.KERNELS_OF_EXPERTS  # a sum of two ranks: three
