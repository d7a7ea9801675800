"""Optimizers and checkpoints of a patched megatron.core: a resumed run is the uninterrupted one, bit for bit."""

import math
import re

import pytest
import torch

from tests.parallel.gloo import run_ranks
from tests.parallel.programs.patch_layouts import Layout

PROGRAMS = "tests.parallel.programs.patch_checkpoint"
LONGEST_SUM = 4 * 2 * 16  # microbatches of sequences of tokens: what a weight's gradient adds up
DISTRIBUTED = {"use_distributed_optimizer": True}


@pytest.mark.parametrize("sharding", ["fully_reshardable", "dp_reshardable"])
def test_resumed_training_equals_uninterrupted_training(sharding, tmp_path):
    layout = Layout(ep=2, ddp=DISTRIBUTED)
    results = run_ranks(
        PROGRAMS,
        "resumed_and_uninterrupted",
        2,
        layout=layout,
        resume_layout=layout,
        sharding=sharding,
        folder=str(tmp_path),
    )
    for rank in results:
        assert rank["resumed_norms"] == rank["norms"]
        for name, weight in rank["weights"].items():
            assert torch.equal(rank["resumed"][name], weight), name


@pytest.fixture(scope="module")
def limits() -> list[float]:
    """How far the gradient norms of two layouts may lie apart after the second step, neither of them in float64."""
    (distances,) = run_ranks(PROGRAMS, "rounding_of_gradients", 1, steps=5)
    return [2 * math.sqrt(LONGEST_SUM) * distance for distance in distances[2:]]  # as `norm_from_double`


def test_resuming_on_another_layout_continues_the_same_run(tmp_path, limits):
    results = run_ranks(
        PROGRAMS,
        "resumed_and_uninterrupted",
        2,
        layout=Layout(tp=2, etp=2, ddp=DISTRIBUTED),
        resume_layout=Layout(ddp=DISTRIBUTED),
        sharding="fully_reshardable",
        folder=str(tmp_path),
    )
    for rank in results:
        apart = [abs(a - b) for a, b in zip(rank["resumed_norms"], rank["norms"], strict=True)]
        assert all(difference <= limit for difference, limit in zip(apart, limits, strict=True)), (apart, limits)


def test_loss_scale_backs_off_after_an_overflow_and_grows_again():
    result = run_ranks(PROGRAMS, "losses_with_scaling", 1)[0]
    assert result["done"] == [True, False, True, True]
    assert result["scales"] == [1024.0, 512.0, 512.0, 1024.0]


def test_a_nan_is_reported_as_such():
    # The program is at iteration 7; megatron-core 0.19 counts from one in its messages.
    assert re.search("iteration [78]: Unexpected result nan", run_ranks(PROGRAMS, "nan_report", 1)[0])
