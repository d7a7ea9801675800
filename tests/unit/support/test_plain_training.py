"""The stored rollouts are such that rounding cannot choose another expert: limits of whole updates rest on that."""

from __future__ import annotations

import math

import torch

from tests.support.plain_training import load, logits
from tests.support.tiny import MODEL, stored_rollouts

STEPS = (0, 1, 2, 3, 4, 100)  # what the tests of the learner update on and score
LONGEST_SUM = 128  # of a forward pass: the width of an expert


@torch.no_grad()
def routers(dtype: torch.dtype) -> list[torch.Tensor]:
    """Every router's output on every batch, [tokens, experts] float64, places of padding left out."""
    model, found, kept = load(MODEL, dtype), [], torch.zeros(0)

    def keep(_module, _arguments, output) -> None:
        scores = output[0] if isinstance(output, tuple) else output
        found.append(scores.flatten(0, -2)[kept].double())

    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(keep)
    for step in STEPS:
        lengths = torch.tensor([len(s.tokens) for s in stored_rollouts(step).sequences])
        kept = (torch.arange(int(lengths.max())) < lengths[:, None]).flatten()
        logits(model, stored_rollouts(step))
    return found


def test_no_router_is_near_a_tie():
    top_k = 2
    single, double = routers(torch.float32), routers(torch.float64)
    assert len(double) == len(STEPS) * 4
    for found, scores in zip(single, double, strict=True):
        ordered = scores.sort(-1, descending=True).values
        gap = float((ordered[:, top_k - 1] - ordered[:, top_k]).min())
        assert gap > 2 * math.sqrt(LONGEST_SUM) * float((found - scores).abs().max())
