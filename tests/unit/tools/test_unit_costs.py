"""Unit costs from measurements."""

from __future__ import annotations

import numpy as np
import pytest

from tools.bench.unit_costs import Cost, Setting, fit, line, unit_costs


@pytest.mark.parametrize("costs", [[1.0, 0, 0, 2.0, 5.0], [0, 3.0, 0, 0, 0], [0.1, 0.2, 0.3, 0.4, 0.5]])
def test_costs_are_found_again(costs):
    rows = np.random.default_rng(0).uniform(1, 100, (12, 5))
    assert fit(rows, rows @ np.array(costs)) == pytest.approx(costs, abs=1e-6)


def test_no_cost_is_negative():
    rows = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    fitted = fit(rows, np.array([3.0, 2.0, 1.0]))
    assert (fitted >= 0).all()
    assert fitted[0] > 0


def test_what_costs_nothing_is_nothing():
    assert fit(np.ones((4, 5)), np.zeros(4)).tolist() == [0.0] * 5


def test_sockets_are_aline():
    assert line({4: 11, 8: 19, 16: 35}) == [3.0, 2.0]


def test_unit_costs_of_steps_that_cost_what_they_hold():
    """Two seconds a token of a replica of four ranks, measured over two passes, and a byte a rank."""
    costs = {}
    for ranks, sequences, length, routes in (
        (4, 16, 10, True),
        (8, 64, 40, True),
        (8, 32, 7, False),
        (16, 99, 5, True),
    ):
        tokens = sequences * length / (ranks // 4)
        costs[Setting(ranks, sequences, length, routes)] = {"pack": Cost(2 * tokens, float(ranks), 0.0)}
    units = unit_costs(costs, route_bytes=3, tensor=4)["pack"]
    assert units["seconds"] == pytest.approx([1.0, 0, 0, 0, 0])
    assert units["received"] == pytest.approx([0, 0, 0, 0, 1.0])
    assert units["peak"] == [0.0] * 5
