"""Mismatch by the age of the weights that sampled a token, against plain sums over the tokens of each age."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_rl.config.objective import ObjectiveConfig
from megatron_rl.objective import ObjectiveInputs, compute_objective, finalize_metrics
from megatron_rl.objective.aggregation import MetricStats
from megatron_rl.objective.metrics import EDGES, LABELS
from tests.support.rounding import rounded

NAMES = ("share", "log_rho_mean", "log_rho_std", "k3")


def batch(seed: int, lengths: list[int], distances: bool = True) -> ObjectiveInputs:
    random, total = np.random.default_rng(seed), sum(lengths)
    logprobs = torch.from_numpy(-random.random((2, total)) - 0.1)
    return ObjectiveInputs(
        current_logprobs=logprobs[0].requires_grad_(),
        old_logprobs=logprobs[0].detach() + 0.01,
        inference_logprobs=logprobs[1],
        advantages=torch.ones(len(lengths), dtype=torch.float64),
        loss_mask=torch.from_numpy(random.random(total) < 0.8),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        distances=torch.from_numpy(random.choice([0, 1, 2, 4, 17, 300], total)) if distances else None,
    )


def metrics(parts: list[ObjectiveInputs]) -> dict[str, float]:
    config = ObjectiveConfig(max_response_length=64)
    return finalize_metrics(MetricStats.merge([compute_objective(part, config).stats for part in parts]))


def test_labels():
    assert LABELS == ["0", "1", "2", "3-4", "5-8", "9-16", "17-"]


def test_each_age_has_the_moments_of_its_tokens_over_any_split():
    parts = [batch(0, [30, 50]), batch(1, [64, 3])]
    measured = metrics(parts)
    mask = torch.cat([part.loss_mask for part in parts])
    distance = torch.cat([part.distances for part in parts])[mask].numpy()
    log_rho = torch.cat([part.old_logprobs - part.inference_logprobs for part in parts])[mask].numpy()
    for label, low, high in zip(LABELS, EDGES, [*EDGES[1:], np.inf]):
        here = log_rho[(low <= distance) & (distance < high)]
        names = {name for name in NAMES if f"mismatch/{name}/distance/{label}" in measured}
        assert names == (set(NAMES) if len(here) else set())
        if len(here):
            k3 = np.exp(here) - 1 - here
            plain = (len(here) / len(log_rho), here.mean(), here.std(ddof=1), k3.mean())
            for name, expected in zip(NAMES, plain, strict=True):
                assert measured[f"mismatch/{name}/distance/{label}"] == rounded(expected, 8 * len(log_rho))


@pytest.mark.parametrize("seed", [0, 1])
def test_without_ages_everything_else_is_the_same(seed):
    with_them, without = (metrics([batch(seed, [30, 50], known)]) for known in (True, False))
    assert {name: value for name, value in with_them.items() if "/distance/" not in name} == without
