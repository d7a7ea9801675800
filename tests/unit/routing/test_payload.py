"""Routes of a response: which rows are malformed, on the CPU and on the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_rl.routing import RouteShape, missing_id
from megatron_rl.routing.payload import malformed_on, malformed_rows


@pytest.mark.parametrize(
    ("row", "is_wrong"),
    [([0, 7], False), ([3, 3], True), ([0, 8], True), ([255, 255], False), ([255, 1], True)],
)
def test_what_counts_as_malformed(row, is_wrong):
    assert malformed_rows(np.array([[row]], dtype=np.uint8), 8)[0, 0] == is_wrong


def test_malformed_rows_are_those_of_the_definition():
    """Against the definition written out, on random rows of every kind: doubled, out of range, without a record."""
    random = np.random.default_rng(0)
    routes = random.integers(0, 10, (50, 6, 3)).astype(np.uint8)
    routes[random.random((50, 6)) < 0.2] = missing_id(routes.dtype)
    expected = [
        [set(row) != {255} and (len(set(row)) < len(row) or max(row) >= 8) for row in token]
        for token in routes.tolist()
    ]
    assert (malformed_rows(routes, 8) == expected).all()
    assert 20 < np.sum(expected) < 280


@pytest.mark.parametrize(("num_experts", "dtype"), [(8, np.uint8), (300, np.uint16)])
def test_the_device_finds_the_same_malformed_rows(num_experts, dtype):
    random = np.random.default_rng(0)
    routes = random.integers(0, num_experts + 2, (500, 3, 4)).astype(dtype)
    routes[random.random((500, 3)) < 0.1] = missing_id(np.dtype(dtype))
    small = routes if dtype == np.uint8 else routes.astype(np.int32)
    expected = malformed_rows(routes, num_experts)
    assert 0 < expected.sum() < expected.size
    assert (malformed_on(torch.from_numpy(small), num_experts).numpy() == expected).all()


def test_negative_ids_are_malformed():
    assert malformed_rows(np.array([[[-1, 3]]], dtype=np.int64), 8)[0, 0]


@pytest.mark.parametrize(("num_experts", "dtype"), [(8, np.uint8), (255, np.uint8), (256, np.uint16)])
def test_every_expert_and_no_record_have_a_number(num_experts, dtype):
    shape = RouteShape(num_experts, 2, (0,))
    assert shape.dtype == dtype
    assert missing_id(shape.dtype) >= num_experts
