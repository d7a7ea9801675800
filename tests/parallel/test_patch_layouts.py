"""Patched megatron.core on gloo: every layout gives the gradients of one rank, and collectives return what they say."""

import pytest
import torch

from tests.parallel.gloo import run_ranks
from tests.parallel.programs.patch_layouts import DOUBLE, Layout, assemble
from tests.parallel.programs.patch_layouts import limits as norm_limits
from tests.support.rounding import assert_as_double

PROGRAMS = "tests.parallel.programs.patch"
LONGEST_SUM = 4 * 2 * 16  # microbatches of sequences of tokens: what a weight's gradient adds up
LAYOUTS = {
    "data": Layout(),
    "tensor and sequence": Layout(tp=2),
    "expert": Layout(ep=2),
    "tensor, whole experts": Layout(tp=2, etp=1),
    "pipeline": Layout(pp=2),
    "interleaved pipeline": Layout(pp=2, vpp=2),
    "tensor, full recomputation": Layout(
        tp=2, options={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    ),
    "expert, all-gather, experts recomputed": Layout(
        ep=2,
        options={
            "moe_token_dispatcher_type": "allgather",
            "recompute_granularity": "selective",
            "recompute_modules": ["moe"],
        },
    ),
}


@pytest.fixture(scope="module")
def alone() -> dict:
    """What one rank computed, in float32 and in float64."""
    (results,) = run_ranks(PROGRAMS, "layout_gradients", 1, layouts={"one": Layout(), "double": DOUBLE})
    assert not any(isinstance(result, str) for result in results.values()), results
    return results


@pytest.fixture(scope="module")
def one_rank(alone) -> dict[str, torch.Tensor]:
    """Global gradients of the model on one rank."""
    return assemble([alone["one"]])


@pytest.fixture(scope="module")
def limits(alone) -> dict[str, float]:
    return norm_limits(assemble([alone["one"]]), assemble([alone["double"]]), LONGEST_SUM)


@pytest.fixture(scope="module")
def two_ranks() -> list[dict]:
    """What each of two ranks computed in each layout."""
    return run_ranks(PROGRAMS, "layout_gradients", 2, layouts=LAYOUTS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_equal_those_of_one_rank(name, one_rank, two_ranks, limits):
    for rank in two_ranks:
        assert not isinstance(rank[name], str), rank[name]
    gradients = assemble([rank[name] for rank in two_ranks])
    assert gradients.keys() == one_rank.keys()
    for key, expected in one_rank.items():
        error = float((gradients[key] - expected).norm())
        assert error <= limits[key], f"{key}: {error:.1e} apart, limit {limits[key]:.1e}"
        # The next smaller type would be seen in every tensor.
        assert float((expected.half().float() - expected).norm()) > limits[key]


@pytest.fixture(scope="module")
def collectives() -> list[dict]:
    return run_ranks(PROGRAMS, "collectives", 2)


def test_reduce_sums_inputs_that_are_not_contiguous(collectives):
    for rank in collectives:
        assert torch.equal(rank["summed"], 2 * torch.arange(6.0).view(2, 3).t() + 1)


def test_parts_of_different_sizes_are_gathered(collectives):
    for rank in collectives:
        assert rank["gathered"].tolist() == [[0.0] * 3, [1.0] * 3, [1.0] * 3]


def test_cross_entropy_is_right_and_leaves_fp32_logits_alone(collectives):
    logits = torch.cat([rank["logits"] for rank in collectives], dim=-1)

    def plain(logits: torch.Tensor) -> list[torch.Tensor]:
        losses = torch.nn.functional.cross_entropy(logits.view(10, 16), torch.arange(10), reduction="none")
        return [losses.view(5, 2)]

    for rank in collectives:
        assert_as_double([rank["loss"]], plain, [logits], longest_sum=16)
        assert torch.equal(rank["logits"], rank["logits_after_loss"])


def test_context_parallel_positions_are_the_two_ends(collectives):
    assert [rank["positions"].tolist() for rank in collectives] == [[0, 1, 6, 7], [2, 3, 4, 5]]


def test_random_states_are_shared_or_own_as_asked():
    first, second = run_ranks(PROGRAMS, "random_states", 2)
    assert torch.equal(first["shared"], second["shared"])
    assert not torch.equal(first["own"], second["own"])
    # The fork leaves the shared state where it was.
    assert torch.equal(torch.cat([first["shared"], first["after"]]), first["plain"])
    assert first["warnings"] == []


def test_interleaved_pipeline_of_two_stages_needs_overlap():
    options = {"overlap_p2p_comm": False, "batch_p2p_comm": True}
    results = run_ranks(PROGRAMS, "layout_gradients", 2, layouts={"vpp": Layout(pp=2, vpp=2, options=options)})
    for rank in results:
        assert isinstance(rank["vpp"], str)
        assert "overlap_p2p_comm=True" in rank["vpp"]


@pytest.mark.slow
def test_gradients_on_four_ranks(one_rank, limits):
    layouts = {
        "tensor, expert, pipeline": Layout(tp=2, ep=2, etp=1, pp=2),
        "tensor, split experts": Layout(tp=2, etp=2, ep=2),
    }
    results = run_ranks(PROGRAMS, "layout_gradients", 4, layouts=layouts)
    for name in layouts:
        gradients = assemble([rank[name] for rank in results])
        for key, expected in one_rank.items():
            assert (gradients[key] - expected).norm() <= limits[key], (name, key)
