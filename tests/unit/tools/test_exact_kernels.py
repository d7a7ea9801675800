"""The program of docs/gpu.md's figures, on the tiny model in Triton's interpreter: its lines, and that bits agree."""

from __future__ import annotations

import re

import pytest

from tests.support.te import MISSING, run_interpreted

pytestmark = [pytest.mark.slow, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]
TINY = ("--model", "recipes/tiny/model", "--rows", "16")


def test_rows_have_the_same_bits_in_every_batch():
    """The program's status is 0."""
    printed = run_interpreted("tools.dev.exact_kernels", *TINY, "--dtypes", "fp32", "--steps", "2")
    assert len(re.findall(r"TFLOP/s.*; other bits in 0 ", printed)) == 3 + 4 + 3


def test_speed_with_other_tiles():
    printed = run_interpreted("tools.dev.exact_kernels", *TINY, "--tiles", "16,16,16,4", "64,64,32,4")
    assert [line.split(":")[0] for line in printed.splitlines() if not line.startswith(" ")] == [
        "16,16,16,4",
        "64,64,32,4",
    ]
    assert len(re.findall(r"  .*, \d+ rows: .* TFLOP/s, \d+ µs", printed)) == 2 * (3 + 2)
