"""Routes without an engine: checksums, checks, slices, telemetry, the heat map."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.batch import build_batch
from megatron_rl.check import check_recipe
from megatron_rl.config.learner import RoutingConfig
from megatron_rl.errors import InputError
from megatron_rl.learner.context import ContextShare, cut
from megatron_rl.model.architecture import read_architecture
from megatron_rl.monitor.plots import disagreement, draw_disagreement
from megatron_rl.rollout import RolloutError
from megatron_rl.rollout.requests import Request, make_rollout
from megatron_rl.routing import LayerTelemetry, RouteError, RouteShape, missing_id, pack_routes, packed_keys
from megatron_rl.routing.layout import PADDING_ID, CheckedRoutes, padding_routes, parts_in
from megatron_rl.routing.payload import malformed_on, malformed_rows
from megatron_rl.routing.telemetry import MARGIN_BINS, margin_quantiles, router_metrics
from megatron_rl.types import Group, Prompt
from tests.support.rounding import rounded
from tests.support.routes import random_routes, save_random_model, with_routes
from tests.support.tiny import MODEL, stored_rollouts, tiny_recipe

SHAPE = RouteShape(num_experts=8, topk=2, layers=(0, 1, 2, 3))
ON = RoutingConfig(replay="r3")


def batch_with_routes(num_sequences: int = 6):
    batch = stored_rollouts(0, num_sequences)
    return with_routes(batch, random_routes(batch))


def slices(batch, num_padding: int, tensor: int, stages: list[list[int]]):
    """Every rank's slice of one packed row, with the keys of the tokens that it holds."""
    packed = pack_routes(batch.sequences, num_padding, SHAPE, ON)
    tokens = np.concatenate([*(s.tokens for s in batch.sequences), np.zeros(num_padding, np.int64)])
    lengths = [len(s.tokens) for s in batch.sequences] + [num_padding]
    positions = np.concatenate([np.arange(n) for n in lengths])
    keys = packed_keys(tokens, positions, [s.id for s in batch.sequences] + [PADDING_ID], lengths)
    share = len(tokens) // tensor
    for rank in range(tensor):
        rows = slice(rank * share, (rank + 1) * share)
        for layers in stages:
            yield packed.take([(rows.start, rows.stop)], layers), keys[rows], layers


def test_slices_of_context_parallel_ranks_are_those_of_their_tokens():
    """Padding after each sequence; shares that begin and end inside sequences, cut again by tensor-parallel ranks."""
    batch, size = batch_with_routes(), 2
    lengths = [len(s.tokens) for s in batch.sequences]
    after = [-n % (2 * size) for n in lengths]
    padded = [n + pad for n, pad in zip(lengths, after)]
    assert any(after)
    packed = pack_routes(batch.sequences, 4, SHAPE, ON, after=after)
    found = {}
    for rank in range(size):
        ranges = ContextShare(size, rank).ranges([*padded, 4])
        half = sum(b - a for a, b in ranges) // 2
        for own in (cut(ranges, 0, half), cut(ranges, half, 2 * half)):
            taken = packed.take(own, [1, 3])
            parts = parts_in(taken.parts, own)
            ids, sizes = zip(*parts, strict=True)
            whole = [np.concatenate([s.tokens, np.zeros(n, np.int64)]) for s, n in zip(batch.sequences, after)]
            tokens, positions = (
                np.concatenate(row) for row in ([*whole, np.zeros(4, np.int64)], [np.arange(n) for n in [*padded, 4]])
            )
            rows = np.concatenate([np.arange(a, b) for a, b in own])
            taken.verify(packed_keys(tokens[rows], positions[rows], ids, sizes), [1, 3], SHAPE)
            found |= dict(zip(rows.tolist(), taken.experts))
            for row in (0, len(rows) - 1):
                name, position = taken.owner(row)
                assert name == ids[0 if row == 0 else -1]
                assert name == PADDING_ID or position == positions[rows[row]]
    assert sorted(found) == list(range(sum(padded) + 4))
    for s, start in zip(batch.sequences, np.cumsum([0, *padded])):
        for token in range(len(s.tokens) - 1):
            assert (found[start + token] == s.routed_experts[token][[1, 3]]).all()


