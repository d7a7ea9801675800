"""Replayed routes: exact under recomputation and pipelines, checked, and kept apart by model."""

import dataclasses

import pytest
import torch

from tests.parallel.gloo import run_ranks
from tests.parallel.programs.patch_layouts import DOUBLE, Layout, assemble, limits

LONGEST_SUM = 4 * 2 * 16  # microbatches of sequences of tokens: what a weight's gradient adds up
PROGRAMS = "tests.parallel.programs.patch"
REPLAY = {"moe_enable_routing_replay": True}
FULL = {**REPLAY, "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TWO_LAYERS = {**FULL, "recompute_num_layers": 2}
MOE = {**REPLAY, "recompute_granularity": "selective", "recompute_modules": ["moe"]}
LAYOUTS = {
    "pipeline, full recomputation": Layout(pp=2, options=FULL),
    "pipeline, layers recomputed in pairs": Layout(pp=2, options=TWO_LAYERS),
    "pipeline, experts recomputed": Layout(pp=2, options=MOE),
    "tensor, full recomputation": Layout(tp=2, options=FULL),
    "expert, experts recomputed": Layout(ep=2, options=MOE),
}


@pytest.fixture(scope="module")
def alone() -> dict:
    """What one rank computed, in float32 and in float64."""
    double = dataclasses.replace(DOUBLE, options={**DOUBLE.options, **REPLAY})
    layouts = {"one": Layout(options=REPLAY), "double": double}
    return run_ranks(PROGRAMS, "replayed_gradients", 1, layouts=layouts)[0]


@pytest.fixture(scope="module")
def one_rank(alone) -> dict[str, torch.Tensor]:
    """Gradients of one rank with the same routes and no recomputation."""
    return assemble([alone["one"]])


@pytest.fixture(scope="module")
def two_ranks() -> list[dict]:
    return run_ranks(PROGRAMS, "replayed_gradients", 2, layouts=LAYOUTS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_recomputation_replays_the_routes_of_its_own_microbatch(name, alone, one_rank, two_ranks):
    largest = limits(one_rank, assemble([alone["double"]]), LONGEST_SUM)
    gradients = assemble([rank[name] for rank in two_ranks])
    for key, expected in one_rank.items():
        error = float((gradients[key] - expected).norm())
        assert error <= largest[key], f"{key}: {error:.1e} apart, limit {largest[key]:.1e}"


@pytest.fixture(scope="module")
def recorded() -> dict:
    return run_ranks(PROGRAMS, "recorded_routes", 1, layout=Layout(options=FULL))[0]


def test_replaying_what_was_recorded_changes_nothing(recorded):
    logits = recorded["logits"]
    assert torch.equal(logits["record"], logits["plain"])
    assert torch.equal(logits["replay"], logits["plain"])


def test_rows_of_minus_one_leave_the_token_to_the_router(recorded, one_rank):
    assert torch.equal(recorded["logits"]["partly"], recorded["logits"]["plain"])
    native = run_ranks(PROGRAMS, "layout_gradients", 1, layouts={"one": Layout()})[0]["one"]
    expected = assemble([native])
    for key, gradient in assemble([recorded["own_gradients"]]).items():
        assert torch.equal(gradient, expected[key]), key
    # The test of the layouts would prove nothing if replay did not matter.
    router = "decoder.layers.mlp.router.weight"
    assert (one_rank[router] - expected[router]).norm() > 0.1 * expected[router].norm()


def test_options_that_ignore_replay_are_refused():
    messages = run_ranks(PROGRAMS, "refused_configurations", 1)[0]
    assert "moe_router_fusion does not replay" in messages["fused"]
    assert "sinkhorn routing does not replay" in messages["sinkhorn"]
