"""The score of an update, as the paper's symbols say it, and the tolerance by step."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import ValidationError

from megatron_rl.config.sections import AcceptanceConfig
from megatron_rl.run.acceptance import judge, post_update_gap, tolerance_at
from megatron_rl.types import Rollout
from tests.support.groups import whole_sequence
from tests.support.rounding import rounded
from tests.support.tiny import DATA, tiny_recipe


def T_post(pi: list[list[float]], mu: list[list[float]], A: list[float]) -> float:
    """-E[ρ_i A_i], ρ_i = exp((1/T_i) Σ_t log(pi/mu)) [arXiv 2606.29526 Eqs 8-9]; probabilities, not logarithms."""
    total = 0.0
    for p, m, a in zip(pi, mu, A):
        total += math.exp(sum(math.log(x / y) for x, y in zip(p, m)) / len(p)) * a
    return -total / len(A)


def sequence(mu: list[float], advantage: float, mask: list[bool] | None = None) -> Rollout:
    n = len(mu)
    return whole_sequence(
        id="s",
        tokens=np.arange(n + 2),
        prompt_length=2,
        inference_logprobs=np.log(mu),
        loss_mask=np.array(mask or [True] * n),
        advantage=advantage,
        reward=0.0,
        policy_versions=np.zeros(n, np.int32),
    )


def test_the_score_is_the_papers():
    random = np.random.default_rng(0)
    lengths, advantages = [1, 5, 9, 3], [1.5, -0.5, -1.0, 0.0]
    pi, mu = ([random.uniform(0.01, 1, n).tolist() for n in lengths] for _ in range(2))
    sequences = [sequence(m, a) for m, a in zip(mu, advantages)]
    gap = post_update_gap(sequences, [np.log(p) for p in pi])
    assert gap == rounded(T_post(pi, mu, advantages), scale=max(map(abs, advantages)) * 100)


def test_worked_numbers():
    """ρ = 2 for a good response and 1/2 for a bad one: T = -(2 - 1/2)/2. Tokens and responses that are not trained on
    do not count."""
    good, bad = sequence([0.1, 0.4], 1.0), sequence([0.4, 0.2, 0.5], -1.0, [True, True, False])
    log_pi = [np.log([0.4, 0.4]), np.log([0.1, 0.2, 0.01])]
    assert post_update_gap([good, bad], log_pi) == rounded(-0.75)
    masked = sequence([0.1], 5.0, [False])
    assert post_update_gap([good, bad, masked], [*log_pi, np.log([0.9])]) == rounded(-0.75)
    assert post_update_gap([good, sequence([0.1, 0.4], -1.0)], [log_pi[0], log_pi[0]]) == 0.0
    assert math.isnan(post_update_gap([masked], [np.log([0.9])]))


@pytest.mark.parametrize(("step", "want"), [(0, 5.0), (1, 4.0), (2, 3.0), (4, 1.0), (5, 1.0 - 1.0), (100, 0.0)])
def test_the_tolerance_comes_down(step, want):
    config = AcceptanceConfig(tolerance=0.0, start_tolerance=5.0, anneal_steps=5)
    assert tolerance_at(config, step) == rounded(want, scale=5.0)
    assert tolerance_at(AcceptanceConfig(tolerance=0.25), step) == 0.25


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({}, "data.validation names no file"),
        ({"acceptance": {"tolerance": 0.1, "num_samples": 1}}, "acceptance.num_samples: 1"),
        ({"rollout": {"engine": "vllm_server"}}, "servers never go back"),
        (
            {"rollout": {"engine": "exact"}, "exact": {"noise": {"kind": "stale", "updates": 2}}},
            "the sampler would keep weights that are undone",
        ),
    ],
)
def test_what_cannot_be_scored_or_undone_is_refused(sections, message):
    data = {"data": {"validation": str(DATA / "validation.jsonl")}} if sections else {}
    with pytest.raises(ValidationError, match=message):
        tiny_recipe(**{"acceptance": {"tolerance": 0.1}, **data, **sections})


def test_a_skipped_update_is_not_judged():
    """To take it back would take back the loss scale's step and the count that ends a run of overflows."""
    run = SimpleNamespace(
        recipe=SimpleNamespace(acceptance=None), learner=SimpleNamespace(num_updates=3), generator=None
    )
    assert judge(run, 5, SimpleNamespace(num_updates=3)) == {}
