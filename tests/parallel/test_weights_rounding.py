"""A learner whose passes round its weights as a quantized engine does, against one that numpy has rounded."""

import pytest
import torch

from tests.parallel.pool import Jobs
from tests.support.slow import slow_but

KINDS = {"fp8": "fp8 [128, 128]", "int4": "int4 [1, 128]"}
"""fp8: blocks of 128 rows, for which query, key and value have to be in vLLM's order."""


@pytest.fixture(scope="module")
def runs():
    jobs = {
        f"{kind} {'plain' if is_plain else 'own'}": ("passes", {"kind": kind, "is_plain": is_plain})
        for kind in KINDS
        for is_plain in (True, False)
    }
    with Jobs({1: jobs}, module="tests.parallel.programs.rounding") as results:
        yield results


@pytest.mark.parametrize("kind", slow_but(("fp8",), KINDS))
def test_passes_are_those_of_rounded_weights_and_the_weights_stay(runs, kind):
    """Log-probs and gradients bit for bit; the weights are moved by that gradient, from where they were."""
    (plain,), (own,) = runs[f"{kind} plain"], runs[f"{kind} own"]
    assert torch.equal(own["logprobs"], plain["logprobs"])
    assert own["gradients"].keys() == plain["gradients"].keys()
    for name, gradient in own["gradients"].items():
        assert torch.equal(gradient, plain["gradients"][name]), name
    before, between, after = own["weights"]
    assert all(torch.equal(before[name], between[name]) for name in before)
    rounded = {name for name in before if not torch.equal(before[name], plain["weights"][0][name])}
    assert {name.rsplit(".", 2)[-2] for name in rounded} == {
        *(f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")),
    }
    # Adam's first step is a number that knows the gradient alone; where both start at the same weight, they end there.
    for name in before.keys() - rounded:
        assert torch.equal(after[name], plain["weights"][2][name]), name
    assert any(not torch.equal(after[name], before[name]) for name in rounded)
    assert (own["precision"], plain["precision"]) == (KINDS[kind], None)
