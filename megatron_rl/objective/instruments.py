"""Objective-level hacking instruments of [OH], arXiv 2602.01103 (algorithms.md §5).

Shapes: "tokens" is [B, T] padded or [N] packed; ``B`` sequences.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_rl.config.objective import Distortion, Variance
from megatron_rl.errors import InputError
from megatron_rl.objective.inputs import NoiseKey, Tokens

# Standard normal numbers that depend only on (seed, step, sequence id, place in the sequence).
#
# The generator is counter-based and has no state, so any layout, order or device draws the same number for a token, up
# to the rounding of log and cos. Hash: the finalizer of SplitMix64 (Steele, Lea and Flood 2014), in wrapping int64
# arithmetic; normal numbers by Box and Muller.


_MASK = (1 << 64) - 1
_INCREMENT, _FACTOR_1, _FACTOR_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(value: int) -> int:
    """Return the int64 with the same 64 bits, as torch takes no larger constant."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _hash_int(value: int) -> int:
    value = ((value ^ (value >> 30)) * _FACTOR_1) & _MASK
    value = ((value ^ (value >> 27)) * _FACTOR_2) & _MASK
    return value ^ (value >> 31)


def _hash(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift_right(bits, 30)) * _signed(_FACTOR_1)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(_FACTOR_2)
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, by: int) -> Tensor:
    """Return the logical shift; torch's own shift copies the sign bit."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def sequence_keys(seed: int, step: int, sequence_ids: Tensor) -> Tensor:
    """Return the keys of the sequences' random streams: [B] int64 ids → [B] int64 keys."""
    base = _hash_int((_hash_int((seed + _INCREMENT) & _MASK) + step + _INCREMENT) & _MASK)
    return _hash(_hash(sequence_ids + _signed(_INCREMENT)) ^ _signed(base))


def standard_normal(keys: Tensor, place: Tensor) -> Tensor:
    """Return float64 draws from N(0, 1), at most 6.7 in size, for int64 keys and places 0, 1, … of equal shape."""
    bits = _hash(keys + (place + 1) * _signed(_INCREMENT))
    radius_from = ((_shift_right(bits, 32) + 1).to(torch.float64)) * 2.0**-32  # (0, 1]
    angle_from = (bits & 0xFFFFFFFF).to(torch.float64) * 2.0**-32
    return (-2 * radius_from.log()).sqrt() * (2 * math.pi * angle_from).cos()


REFERENCE_DISTORTION = Distortion(delta=2.0, low_prob=0.1)
"""Distortion for J if an objective has none, so that arms can be compared."""


def is_low(tokens: Tokens, distortion: Distortion) -> Tensor:
    """bool tokens: po < pi_low; never where masked."""
    return tokens.old < math.log(distortion.low_prob)


def distortion_factor(tokens: Tokens, distortion: Distortion) -> Tensor:
    """phi = δ where po < pi_low, else 1; multiplies the clipped term Y (Eqs 17-18)."""
    return torch.ones_like(tokens.weight).masked_fill_(is_low(tokens, distortion), distortion.delta)


def variance_factor(tokens: Tokens, variance: Variance, key: NoiseKey, sequence_ids: Tensor) -> Tensor:
    """xi ~ N(1, σ²) per token, independent of everything (Eq 21).

    The key is (seed, step, sequence id) and the token's place among the trained tokens of its sequence, so that the
    factor is the same for every layout, padding and split.
    """
    keys = tokens.layout.expand(sequence_keys(key.seed, key.step, sequence_ids))
    noise = standard_normal(keys, tokens.layout.rank(tokens.mask))
    return (1 + variance.sigma * noise).to(tokens.weight.dtype)


def ids_for_noise(tokens: Tokens, whole_minibatch: bool) -> Tensor:
    """Return int64 ids [B]. A call with the whole mini-batch may omit them; row numbers are used then."""
    if tokens.sequence_ids is not None:
        return tokens.sequence_ids.to(tokens.mask.device)
    if not whole_minibatch:
        raise InputError(
            "variance needs sequence_ids when denominators are passed: row numbers of a microbatch would make the "
            "noise depend on how the mini-batch is split"
        )
    return torch.arange(tokens.layout.num_sequences, device=tokens.mask.device)
