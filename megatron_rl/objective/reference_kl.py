"""The divergence from a reference policy, KL(pi || ref), estimated from the sampled tokens [Schulman, kl-approx].

Spelled and bounded as in verl's `kl_penalty`. Shapes: "tokens" is [B, T] padded or [N] packed.
"""

from __future__ import annotations

from torch import Tensor

from megatron_rl.config.policy_terms import KlLoss
from megatron_rl.objective.inputs import Tokens, k3, safe_exp

MAX_K3 = KlLoss.model_fields["cap"].default


def estimate(difference: Tensor, kind: str, cap: float | None = MAX_K3) -> Tensor:
    """Return k1, k2 or k3 of each token; ``difference``: d = log pi - log ref.

    k1 = d;  k2 = d² / 2;  k3 = exp(-d) - 1 + d, at most ``cap``, of d clamped to ±MAX_LOG_RATIO.
    """
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    k = k3(-difference)
    return k if cap is None else k.clamp(max=cap)


def kl_loss(tokens: Tokens, log_ratio: Tensor, config: KlLoss) -> Tensor:
    """Return k of each token, with its gradient, or k2's for a type with a plus; tokens, 0 where masked.

    ``log_ratio``: of pi to the policy that sampled; `unbiased` multiplies k by its ratio.
    """
    difference = tokens.current - tokens.reference
    k = estimate(difference, config.type.rstrip("+"), config.cap)
    if config.type.endswith("+"):
        k2 = estimate(difference, "k2")
        return k.detach() + (k2 - k2.detach())
    return safe_exp(log_ratio) * k if config.unbiased else k
