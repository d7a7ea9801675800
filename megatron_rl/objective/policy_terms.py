"""Policy terms: the loss of one token before correction, instruments and aggregation (algorithms.md §2).

Symbols: r = pi/po, w = pi/mu, A = advantage, sg = stop-gradient. Shapes: all arguments and results are "tokens" unless
noted: [B, T] padded or [N] packed, zero where masked. The term of a sequence is repeated on its tokens, so that
seq-mean-token-mean restores it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.config.policy_terms import (
    Cispo,
    Dppo,
    Fipo,
    FunctionTerm,
    Gmpo,
    Gspo,
    MiniRl,
    PolicyTerm,
    PpoClip,
    Reinforce,
    Sapo,
    Vespo,
)
from megatron_rl.objective.inputs import MAX_LOG_RATIO, Tokens, safe_exp
from megatron_rl.process.user_functions import load_function


class Term(NamedTuple):
    loss: Tensor  # tokens, with gradient
    clipped: Tensor | None = None  # bool tokens: those whose gradient the term cuts or bounds
    clipped_lower: Tensor | None = None  # bool tokens: those bounded by the dual clip
    outside: Tensor | None = None  # bool tokens: those whose ratio leaves [1-ε_low, 1+ε_high], bound or not [OH Eq 12]


def ppo_clip(tokens: Tokens, config: PpoClip) -> Term:
    """max(-r A, -clip(r, 1-ε_low, 1+ε_high) A) [DAPO Eq 8]; with dual clip, for A < 0, min(that, -c A) [1912.09729]."""
    return clipped_surrogate(safe_exp(tokens.log_ratio), tokens.advantages, config, config.dual_clip)


def gspo(tokens: Tokens, config: Gspo) -> Term:
    """max(-s_it A, -clip(s_it, 1-ε_low, 1+ε_high) A) [GSPO Eqs 7, 13-14].

    s_i = exp(mean_t log r) and s_it = sg(s_i) pi/sg(pi), which has the value of the sequence and the gradient of the
    token. Under seq-mean-token-mean this is the gradient of the sequence form -min(s_i A, clip(s_i) A).
    """
    log_s = tokens.layout.expand(tokens.sequence_mean(tokens.log_ratio.detach()))
    follows_pi = tokens.current - tokens.current.detach()  # 0, with the gradient of log pi
    return clipped_surrogate(safe_exp(log_s + follows_pi), tokens.advantages, config, None)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, config: PpoClip | Gspo | Fipo, dual_clip: float | None
) -> Term:
    """The term of given ratios; with ``dual_clip``, bounded by it where A < 0."""
    low, high = 1 - config.clip_low, 1 + config.clip_high
    free, bounded = -ratio * advantages, -ratio.clamp(low, high) * advantages
    loss, clipped = torch.maximum(free, bounded), bounded.detach() > free.detach()
    outside = (ratio.detach() < low) | (ratio.detach() > high)
    if dual_clip is None:
        return Term(loss, clipped, outside=outside)
    ceiling = -dual_clip * advantages
    lower = (advantages < 0) & (loss.detach() > ceiling)
    return Term(torch.where(lower, ceiling, loss), clipped, lower, outside)


def gmpo(tokens: Tokens, config: Gmpo) -> Term:
    """-A exp(mean_t l_t), l_t = min(log r, ε_high) for A > 0 and max(log r, -ε_low) for A < 0 [arXiv 2507.20673 Eq 4].

    The mean is over trained tokens, so that padding does not change the ratio. Through it, the gradient reaches every
    token of the sequence.
    """
    high = _select(tokens, tokens.advantages > 0, config.log_clip_high, math.inf)
    low = _select(tokens, tokens.advantages < 0, -config.log_clip_low, -math.inf)
    log_ratio = tokens.log_ratio
    ratio = tokens.layout.expand(safe_exp(tokens.sequence_mean(log_ratio.clamp(low, high))))
    return Term(-tokens.advantages * ratio, (log_ratio.detach() > high) | (log_ratio.detach() < low))


def cispo(tokens: Tokens, config: Cispo) -> Term:
    """-sg(clip(r, 1-ε_low, 1+ε_high)) A log pi [arXiv 2506.13585 Eqs 4-5]: the weight is clipped, no token is dropped.

    Without ε_low the lower bound is 0."""
    ratio = safe_exp(tokens.log_ratio.detach())
    low, high = 0.0 if config.clip_low is None else 1 - config.clip_low, 1 + config.clip_high
    return Term(-ratio.clamp(low, high) * tokens.advantages * tokens.current, (ratio < low) | (ratio > high))


def reinforce(tokens: Tokens, config: Reinforce) -> Term:
    """-A log pi [FP16 Eqs 5-7]; its weight sg(w) comes from the corrections, which see w in place of rho."""
    return Term(-tokens.advantages * tokens.current)


def minirl(tokens: Tokens, config: MiniRl) -> Term:
    """-M sg(min(w, cap)) A log pi; M = 0 where (A > 0 and r > 1+ε_high) or (A < 0 and r < 1-ε_low) [FP]."""
    ratio = safe_exp(tokens.log_ratio.detach())
    too_far = ((tokens.advantages > 0) & (ratio > 1 + config.clip_high)) | (
        (tokens.advantages < 0) & (ratio < 1 - config.clip_low)
    )
    weight = _w(tokens).clamp(max=config.cap).masked_fill(too_far, 0.0)
    return Term(-weight * tokens.advantages * tokens.current, too_far)


def dppo(tokens: Tokens, config: Dppo) -> Term:
    """-M sg(min(w, C)) A log pi; M = 0 where D(mu, pi) > δ and the update moves away from mu (A > 0 and w > 1, or
    A < 0 and w < 1); D = |mu - pi|, or the KL of the two-point distributions [arXiv 2602.04879 Eqs 11-14].

    With ``delta_low`` δ is another one for A < 0."""
    w = _w(tokens)
    moves_away = ((tokens.advantages > 0) & (w > 1)) | ((tokens.advantages < 0) & (w < 1))
    mu, pi = tokens.inference.exp(), tokens.current.detach().exp()
    distance = (mu - pi).abs() if config.divergence == "tv" else _two_point_kl(tokens, mu)
    low, high = config.thresholds
    masked = moves_away & (distance > _select(tokens, tokens.advantages < 0, low, high))
    return Term(-w.clamp(max=config.cap).masked_fill(masked, 0.0) * tokens.advantages * tokens.current, masked)


def sapo(tokens: Tokens, config: Sapo) -> Term:
    """-(4/τ) σ(τ (r - 1)) A, τ by the sign of A [arXiv 2511.20347 Eqs 5-6]; at r = 1 the gradient is PPO's."""
    tau = _select(tokens, tokens.advantages < 0, config.tau_negative, config.tau_positive)
    gate = torch.sigmoid(tau * (safe_exp(tokens.log_ratio) - 1)) * (4 / tau)
    return Term(-gate * tokens.advantages)


