"""The rate of one update by the effective sample size of its mini-batch [arXiv 2602.17616]."""

from __future__ import annotations

from megatron_rl.config.learner import EffectiveSampleConfig


def rate_factor(effective_sample: float, config: EffectiveSampleConfig) -> float:
    """Return what the rate of the schedule is multiplied by: min(1, ρ / ρ_0), or its root; at most 1.

    ``effective_sample``: ρ = (Σ w)² / (B Σ w²) of the sequences' weights, in (0, 1].
    """
    share = min(1.0, effective_sample / config.reference)
    return share**0.5 if config.rule == "sqrt" else share
