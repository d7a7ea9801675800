"""Worked numbers of the remedies of 2026: VESPO and FIPO."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.config import ObjectiveConfig
from megatron_rl.objective import ObjectiveInputs, compute_objective
from tests.support.rounding import rounded
from tests.unit.objective.batches import loss_and_gradient

STEP = 1e-6


def sequence(term: dict, log_pi: list[float], log_old: list[float], a: float, **config):
    """Loss and gradient of one sequence; po = mu."""
    current = torch.tensor([log_pi], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([log_old], dtype=torch.float64)
    mask = torch.ones_like(old, dtype=torch.bool)
    inputs = ObjectiveInputs(current, old, old, torch.tensor([a], dtype=torch.float64), mask)
    result = compute_objective(inputs, ObjectiveConfig.model_validate({"policy_term": term, **config}))
    return (*loss_and_gradient(result, inputs, mask), result.metrics)


@pytest.mark.parametrize(
    ("a", "phi"), [(1.0, 2**2 * math.exp(-3)), (-1.0, 2**3 * math.exp(-2)), (0.0, 2**2 * math.exp(-3))]
)
def test_vespo_weighs_a_sequence_by_the_product_of_its_ratios(a, phi):
    """w = 4 and 1/2, so W = 2: φ = 2² e^(3 (1 - 2)) where A >= 0, 2³ e^(2 (1 - 2)) where A < 0."""
    loss, gradient, _ = sequence(
        {"name": "vespo"}, [-1.0, -2.0], [-1 - math.log(4), -2 + math.log(2)], a, aggregation="seq-mean-token-sum"
    )
    assert loss == rounded(phi * a * 3.0)
    assert gradient.tolist() == rounded([-phi * a] * 2)


def test_vespo_is_one_on_policy_and_bounded_off_it():
    """φ(1) = 1; the largest φ is (c1/c2)^c1 e^(c2 - c1), at W = c1/c2 [Eq 45]; W = e^±20 leaves nothing."""

    def phi(log_w: float, a: float) -> float:
        _, gradient, _ = sequence({"name": "vespo"}, [-30.0], [-30.0 - log_w], a)
        return -gradient.item() / a

    assert phi(0.0, 1.0) == phi(0.0, -1.0) == 1.0
    assert phi(math.log(2 / 3), 1.0) == rounded((2 / 3) ** 2 * math.e)
    assert phi(math.log(3 / 2), -1.0) == rounded((3 / 2) ** 3 / math.e)
    assert phi(math.log(2 / 3) + 0.1, 1.0) < phi(math.log(2 / 3), 1.0) > phi(math.log(2 / 3) - 0.1, 1.0)
    assert phi(25.0, 1.0) == 0.0
    assert phi(-25.0, 1.0) == rounded(math.exp(-40 + 3))


def test_fipo_weighs_a_token_by_what_follows_it():
    """Half-life 1: F = log r_t + (log r_(t+1) + …)/2. log r = 0.1, -0.2, 0.08 gives F = 0.02, -0.16, 0.08."""
    log_r = [0.1, -0.2, 0.08]
    term = {"name": "fipo", "half_life": 1.0, "influence_low": 0.9, "influence_high": 1.05}
    loss, gradient, _ = sequence(term, [-1 + x for x in log_r], [-1.0] * 3, 1.0)
    f = [math.exp(0.02), 0.9, 1.05]
    terms = [weight * math.exp(x) for weight, x in zip(f, log_r)]
    assert loss == rounded(-sum(terms) / 3)
    assert gradient.tolist() == rounded([-x / 3 for x in terms])


@pytest.mark.parametrize(("last", "influence"), [(math.log(10) - STEP, 1.2), (math.log(10) + STEP, 1.0)])
def test_fipo_leaves_tokens_beyond_the_dual_clip_out_of_the_sums_of_others(last, influence):
    _, gradient, _ = sequence({"name": "fipo"}, [-3.0, -3.0 + last], [-3.0, -3.0], 1.0)
    assert gradient[0].item() == rounded(-influence / 2)


@pytest.mark.parametrize(
    ("a", "r", "slope"),
    [
        (-1.0, 4.0 - STEP, 1.2),  # F = log r: f is at its upper bound
        (-1.0, 4.0 + STEP, 1.0),  # not punished more than without f
        (1.0, 4.0 + STEP, 0.0),  # clipped above
        (-1.0, 10.0 + STEP, 0.0),  # bounded by the dual clip
    ],
)
def test_fipo_edges(a, r, slope):
    _, gradient, metrics = sequence({"name": "fipo"}, [-1.0], [-1.0 - math.log(r)], a)
    assert gradient.item() == rounded(-a * r * slope)
    assert metrics["actor/pg_clipfrac_lower"] == float(r > 10)


@pytest.mark.parametrize("name", ["fipo", "vespo"])
def test_their_weights_have_no_gradient(name):
    """d loss / d log pi_t from differences of the loss with the weights held, which is what `sg` says."""
    term, old = {"name": name, **({"influence_low": 0.5} if name == "fipo" else {})}, [-1.0, -1.2, -0.7]
    pi, step = [-1.05, -1.1, -0.75], 1e-5
    _, gradient, _ = sequence(term, pi, old, -0.8)
    if name == "fipo":
        future = [sum(2 ** (-(k - t) / 32) * (pi[k] - old[k]) for k in range(t, 3)) for t in range(3)]
        held = [math.exp(x) for x in future]
        value = [lambda x, f=f, q=q: f * 0.8 * math.exp(x - q) / 3 for f, q in zip(held, old)]
    else:
        w = math.exp(sum(pi) - sum(old))
        value = [lambda x: w**3 * math.exp(2 * (1 - w)) * 0.8 * x / 3] * 3
    for t in range(3):
        slope = (value[t](pi[t] + step) - value[t](pi[t] - step)) / (2 * step)
        # The third derivative is below 1: the difference is off by step²/6, and rounding by 1e-16/step.
        assert gradient[t].item() == pytest.approx(slope, abs=step**2)
