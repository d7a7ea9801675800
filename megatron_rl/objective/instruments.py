"""Objective-level hacking instruments of [OH], arXiv 2602.01103 (algorithms.md §5).

Shapes: "tokens" is [B, T] padded or [N] packed; ``B`` sequences.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_rl.config.objective import Distortion, Variance
from megatron_rl.errors import InputError
from megatron_rl.objective.counter_rng import sequence_keys, standard_normal
from megatron_rl.objective.inputs import NoiseKey, Tokens

REFERENCE_DISTORTION = Distortion(delta=2.0, low_prob=0.1)
"""J is evaluated with this where an objective has no distortion of its own, so that arms compare."""


def is_low(tokens: Tokens, distortion: Distortion) -> Tensor:
    """bool tokens: po < pi_low; never where masked."""
    return tokens.old < math.log(distortion.low_prob)


def distortion_factor(tokens: Tokens, distortion: Distortion) -> Tensor:
    """phi = δ where po < pi_low, else 1; multiplies the clipped term Y (Eqs 17-18)."""
    return torch.ones_like(tokens.weight).masked_fill_(is_low(tokens, distortion), distortion.delta)


def variance_factor(tokens: Tokens, variance: Variance, key: NoiseKey, sequence_ids: Tensor) -> Tensor:
    """xi ~ N(1, σ²) per token, independent of everything (Eq 21).

    Keyed by (seed, step, sequence id) and the token's place among its sequence's trained tokens: the same for every
    layout, padding and split.
    """
    keys = tokens.layout.expand(sequence_keys(key.seed, key.step, sequence_ids))
    noise = standard_normal(keys, tokens.layout.rank(tokens.mask))
    return (1 + variance.sigma * noise).to(tokens.weight.dtype)


def ids_for_noise(tokens: Tokens, whole_minibatch: bool) -> Tensor:
    """[B] int64 ids. A call that is the whole mini-batch may leave them out: its row numbers name the sequences."""
    if tokens.sequence_ids is not None:
        return tokens.sequence_ids.to(tokens.mask.device)
    if not whole_minibatch:
        raise InputError(
            "variance needs sequence_ids when denominators are passed: row numbers of a microbatch would make the "
            "noise depend on how the mini-batch is split"
        )
    return torch.arange(tokens.layout.num_sequences, device=tokens.mask.device)
