"""Every gradient under context parallelism, alone and with tensor and expert parallelism, is that of one rank."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.pool import Jobs
from tests.support.slow import slow_but

LAYOUTS = {
    "cp2": (2, {"context": 2}),
    "cp2ep2": (2, {"context": 2, "expert": 2}),
    "cp2tp2": (4, {"context": 2, "tensor": 2}),
}
BATCHES = {"num_batches": 2, "num_sequences": 8}
PRECISION = 1e-5  # relative: what is asked for


@pytest.fixture(scope="module")
def gradients():
    """Norms and one whole gradient of every layout, on every rank."""
    jobs: dict[int, dict] = {1: {}, 2: {}, 4: {}}
    for name, (ranks, parallel) in {"one": (1, {}), **LAYOUTS}.items():
        jobs[ranks][name] = ("gradient_norm.norms_and_clipped_update", {**BATCHES, **parallel})
    with Jobs(jobs, module="tests.parallel.programs") as results:
        yield results


@pytest.mark.parametrize("layout", slow_but(["cp2ep2"], LAYOUTS))
def test_gradients_are_those_of_one_rank(gradients, layout):
    (one,) = gradients["one"]
    whole = torch.cat([gradient.flatten() for gradient in one["clipped"].values()])
    for rank in gradients[layout]:
        assert rank["clipped"].keys() == one["clipped"].keys()
        here = torch.cat([rank["clipped"][name].flatten() for name in one["clipped"]])
        assert float((here - whole).norm()) <= PRECISION * float(whole.norm())
        for got, want in zip(rank["norms"], one["norms"], strict=True):
            assert abs(got - want) <= PRECISION * want
