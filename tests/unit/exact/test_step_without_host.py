"""A step of exact generation on CUDA makes no host wait, and its launches depend on shapes alone."""

from __future__ import annotations

import pytest

from tests.support.step_without_values import ROWS, run
from tests.support.te import MISSING

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.fixture(scope="module")
def found():
    return run()


def test_every_way_to_read_a_value_is_refused(found):
    assert all(found["refused"].values()), found["refused"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_step_reads_nothing_and_launches_every_kernel(found, dtype):
    """Eight experts of which a row takes two: 128 rows of experts are two tiles, and eight that may not be full."""
    grids = found[dtype]
    kernels = {"_linear", "_grouped", "_rms_norm", "_rotate", "_gated_silu", "_route", "_combine", "_token_statistics"}
    assert set(grids) == kernels | {"_attend_part", "_join_parts"}
    assert grids["_grouped"] == [2 * ROWS // 64 + 8, 2]
    assert grids["_attend_part"] == [ROWS, 2, 3], "40 pages are three splits of 16"
