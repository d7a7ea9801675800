"""Sums, maxima and minima of metrics: sums are in float64, and parts together are the whole."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.objective.aggregation import Collector, MetricStats


def collected(values: torch.Tensor, mask: torch.Tensor) -> MetricStats:
    collector = Collector()
    kept = values * mask
    collector.add("halves", kept, scale=0.5)
    collector.add("count", mask)
    collector.add_moments("x", kept)
    collector.add_product("x·m", kept, mask.to(values.dtype))
    collector.add_vector("row", kept.sum(dim=1)[:2])
    collector.range_of("x", values, mask, smallest=True)
    return collector.stats()


def test_statistics_by_hand():
    stats = collected(torch.tensor([[1.0, 2.0], [-4.0, 8.0]]), torch.tensor([[True, True], [True, False]]))
    sums = dict(zip(stats.sum_names, stats.sums.tolist(), strict=True))
    assert sums == {"halves": -0.5, "count": 3, "x": -1, "x²": 21, "x·m": -1, "row[0]": 3, "row[1]": -4}
    assert (stats.max_names, stats.maxs.tolist()) == (("x",), [2.0])
    assert (stats.min_names, stats.mins.tolist()) == (("x",), [-4.0])


def test_sums_of_float32_are_taken_in_float64():
    values = torch.tensor([1e8, 1.0, -1e8], dtype=torch.float32)
    collector = Collector()
    collector.add("sum", values)
    collector.add_product("product", values, torch.ones(3))
    assert collector.stats().sums.tolist() == [1.0, 1.0]
    assert collector.stats().sums.dtype == torch.float64


def test_parts_together_are_the_whole():
    values, mask = torch.arange(8.0).reshape(4, 2) - 3, torch.tensor([[1, 1], [0, 0], [1, 0], [1, 1]]).bool()
    names = ("halves", "count", "x", "x²", "x·m")
    whole, parts = collected(values, mask), [collected(values[:2], mask[:2]), collected(values[2:], mask[2:])]
    merged = MetricStats.merge(parts)
    assert merged.sum_names == whole.sum_names
    for name in names:  # integers and halves: exact in any order
        place = whole.sum_names.index(name)
        assert merged.sums[place] == whole.sums[place]
    assert (merged.maxs.tolist(), merged.mins.tolist()) == (whole.maxs.tolist(), whole.mins.tolist()) == ([4.0], [-3.0])


def test_statistics_of_different_configurations_are_not_merged():
    one, other = Collector(), Collector()
    one.add("a", torch.ones(1))
    other.add("b", torch.ones(1))
    with pytest.raises(AssertionError, match="different configurations"):
        MetricStats.merge([one.stats(), other.stats()])


@pytest.mark.parametrize("size", [0, 2])
def test_nothing_under_the_mask_has_no_range(size):
    collector = Collector()
    collector.add("a", torch.ones(1))
    collector.range_of("x", torch.ones(size), torch.zeros(size, dtype=torch.bool), smallest=True)
    assert (collector.stats().maxs.tolist(), collector.stats().mins.tolist()) == ([-math.inf], [math.inf])
