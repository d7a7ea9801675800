"""A policy small enough to enumerate: 3 tokens, length 3, 27 sequences; expectations are exact sums.

Sequences are drawn from mu. Weighting sequence y by 27 mu(y) turns the mean over all 27 into that expectation.
"""

import itertools

import pytest
import torch

from megatron_rl.config import ObjectiveConfig
from megatron_rl.objective import ObjectiveInputs, compute_objective
from tests.support.rounding import CLOSED_FORM, assert_rounded, gamma, rounded

SEQUENCES = torch.tensor(list(itertools.product(range(3), repeat=3)))  # [27, 3]
REWARDS = torch.sin(torch.arange(27, dtype=torch.float64) * 1.7)  # any reward of a whole sequence
GENERATOR = torch.Generator().manual_seed(0)
THETA = torch.randn(3, 4, 3, dtype=torch.float64, generator=GENERATOR)  # logits [place, previous token or start, token]
ROUNDINGS = SEQUENCES.numel() * CLOSED_FORM
ERROR = gamma(ROUNDINGS)
ROLLOUT = THETA + 0.5 * torch.randn(3, 4, 3, dtype=torch.float64, generator=GENERATOR)


def token_logprobs(logits: torch.Tensor) -> torch.Tensor:
    """[27, 3] log-probs of every sequence's tokens."""
    table = logits.log_softmax(dim=-1)
    previous = torch.cat([torch.full((27, 1), 3), SEQUENCES[:, :2]], dim=1)
    return torch.stack([table[t, previous[:, t], SEQUENCES[:, t]] for t in range(3)], dim=1)


def gradient_of_loss(correction: list[dict], term: str = "reinforce") -> torch.Tensor:
    theta = THETA.clone().requires_grad_()
    log_mu = token_logprobs(ROLLOUT)
    inputs = ObjectiveInputs(
        current_logprobs=token_logprobs(theta),
        old_logprobs=None,
        inference_logprobs=log_mu,
        advantages=27 * log_mu.sum(dim=1).exp() * REWARDS,
        loss_mask=torch.ones(27, 3, dtype=torch.bool),
    )
    config = {"policy_term": term, "correction": correction, "aggregation": "seq-mean-token-sum"}
    (gradient,) = torch.autograd.grad(compute_objective(inputs, ObjectiveConfig.model_validate(config)).loss, theta)
    return gradient


def exact_gradient() -> torch.Tensor:
    """-∇ Σ_y pi(y) R(y), by autograd on the expectation itself."""
    theta = THETA.clone().requires_grad_()
    expected_reward = (token_logprobs(theta).sum(dim=1).exp() * REWARDS).sum()
    return -torch.autograd.grad(expected_reward, theta)[0]


def weighted_score(weight: torch.Tensor) -> torch.Tensor:
    """-Σ_y weight(y) R(y) ∇ log pi(y)."""
    theta = THETA.clone().requires_grad_()
    return -torch.autograd.grad((weight * REWARDS * token_logprobs(theta).sum(dim=1)).sum(), theta)[0]


def assert_same_gradient(gradient: torch.Tensor, expected: torch.Tensor) -> None:
    """Both are sums over 81 tokens, each of a few roundings and of size 1 at most."""
    assert_rounded(gradient, expected, roundings=ROUNDINGS)


def test_the_enumeration_is_a_distribution():
    for logits in (THETA, ROLLOUT):
        assert token_logprobs(logits).sum(dim=1).exp().sum().item() == rounded(1.0)


def test_sequence_importance_weights_give_the_exact_policy_gradient():
    assert_same_gradient(gradient_of_loss([{"mode": "is", "level": "sequence"}]), exact_gradient())


def test_without_correction_the_bias_is_the_predicted_one():
    """Σ_y (mu - pi)(y) R(y) ∇ log pi(y): the gradient follows the policy that sampled, and the gap is not small."""
    pi, mu = (token_logprobs(logits).sum(dim=1).exp() for logits in (THETA, ROLLOUT))
    bias = gradient_of_loss([]) - exact_gradient()
    assert_same_gradient(bias, weighted_score(mu - pi))
    assert bias.norm() > 0.1 * exact_gradient().norm()


def test_truncation_biases_by_the_mass_above_the_cap():
    """Σ_y mu (w - min(w, C)) R ∇ log pi is what tis loses; the cap cuts some sequences here and not all."""
    pi, mu = (token_logprobs(logits).sum(dim=1).exp() for logits in (THETA, ROLLOUT))
    cap = 1.5
    lost = mu * (pi / mu - (pi / mu).clamp(max=cap))
    assert 0 < (lost > 0).sum() < 27
    difference = exact_gradient() - gradient_of_loss([{"mode": "tis", "level": "sequence", "cap": cap}])
    assert_same_gradient(difference, weighted_score(lost))


def test_token_weights_are_exact_only_for_the_last_token():
    """With per-token weights the prefix stays the sampler's: the gradient is off, though less than without."""
    exact = exact_gradient()
    token = (gradient_of_loss([{"mode": "is", "level": "token"}]) - exact).norm()
    none = (gradient_of_loss([]) - exact).norm()
    assert ERROR * exact.norm() < token < none


@pytest.mark.parametrize("term", ["ppo_clip", "cispo"])
def test_other_terms_at_one_update_agree_with_reinforce(term):
    """r = 1: weight rho = w, and the gradient of -r A is that of -A log pi."""
    correction = [{"mode": "is", "level": "sequence"}]
    assert_same_gradient(gradient_of_loss(correction, term), gradient_of_loss(correction))
