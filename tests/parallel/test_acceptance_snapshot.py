"""A learner that was taken back, against one that never made the update."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.pool import Jobs
from tests.support.slow import slow_but

LAYOUTS = {
    "bf16": (1, {"dtype": "bf16"}),
    "ep2, offload": (
        2,
        {"parallel": {"expert": 2}, "offload": {"gradients": True, "optimizer": True, "weights": True}},
    ),
}


@pytest.fixture(scope="module")
def runs():
    jobs: dict[int, dict] = {1: {}, 2: {}}
    for name, (ranks, learner) in LAYOUTS.items():
        jobs[ranks][f"{name}: undone"] = ("updates", {"steps": (0, 1, 2, 3), "undone": (0, 2), **learner})
        jobs[ranks][f"{name}: never"] = ("updates", {"steps": (1, 3), "undone": (), **learner})
    with Jobs(jobs, module="tests.parallel.programs.snapshot") as results:
        yield results


@pytest.mark.parametrize("name", slow_but(("bf16",), LAYOUTS))
def test_nothing_is_left_of_an_undone_update(runs, name):
    """The first of all updates is among them: before it Adam has no moments."""
    for undone, never in zip(runs[f"{name}: undone"], runs[f"{name}: never"], strict=True):
        assert undone["metrics"] == never["metrics"]
        assert undone["updates"] == never["updates"] == 2
        assert all(torch.equal(undone["weights"][key], tensor) for key, tensor in never["weights"].items())
        assert len(undone["states"]) == len(never["states"]) > 0
        for value, other in zip(undone["states"], never["states"], strict=True):
            assert torch.equal(value, other) if torch.is_tensor(value) else value == other
