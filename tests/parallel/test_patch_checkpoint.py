"""Optimizers and checkpoints of a patched megatron.core: a resumed run is the uninterrupted one, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.gloo import run_ranks
from tests.parallel.programs.patch_layouts import Layout

PROGRAMS = "tests.parallel.programs.patch_checkpoint"
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


def test_resuming_on_another_layout_continues_the_same_run(tmp_path):
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
        assert rank["resumed_norms"] == pytest.approx(rank["norms"], rel=1e-4)


def test_loss_scale_backs_off_after_an_overflow_and_grows_again():
    result = run_ranks(PROGRAMS, "losses_with_scaling", 1)[0]
    assert result["done"] == [True, False, True, True]
    assert result["scales"] == [1024.0, 512.0, 512.0, 1024.0]


def test_a_nan_is_reported_as_such():
    assert "iteration 7: Unexpected result nan" in run_ranks(PROGRAMS, "nan_report", 1)[0]
