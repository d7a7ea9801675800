"""The kernel by which a GPU's products are measured."""

from __future__ import annotations

import pytest

from tests.support.te import MISSING, run_interpreted


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_the_kernel_that_measures_multiplies():
    """In Triton's interpreter, which knows fp32 alone."""
    assert run_interpreted("tests.unit.process.programs.triton_product").splitlines()[-1] == "fp32"