def vespo(tokens: Tokens, config: Vespo) -> Term:
    """-sg(φ(W)) A log pi, φ(W) = W^c1 exp(c2 (1 - W)), W = Π_t w_t [arXiv 2602.10693 Eqs 5, 20].

    c1 and c2 go by the sign of A; φ(1) = 1. Eq 20 has the score of the whole sequence: aggregation seq-mean-token-sum.
    """
    log_w = tokens.layout.sum(tokens.current.detach() - tokens.inference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    log_w = tokens.layout.expand(log_w)
    c1 = _select(tokens, tokens.advantages < 0, config.c1_negative, config.c1_positive)
    c2 = _select(tokens, tokens.advantages < 0, config.c2_negative, config.c2_positive)
    weight = (c1 * log_w - c2 * log_w.expm1()).exp()
    return Term(-weight * tokens.advantages * tokens.current)


_SAFE_INFLUENCE = (0.8, 1.0)
"""Bounds of FIPO's influence where A < 0 and r is large, as in the authors' code."""


def fipo(tokens: Tokens, config: Fipo) -> Term:
    """ppo_clip with dual clip c of the advantages f A; f_t = sg(clip(exp(F_t), f_low, f_high)) [arXiv 2603.19835].

    The Future-KL is F_t = Σ_{k >= t} γ^(k - t) M_k log r_k over the rest of the sequence, γ = 2^(-1/τ); M_k = 1 where
    r_k <= c, else 0.
    """
    log_ratio = tokens.log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    takes_part = log_ratio <= math.log(config.dual_clip)
    future = tokens.layout.future_sum(log_ratio * takes_part, tokens.mask, 2 ** (-1 / config.half_life))
    influence = safe_exp(future).clamp(config.influence_low, config.influence_high)
    is_risky = (tokens.advantages < 0) & (log_ratio > math.log(config.safe_ratio))
    influence = torch.where(is_risky, influence.clamp(*_SAFE_INFLUENCE), influence)
    return clipped_surrogate(safe_exp(tokens.log_ratio), tokens.advantages * influence, config, config.dual_clip)


def _select(tokens: Tokens, condition: Tensor, value: float, other: float) -> Tensor:
    """Return torch.where of two numbers in the dtype of the computation; torch itself would round to float32."""
    return torch.full_like(tokens.weight, other).masked_fill_(condition, value)


def _w(tokens: Tokens) -> Tensor:
    """w = pi/mu, detached, clamped like every ratio."""
    return safe_exp(tokens.current.detach() - tokens.inference)


_LARGEST_LOGPROB = -1e-7
"""Smallest distance of p from 1 in log(1 - p), the resolution of float32: the KL of a certain token stays finite."""


def _two_point_kl(tokens: Tokens, mu: Tensor) -> Tensor:
    """mu log(mu/pi) + (1 - mu) log((1 - mu)/(1 - pi))."""
    log_mu = tokens.inference.clamp(max=_LARGEST_LOGPROB)
    log_pi = tokens.current.detach().clamp(max=_LARGEST_LOGPROB)
    log_ratio_of_rest = (-log_mu.expm1()).log() - (-log_pi.expm1()).log()
    return mu * (log_mu - log_pi) + (1 - mu) * log_ratio_of_rest


POLICY_TERMS: dict[str, Callable[[Tokens, object], Term]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "reinforce": reinforce,
    "minirl": minirl,
    "dppo": dppo,
    "sapo": sapo,
    "vespo": vespo,
    "fipo": fipo,
}
"""Keys are the values of `objective.policy_term.name`, but `function`, which names a function of the user's."""


def policy_term(tokens: Tokens, config: PolicyTerm) -> Term:
    """The loss of each token under the recipe's policy term.

    A user's function gets the tokens and its parameters, and returns a `Term` or its loss alone.
    """
    if not isinstance(config, FunctionTerm):
        return POLICY_TERMS[config.name](tokens, config)
    result = load_function(config.function)(tokens, **config.parameters)
    return result if isinstance(result, Term) else Term(result)
