"""Routes of a response: which rows are malformed, and checksums that find and name any change."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.routing import RouteError, RouteShape, missing_id, pack_routes
from megatron_rl.routing.payload import malformed_rows
from tests.support.routes import SHAPE, batch_with_routes, slices


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
        pack_routes(batch.sequences, 0, SHAPE)


def test_the_changed_token_and_layer_are_named():
    batch = batch_with_routes(2)
    victim = batch.sequences[1]
    victim.routed_experts = victim.routed_experts.copy()
    victim.routed_experts[5, 2] = victim.routed_experts[5, 2, ::-1]
    with pytest.raises(RouteError, match=r"token 5 \(1 of \d+ tokens\) and MoE layer 2 \(1 of 4 layers\)"):
        pack_routes(batch.sequences, 0, SHAPE)


def test_a_slice_held_against_other_tokens_or_layers_is_refused():
    batch = batch_with_routes()
    total = sum(s.whole_length for s in batch.sequences)
    (first, keys_0, layers), (second, keys_1, _) = slices(batch, -total % 2, 2, [[0, 1, 2, 3]])
    first.verify(keys_0, layers, SHAPE)
    with pytest.raises(RouteError, match=r"sequence train:0/0, layer 0, token 0: .* another token or layer"):
        first.verify(keys_1, layers, SHAPE)
    with pytest.raises(RouteError, match=r"layer 2, token \d+"):
        second.verify(keys_1, [0, 2, 1, 3], SHAPE)
    with pytest.raises(RouteError, match="for a rank that holds"):
        first.verify(keys_0[:-1], layers, SHAPE)
