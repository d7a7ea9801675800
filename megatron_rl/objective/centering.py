"""Score centering: the sampler's mean score is subtracted from the score of each token [arXiv 2609.20807].

s_v = ∇ log pi_v; H is the head, the sampler's most probable tokens of a position; masses are of the whole vocabulary.
Outside of H mu and po are taken as multiples of pi, and Σ_v pi_v s_v = 0 folds that tail into H. Shapes: "tokens" is
[B, T] padded or [N] packed; k tokens in a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.config.objective import Correction, ObjectiveConfig, is_of_one_token
from megatron_rl.objective.corrections import CORRECTIONS
from megatron_rl.objective.inputs import Head, Tokens, safe_exp
from megatron_rl.objective.policy_terms import clipped_surrogate
from megatron_rl.types import MIN_LOGPROB

SMALLEST_TAIL = 1e-6
"""Floor of 1 - Σ_H mu and of 1 - Σ_H pi, which log-probs in float32 cannot tell from 0 [App. A.3]."""


@dataclass(frozen=True)
class Centering:
    """Of each token, 0 where masked."""

    mean: Tensor  # tokens, with gradient: Σ_H c_v log pi_v
    mu_mass: Tensor  # tokens: Σ_H mu
    pi_mass: Tensor  # tokens: Σ_H pi
    tail_ratio: Tensor  # tokens: ρ = (1 - Σ_H mu) / (1 - Σ_H pi)
    coefficients: Tensor  # tokens: Σ_H |c_v|
    has_sampled: Tensor  # bool tokens: the sampled token is in H


def split(config: ObjectiveConfig) -> tuple[list[Correction], list[Correction]]:
    """Return the corrections that make up f, a function of one token, and those that weigh the whole bracket."""
    entries = config.active_corrections
    return [e for e in entries if is_of_one_token(e)], [e for e in entries if not is_of_one_token(e)]


def center(tokens: Tokens, head: Head, config: ObjectiveConfig) -> Centering:
    """Return Σ_H c_v log pi_v of each token, c_v = sg(mu_v f(q_v/mu_v) h(pi_v/q_v) - α pi_v) [Eq 14, App. A.2].

    f is the product of the corrections of one token, and 1 without any. q is what the ratio r of the policy term is
    measured from, h(r) its slope in log pi: r, and 0 where the clip leaves a token with this A no gradient. `reinforce`
    has no r: q = pi, h = 1. α is the same of the tails, over that of pi. Where H is all of it, tails are 1.
    """
    entries, _ = split(config)
    outside = ~tokens.mask[..., None]

    def of_head(logprobs: Tensor) -> Tensor:
        return logprobs.to(tokens.current.dtype).clamp(min=MIN_LOGPROB).masked_fill(outside, 0.0)

    current = of_head(head.current)
    with torch.no_grad():
        log_mu = head.inference.to(current.dtype).masked_fill(outside, -torch.inf)
        log_pi = log_q = log_seen = current.detach()
        if config.policy_term.name == "ppo_clip" and config.anchor == "bypass":
            log_q = log_mu
        elif config.centres_on_po and head.old is not None:
            log_q = log_seen = of_head(head.old)

        def mass(logprobs: Tensor) -> Tensor:
            return logprobs.exp().masked_fill(log_mu.isneginf(), 0.0).sum(dim=-1)

        def tail(logprobs: Tensor) -> Tensor:
            return torch.ones_like(tokens.weight) if head.is_whole else (1 - mass(logprobs)).clamp(min=SMALLEST_TAIL)

        tail_ratio = tail(log_mu) / tail(log_pi)
        alpha = tail_ratio * _weight(entries, tail(log_seen) / tail(log_mu))
        alpha = alpha * _slope(config, tail(log_pi) / tail(log_q), tokens.advantages)
        coefficients = log_mu.exp() * _weight(entries, safe_exp(log_seen - log_mu))
        coefficients = coefficients * _slope(config, safe_exp(log_pi - log_q), tokens.advantages[..., None])
        coefficients = coefficients - alpha[..., None] * log_pi.exp().masked_fill(log_mu.isneginf(), 0.0)
        total = coefficients.abs().sum(dim=-1)
    mean = (coefficients * current).sum(dim=-1)
    return Centering(mean, mass(log_mu), mass(log_pi), tail_ratio, total, head.has_sampled & tokens.mask)


def _slope(config: ObjectiveConfig, ratio: Tensor, advantages: Tensor) -> Tensor:
    """h of each ratio."""
    if config.policy_term.name == "reinforce":
        return torch.ones_like(ratio)
    term = clipped_surrogate(ratio, advantages, config.policy_term, config.policy_term.dual_clip)
    bound = term.clipped if term.clipped_lower is None else term.clipped | term.clipped_lower
    return ratio.masked_fill(bound, 0.0)


class _Given:
    """`Ratios` of single tokens that stand in a head, or for its tail."""

    def __init__(self, token: Tensor):
        self.token = token

    def at(self, level: str) -> Tensor:
        assert level == "token"
        return self.token


def _weight(entries: list[Correction], ratio: Tensor) -> Tensor:
    """f of each ratio."""
    weight = torch.ones_like(ratio)
    for entry in entries:
        effect = CORRECTIONS[entry.mode](entry, _Given(ratio))
        weight = weight if effect.weight is None else weight * effect.weight
        weight = weight if effect.keep is None else weight * effect.keep
    return weight
