"""Score centering: the sampler's mean score is subtracted from the score of each token [arXiv 2609.20807].

s_v = ∇ log pi_v; H is the head, the sampler's most probable tokens of a position; masses are of the whole vocabulary.
Outside of H mu is taken as ρ pi, and Σ_v pi_v s_v = 0 folds that tail into H. Shapes: "tokens" is [B, T] padded or [N]
packed; k tokens in a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.config.objective import Correction, ObjectiveConfig, is_of_one_token
from megatron_rl.objective.corrections import CORRECTIONS
from megatron_rl.objective.inputs import MIN_LOGPROB, Head, Tokens, safe_exp

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
    """Return Σ_H c_v log pi_v of each token, c_v = sg(mu_v f(pi_v/mu_v) - α pi_v), α = ρ f(1/ρ) [Eq 14, App. A.2].

    f is the product of the corrections of one token, and 1 without any. Where H is the whole distribution, ρ = 1.
    """
    entries, _ = split(config)
    outside = ~tokens.mask[..., None]
    current = head.current.to(tokens.current.dtype).clamp(min=MIN_LOGPROB).masked_fill(outside, 0.0)
    with torch.no_grad():
        inference = head.inference.to(current.dtype).masked_fill(outside, -torch.inf)
        mu = inference.exp()
        pi = current.detach().exp().masked_fill(inference.isneginf(), 0.0)
        mu_mass, pi_mass = mu.sum(dim=-1), pi.sum(dim=-1)
        tail_ratio = torch.ones_like(mu_mass)
        if not head.is_whole:
            tail_ratio = (1 - mu_mass).clamp(min=SMALLEST_TAIL) / (1 - pi_mass).clamp(min=SMALLEST_TAIL)
        alpha = tail_ratio * _weight(entries, 1 / tail_ratio)
        weighted = mu * _weight(entries, safe_exp(current.detach() - inference))
        coefficients = weighted - alpha[..., None] * pi
        total = coefficients.abs().sum(dim=-1)
    mean = (coefficients * current).sum(dim=-1)
    return Centering(mean, mu_mass, pi_mass, tail_ratio, total, head.has_sampled & tokens.mask)


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