def test_slices_put_together_are_the_routes():
    batch = batch_with_routes()
    total = sum(len(s.tokens) for s in batch.sequences)
    padding = -total % 4
    parts = {}
    for found, keys, layers in slices(batch, padding, 4, [[0, 1], [2, 3]]):
        found.verify(keys, layers, SHAPE)
        parts[found.ranges[0][0], layers[0]] = found.experts
    whole = np.concatenate(
        [np.concatenate([parts[row, 0], parts[row, 2]], axis=1) for row in sorted({row for row, _ in parts})]
    )
    start = 0
    for s in batch.sequences:
        assert (whole[start : start + len(s.tokens) - 1] == s.routed_experts).all()
        start += len(s.tokens)
        assert (whole[start - 1] == missing_id(np.dtype(np.uint8))).all(), "the last token has no route"
    assert sum(f.num_due for f, _, _ in slices(batch, padding, 4, [[0, 1], [2, 3]])) == 4 * (total - 6)


@settings(max_examples=60)
@given(st.data())
def test_any_single_change_to_a_payload_is_found(data):
    """One id anywhere, any two rows or layers exchanged, any rotation: the error names the sequence."""
    batch = batch_with_routes(2)
    victim = batch.sequences[data.draw(st.integers(0, 1))]
    routes = victim.routed_experts.copy()
    kind = data.draw(st.sampled_from(["id", "rows", "layers", "roll"]))
    if kind == "id":
        row, layer = data.draw(st.integers(0, len(routes) - 1)), data.draw(st.integers(0, 3))
        unused = [e for e in range(8) if e not in routes[row, layer]]
        routes[row, layer, 0] = data.draw(st.sampled_from(unused))
    elif kind == "rows":
        i, j = data.draw(st.lists(st.integers(0, len(routes) - 1), min_size=2, max_size=2, unique=True))
        routes[[i, j]] = routes[[j, i]]
    elif kind == "layers":
        i, j = data.draw(st.lists(st.integers(0, 3), min_size=2, max_size=2, unique=True))
        routes[:, [i, j]] = routes[:, [j, i]]
    else:
        routes = np.roll(routes, data.draw(st.integers(1, len(routes) - 1)), axis=0)
    if (routes == victim.routed_experts).all():
        return
    victim.routed_experts = routes
    with pytest.raises(RouteError, match=f"sequence {victim.id}: routes do not belong to its tokens"):
        pack_routes(batch.sequences, 0, SHAPE, ON)


def test_the_changed_token_and_layer_are_named():
    batch = batch_with_routes(2)
    victim = batch.sequences[1]
    victim.routed_experts = victim.routed_experts.copy()
    victim.routed_experts[5, 2] = victim.routed_experts[5, 2, ::-1]
    with pytest.raises(RouteError, match=r"token 5 \(1 of \d+ tokens\) and MoE layer 2 \(1 of 4 layers\)"):
        pack_routes(batch.sequences, 0, SHAPE, ON)


def test_a_slice_held_against_other_tokens_or_layers_is_refused():
    batch = batch_with_routes()
    total = sum(len(s.tokens) for s in batch.sequences)
    (first, keys_0, layers), (second, keys_1, _) = slices(batch, -total % 2, 2, [[0, 1, 2, 3]])
    first.verify(keys_0, layers, SHAPE)
    with pytest.raises(RouteError, match=r"sequence train:0/0, layer 0, token 0: .* another token or layer"):
        first.verify(keys_1, layers, SHAPE)
    with pytest.raises(RouteError, match=r"layer 2, token \d+"):
        second.verify(keys_1, [0, 2, 1, 3], SHAPE)
    with pytest.raises(RouteError, match="for a rank that holds"):
        first.verify(keys_0[:-1], layers, SHAPE)


def engine_answer(routes: np.ndarray):
    """A rollout of 3 prompt and 4 response tokens, as the engine's answer is unpacked, and its group."""
    prompt = Prompt(id="train:7", tokens=[1, 40, 41], answer="")
    rollout = make_rollout(
        Request(0, prompt, 2, seed=0),
        [50, 51, 52, 2],
        [-1.0] * 4,
        "stop",
        0,
        routes=routes,
        architecture=read_architecture(MODEL),
    )
    return rollout, Group(prompt, [rollout])


def test_what_the_engine_hands_over_passes_the_learners_checks():
    routes = np.random.default_rng(0).random((6, 4, 8)).argsort(-1)[..., :2]
    _, group = engine_answer(routes)
    (sequence,) = build_batch(0, [group], tiny_recipe()).sequences
    packed = pack_routes([sequence], 0, SHAPE, ON)
    assert (packed.take([(0, 7)], range(4)).experts[:-1] == routes).all()
    sequence.id = "train:7/3"  # the routes of another sample of the same prompt
    with pytest.raises(RouteError, match="sequence train:7/3: routes do not belong"):
        pack_routes([sequence], 0, SHAPE, ON)


