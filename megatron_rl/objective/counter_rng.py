"""Standard normal numbers that depend on (seed, step, sequence id, place in the sequence) and on nothing else.

A counter-based generator: no state, so any layout, order or device draws the same number for the same token, up to
the rounding of log and cos. Hash: the finalizer of SplitMix64 (Steele, Lea and Flood 2014), in wrapping int64
arithmetic; numbers by Box and Muller.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_INCREMENT, _FACTOR_1, _FACTOR_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(value: int) -> int:
    """The int64 of the same 64 bits: torch takes no larger constant."""
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
    """Logical shift: torch's own copies the sign bit."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def sequence_keys(seed: int, step: int, sequence_ids: Tensor) -> Tensor:
    """[B] int64 ids → [B] int64 keys of their streams."""
    base = _hash_int((_hash_int((seed + _INCREMENT) & _MASK) + step + _INCREMENT) & _MASK)
    return _hash(_hash(sequence_ids + _signed(_INCREMENT)) ^ _signed(base))


def standard_normal(keys: Tensor, place: Tensor) -> Tensor:
    """int64 keys and places 0, 1, … (any one shape) → float64 draws from N(0, 1), at most 6.7 in size."""
    bits = _hash(keys + (place + 1) * _signed(_INCREMENT))
    radius_from = ((_shift_right(bits, 32) + 1).to(torch.float64)) * 2.0**-32  # (0, 1]
    angle_from = (bits & 0xFFFFFFFF).to(torch.float64) * 2.0**-32
    return (-2 * radius_from.log()).sqrt() * (2 * math.pi * angle_from).cos()
