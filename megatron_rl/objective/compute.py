"""The objective: policy term × corrections × instruments, aggregated over the global mini-batch; and regularizers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_rl.config.objective import ObjectiveConfig
from megatron_rl.errors import InputError
from megatron_rl.objective.aggregation import MetricStats, count, kept_tokens, token_factors
from megatron_rl.objective.centering import center, split
from megatron_rl.objective.corrections import Corrected, correct, normalized, within_second_moment
from megatron_rl.objective.distillation import taught
from megatron_rl.objective.inputs import (
    MAX_LOG_RATIO,
    Denominators,
    NoiseKey,
    ObjectiveInputs,
    Tokens,
    check_available,
    read_tokens,
)
from megatron_rl.objective.instruments import distortion_factor, ids_for_noise, variance_factor
from megatron_rl.objective.metrics import collect, finalize_metrics
from megatron_rl.objective.policy_terms import policy_term
from megatron_rl.objective.reference_kl import kl_loss


@dataclass(frozen=True)
class ObjectiveResult:
    loss: Tensor  # 0-dim, differentiable: this call's share of the mini-batch's loss
    stats: MetricStats  # detached, on the device; merge and reduce before finalize_metrics

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Metrics of this call alone, as plain floats. Reading them waits for the device."""
        return finalize_metrics(self.stats)


def compute_objective(
    inputs: ObjectiveInputs,
    config: ObjectiveConfig,
    denominators: Denominators | None = None,
    noise_key: NoiseKey | tuple[int, int] = (0, 0),
) -> ObjectiveResult:
    """Return loss and metric statistics of sequences of a mini-batch.

    With `denominators` of the global mini-batch (see compute_denominators), the losses of its microbatches and ranks
    sum to the loss of the mini-batch for any split; without them, these sequences are the mini-batch. It does not wait
    for the device; reading ``result.metrics`` does.

    Per token: loss = φ · ξ · weight · term + regularizer, times the factor of the aggregation. Only term and
    regularizer have a gradient (algorithms.md §2 term and regularizer, §3 weight, §4 factor, §5 φ and ξ), and what
    `score_centering` subtracts (§3). `noise_key` (seed, step) selects the draw of ξ.

    Raises InputError if shapes disagree or a needed tensor is absent.
    """
    check_available(inputs, config)
    tokens = read_tokens(inputs, config.anchor, config.router_shift)
    if inputs.teacher is not None:
        tokens = taught(tokens, inputs.teacher)
    corrected = correct(tokens, config)
    counts = _denominators(tokens, corrected, config, denominators)
    corrected = normalized(within_second_moment(corrected, config, counts), config, counts)
    kept = kept_tokens(tokens, corrected.left_out)
    factor = token_factors(tokens, kept, counts, config)
    term = policy_term(tokens, config.policy_term)
    weight = _token_weight(tokens, config, corrected, denominators is None, NoiseKey(*noise_key))
    loss = policy_loss = (term.loss * (weight * factor)).sum()
    centering = None
    if config.score_centering:
        centering = center(tokens, inputs.head, config)
        weight = _bracket_weight(tokens, config, denominators is None, NoiseKey(*noise_key))
        loss = policy_loss = policy_loss + (centering.mean * (tokens.advantages * weight * factor)).sum()
    regularizer = _regularizer(tokens, config)
    if regularizer is not None:
        regularizer = (regularizer * kept * factor).sum()
        loss = policy_loss + regularizer
    return ObjectiveResult(loss, collect(tokens, config, term, corrected, policy_loss, regularizer, centering))


def _regularizer(tokens: Tokens, config: ObjectiveConfig) -> Tensor | None:
    """λ (log r)² - β H, or λ (log w)² where the objective is anchored on the rollout engine; tokens, 0 where masked.

    λ is ``log_ratio_penalty`` (kl_tau of prime-rl), β ``entropy_bonus`` (entropy_coeff of verl); the divergences of
    ``kl_loss`` and of a teacher's sets are added. No correction weighs or drops it, but for tokens that leave the
    denominators.
    """
    parts, log_ratio = [], tokens.log_ratio
    if config.anchored_on_rollout and config.regularizes_ratio:
        log_ratio = tokens.current - tokens.inference
    if config.log_ratio_penalty:
        parts.append(config.log_ratio_penalty * log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).square())
    if config.kl_loss is not None:
        parts.append(config.kl_loss.coef * kl_loss(tokens, log_ratio, config.kl_loss))
    if tokens.divergence is not None and tokens.divergence.weight:
        parts.append(tokens.divergence.weight * tokens.divergence.value)
    if config.entropy_bonus:
        parts.append(-config.entropy_bonus * tokens.entropy)
    return sum(parts) if parts else None


@torch.no_grad()
def _token_weight(
    tokens: Tokens, config: ObjectiveConfig, corrected: Corrected, whole_minibatch: bool, key: NoiseKey
) -> Tensor:
    """Return the product of mask, corrections, φ and ξ: tokens."""
    weight = tokens.weight
    if corrected.weight is not None:
        weight = weight * corrected.weight
    if config.distortion is not None:
        weight = weight * distortion_factor(tokens, config.distortion)
    if config.variance is not None:
        ids = ids_for_noise(tokens, whole_minibatch)
        weight = weight * variance_factor(tokens, config.variance, key, ids)
    return weight


def _bracket_weight(tokens: Tokens, config: ObjectiveConfig, whole_minibatch: bool, key: NoiseKey) -> Tensor:
    """Return the same without the corrections of one token, which f of the centred score contains: tokens."""
    masks = config.model_copy(update={"correction": split(config)[1]})
    return _token_weight(tokens, masks, correct(tokens, masks), whole_minibatch, key)


def _denominators(
    tokens: Tokens, corrected: Corrected, config: ObjectiveConfig, given: Denominators | None
) -> Denominators:
    if given is None:
        return count(tokens, corrected, config.renormalizes)
    if given.renormalized != config.renormalizes:
        raise InputError(
            f"the objective {'has' if config.renormalizes else 'has no'} correction with renormalize or normalize, or "
            f"m2po, but the denominators were counted {'with' if given.renormalized else 'without'} one; "
            "pass the same config to compute_denominators"
        )
    if config.m2po_threshold and given.moments is None:
        raise InputError(
            "the denominators have no moments, but correction mode m2po needs them; add those of all ranks"
        )
    return given