def test_rows_that_the_engine_did_not_record_are_left_to_the_router():
    routes = np.random.default_rng(0).random((6, 4, 8)).argsort(-1)[..., :2]
    routes[2, 1] = -1
    _, group = engine_answer(routes)
    (sequence,) = build_batch(0, [group], tiny_recipe()).sequences
    found = pack_routes([sequence], 0, SHAPE, ON).take([(0, 7)], range(4))
    found.settle()
    ids, counted = found.on(torch.device("cpu"))
    assert found.num_missing == 1
    assert found.num_due == 24
    assert ids[1][2].tolist() == [-1, -1]
    assert counted.sum() == 23
    routes[2, 1] = [-1, 3]
    with pytest.raises(RolloutError, match="token 2, layer 1: route to expert -1 of 8"):
        engine_answer(routes)


def test_padding_is_spread_over_the_experts():
    counts = np.zeros((4, 8))
    for layer in range(4):
        counts[layer] = np.bincount(padding_routes(16, SHAPE)[:, layer].flatten(), minlength=8)
    assert (counts == 4).all()
    assert not malformed_rows(padding_routes(16, SHAPE), 8).any()


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


def test_what_was_checked_in_a_step_is_not_checked_again():
    batch, known = batch_with_routes(3), CheckedRoutes()
    first = pack_routes(batch.sequences, 0, SHAPE, ON, known)
    total = sum(s.length for s in batch.sequences)
    with mock.patch("megatron_rl.routing.layout.checked_routes", side_effect=AssertionError("checked twice")):
        again = pack_routes(batch.sequences[::-1], 2, SHAPE, ON, known)  # another row of the same sequences
        taken = again.take([(0, total + 2)], range(4))
        batch.sequences[1].routed_experts = batch.sequences[1].routed_experts.copy()
        with pytest.raises(AssertionError, match="checked twice"):
            pack_routes(batch.sequences, 0, SHAPE, ON, known)
    last = batch.sequences[-1].length
    before = first.take([(total - last, total)], range(4))
    assert (taken.experts[:last] == before.experts).all()
    assert (taken.seals[:last] == before.seals).all(), "made of the slice, they are those of the whole sequence"


def test_negative_ids_are_malformed():
    assert malformed_rows(np.array([[[-1, 3]]], dtype=np.int64), 8)[0, 0]


@pytest.mark.parametrize(("num_experts", "dtype"), [(8, np.uint8), (255, np.uint8), (256, np.uint16)])
def test_every_expert_and_no_record_have_a_number(num_experts, dtype):
    shape = RouteShape(num_experts, 2, (0,))
    assert shape.dtype == dtype
    assert missing_id(shape.dtype) >= num_experts


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
    found = router_metrics([1, 3], counts, **sums, is_replayed=True)
    assert found["router/agree_frac"] == rounded(0.95)
    assert found["router/agree_frac/layer_1"] == rounded(0.9)
    assert found["router/agree_frac/layer_3"] == 1.0
    assert found["router/any_flip_frac"] == rounded(0.1)
    assert found["router/replay_coverage"] + found["router/fallback_frac"] == 1.0
    assert found["router/fallback_frac"] == rounded(20 / 220)


def test_a_share_of_no_rows_is_absent():
    nothing = {"flipped": 0, "tokens": 0, "due": 0, "missing": 0, "bytes_per_token": 12}
    counts = np.zeros((2, 2 + MARGIN_BINS))
    assert router_metrics([1, 3], counts, **nothing, is_replayed=True) == {"router/payload_bytes": 12.0}


def test_dense_models_are_refused_before_anything_starts(tmp_path):
    dense = save_random_model(tmp_path, family="qwen3")
    with pytest.raises(InputError, match=r"routing.replay: r3, but the model \(qwen3\) has no experts"):
        check_recipe(tiny_recipe(model={"path": str(dense)}, routing={"replay": "r3"}))


def test_heat_map_holds_every_layer_and_step():
    records = [
        {"step": 0, "router/agree_frac/layer_0": 0.99, "router/agree_frac/layer_10": 0.9},
        {"step": 1},  # every group filtered out
        {"step": 2, "router/agree_frac/layer_0": 1.0, "router/agree_frac/layer_10": 0.5},
    ]
    layers, steps, values = disagreement(records)
    assert (layers, steps) == ([0, 10], [0, 2])
    assert values == rounded(np.array([[0.01, 0.0], [0.1, 0.5]]))
    image = draw_disagreement(records, "run").axes[0].images[0].get_array()
    assert np.asarray(image) == rounded(np.array([[0.01, 1e-4], [0.1, 0.5]]))
    assert draw_disagreement([{"step": 0}], "run") is None
