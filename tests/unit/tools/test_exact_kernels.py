"""The program of docs/gpu.md's figures, on the tiny model in Triton's interpreter: its lines, and that bits agree."""

import re

import pytest

from tests.support.te import MISSING, run_interpreted

pytestmark = [pytest.mark.slow, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]
TINY = ("--model", "recipes/tiny/model", "--rows", "16")


def test_rows_have_the_same_bits_in_every_batch():
    """The program's status is 0."""
    printed = run_interpreted("tools.dev.exact_kernels", *TINY, "--dtypes", "fp32", "--steps", "2")
    assert len(re.findall(r"TFLOP/s.*; other bits in 0 ", printed)) == 3 + 4 + 3
