"""Telemetry of a router against a loop, and metrics of counts."""

from __future__ import annotations

import numpy as np
import torch

from megatron_rl.routing import LayerTelemetry
from megatron_rl.routing.layout import MARGIN_BINS, margin_quantiles, router_metrics
from tests.support.rounding import rounded


def test_telemetry_against_a_loop():
    torch.manual_seed(0)
    probs = torch.randn(200, 8).softmax(1)
    own = probs.topk(2, dim=1).indices
    recorded = own.flip(1).clone()  # another order is no disagreement
    recorded[::10, 0] = (own.min(1).values[::10] + own.max(1).values[::10] + 1) % 8
    counted = torch.arange(200) % 3 > 0
    layer = LayerTelemetry(torch.device("cpu"))
    flips = layer.observe(probs, own, recorded, counted)
    expected = [bool(c) and set(a.tolist()) != set(b.tolist()) for a, b, c in zip(own, recorded, counted, strict=True)]
    assert flips.tolist() == expected
    assert sum(expected) > 5
    packed = layer.packed().numpy()
    assert packed[0] == counted.sum() - sum(expected)
    assert packed[1] == packed[2:].sum() == counted.sum()
    margins = np.sort([(p[0] - p[1]) for p in probs.sort(1, descending=True).values[counted][:, 1:3].numpy()])
    for q, value in margin_quantiles(packed[2:]).items():
        exact = np.quantile(margins, int(q[-2:]) / 100)
        assert 10**-0.15 < value / exact < 10**0.15, q


def test_metrics_are_ratios_of_counts():
    counts = np.zeros((2, 2 + MARGIN_BINS))
    counts[:, :2] = [[90, 100], [100, 100]]
    sums = {"flipped": 10, "tokens": 100, "due": 220, "missing": 20, "bytes_per_token": 12}
    measured = router_metrics([1, 3], counts, **sums, is_replayed=True)
    assert measured["router/agree_frac"] == rounded(0.95)
    assert measured["router/agree_frac/layer_1"] == rounded(0.9)
    assert measured["router/agree_frac/layer_3"] == 1.0
    assert measured["router/any_flip_frac"] == rounded(0.1)
    assert measured["router/replay_coverage"] + measured["router/fallback_frac"] == 1.0
    assert measured["router/fallback_frac"] == rounded(20 / 220)


def test_a_share_of_no_rows_is_absent():
    nothing = {"flipped": 0, "tokens": 0, "due": 0, "missing": 0, "bytes_per_token": 12}
    counts = np.zeros((2, 2 + MARGIN_BINS))
    assert router_metrics([1, 3], counts, **nothing, is_replayed=True) == {"router/payload_bytes": 12.0}
