"""Which routes a rank gets: slices, padding, checks that are not repeated; telemetry of a router."""

from unittest import mock

import numpy as np
import pytest
import torch

from megatron_rl.layers.context import ContextShare, cut_ranges
from megatron_rl.routing import LayerTelemetry, missing_id, pack_routes, packed_keys
from megatron_rl.routing.layout import (
    MARGIN_BINS,
    PADDING_ID,
    CheckedRoutes,
    margin_quantiles,
    padding_routes,
    parts_in,
    router_metrics,
)
from megatron_rl.routing.payload import malformed_rows
from tests.support.rounding import rounded
from tests.support.routes import SHAPE, batch_with_routes, slices


def test_slices_of_context_parallel_ranks_are_those_of_their_tokens():
    """Padding after each sequence; shares that begin and end inside sequences, cut again by tensor-parallel ranks."""
    batch, size = batch_with_routes(), 2
    lengths = [s.whole_length for s in batch.sequences]
    after = [-n % (2 * size) for n in lengths]
    padded = [n + pad for n, pad in zip(lengths, after)]
    assert any(after)
    packed = pack_routes(batch.sequences, 4, SHAPE, after=after)
    by_rank = {}
    for rank in range(size):
        ranges = ContextShare(size, rank).ranges([*padded, 4])
        half = sum(b - a for a, b in ranges) // 2
        for own in (cut_ranges(ranges, 0, half), cut_ranges(ranges, half, 2 * half)):
            taken = packed.take(own, [1, 3])
            parts = parts_in(taken.parts, own)
            ids, sizes = zip(*parts, strict=True)
            whole = [np.concatenate([s.whole, np.zeros(n, np.int64)]) for s, n in zip(batch.sequences, after)]
            tokens, positions = (
                np.concatenate(row) for row in ([*whole, np.zeros(4, np.int64)], [np.arange(n) for n in [*padded, 4]])
            )
            rows = np.concatenate([np.arange(a, b) for a, b in own])
            taken.verify(packed_keys(tokens[rows], positions[rows], ids, sizes), [1, 3], SHAPE)
            by_rank |= dict(zip(rows.tolist(), taken.experts))
            for row in (0, len(rows) - 1):
                name, position = taken.owner(row)
                assert name == ids[0 if row == 0 else -1]
                assert name == PADDING_ID or position == positions[rows[row]]
    assert sorted(by_rank) == list(range(sum(padded) + 4))
    for s, start in zip(batch.sequences, np.cumsum([0, *padded])):
        for token in range(s.whole_length - 1):
            assert (by_rank[start + token] == s.routed_experts[token][[1, 3]]).all()


def test_slices_put_together_are_the_routes():
    batch = batch_with_routes()
    total = sum(s.whole_length for s in batch.sequences)
    padding = -total % 4
    parts = {}
    for cut, keys, layers in slices(batch, padding, 4, [[0, 1], [2, 3]]):
        cut.verify(keys, layers, SHAPE)
        parts[cut.ranges[0][0], layers[0]] = cut.experts
    whole = np.concatenate(
        [np.concatenate([parts[row, 0], parts[row, 2]], axis=1) for row in sorted({row for row, _ in parts})]
    )
    start = 0
    for s in batch.sequences:
        assert (whole[start : start + s.whole_length - 1] == s.routed_experts).all()
        start += s.whole_length
        assert (whole[start - 1] == missing_id(np.dtype(np.uint8))).all(), "the last token has no route"
    assert sum(f.num_due for f, _, _ in slices(batch, padding, 4, [[0, 1], [2, 3]])) == 4 * (total - 6)


def test_padding_is_spread_over_the_experts():
    counts = np.zeros((4, 8))
    for layer in range(4):
        counts[layer] = np.bincount(padding_routes(16, SHAPE)[:, layer].flatten(), minlength=8)
    assert (counts == 4).all()
    assert not malformed_rows(torch.from_numpy(padding_routes(16, SHAPE)), 8).any()


def test_what_was_checked_in_a_step_is_not_checked_again():
    batch, known = batch_with_routes(3), CheckedRoutes()
    first = pack_routes(batch.sequences, 0, SHAPE, known)
    total = sum(s.whole_length for s in batch.sequences)
    with mock.patch("megatron_rl.routing.layout.checked_routes", side_effect=AssertionError("checked twice")):
        again = pack_routes(batch.sequences[::-1], 2, SHAPE, known)  # another row of the same sequences
        taken = again.take([(0, total + 2)], range(4))
        batch.sequences[1].routed_experts = batch.sequences[1].routed_experts.copy()
        with pytest.raises(AssertionError, match="checked twice"):
            pack_routes(batch.sequences, 0, SHAPE, known)
    last = batch.sequences[-1].whole_length
    before = first.take([(total - last, total)], range(4))
    assert (taken.experts[:last] == before.experts).all()
    assert (taken.seals[:last] == before.seals).all(), "made of the slice, they are those of the whole sequence"


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


def test_a_router_that_chooses_every_expert_has_no_margin():
    every = torch.tensor([[0, 1], [1, 0]])
    layer = LayerTelemetry(torch.device("cpu"))
    assert layer.observe(torch.rand(2, 2), every, every, torch.ones(2, dtype=torch.bool)).tolist() == [False, False]
    assert layer.packed()[2:].sum() == 0


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
