"""Routes of a response: which rows are malformed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_rl.routing import RouteShape, missing_id
from megatron_rl.routing.payload import malformed_rows


@pytest.mark.parametrize(
    ("row", "is_wrong"),
    [([0, 7], False), ([3, 3], True), ([0, 8], True), ([255, 255], False), ([255, 1], True)],
)
def test_what_counts_as_malformed(row, is_wrong):
    assert malformed_rows(torch.tensor([[row]], dtype=torch.uint8), 8)[0, 0] == is_wrong


@pytest.mark.parametrize(("num_experts", "dtype"), [(8, np.uint8), (300, np.uint16)])
def test_malformed_rows_are_those_of_the_definition(num_experts, dtype):
    """Against the definition written out, on random rows of every kind: doubled, out of range, without a record."""
    random, missing = np.random.default_rng(0), missing_id(np.dtype(dtype))
    routes = random.integers(0, num_experts + 2, (50, 6, 3)).astype(dtype)
    routes[:, :, 1] = np.where(random.random((50, 6)) < 0.2, routes[:, :, 0], routes[:, :, 1])
    routes[random.random((50, 6)) < 0.2] = missing
    expected = [
        [set(row) != {missing} and (len(set(row)) < len(row) or max(row) >= num_experts) for row in token]
        for token in routes.tolist()
    ]
    small = torch.from_numpy(routes if dtype == np.uint8 else routes.astype(np.int32))
    assert (malformed_rows(small, num_experts).numpy() == expected).all()
    assert 20 < np.sum(expected) < 280


@pytest.mark.parametrize(("num_experts", "dtype"), [(8, np.uint8), (255, np.uint8), (256, np.uint16)])
def test_every_expert_and_no_record_have_a_number(num_experts, dtype):
    shape = RouteShape(num_experts, 2, (0,))
    assert shape.dtype == dtype
    assert missing_id(shape.dtype) >= num_experts
