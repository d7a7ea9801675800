"""Frequencies of the rotary embedding that config.json asks for, in float64: plain, Llama 3's and YaRN's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from megatron_rl.instruments.parity.arithmetic import FP32

Tensor = torch.Tensor
KINDS = ("default", "llama3", "yarn")


@dataclass(frozen=True)
class Rotation:
    """``frequencies`` [R/2]: angle per position, of the first R numbers of a head. ``uncertain`` [R/2]: their relative
    error in fp32, beside that of the power. ``scale``: of cosine and sine. ``of_scores``: a further factor of the
    scores of attention."""

    frequencies: Tensor
    uncertain: Tensor
    scale: float = 1.0
    of_scores: float = 1.0


def rotation_of(rope: dict[str, Any], theta: float, width: int, longest: int) -> Rotation | None:
    """Of ``width`` numbers of a head, as ``rope`` says (`rope_parameters` or `rope_scaling`). None: an unknown kind.

    ``longest``: `max_position_embeddings`."""
    plain = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    exact = torch.zeros_like(plain)
    kind = kind_of(rope)
    if kind == "default":
        return Rotation(plain, exact)
    if kind == "llama3":
        return Rotation(_llama3(rope, plain), exact)
    return _yarn(rope, theta, width, longest, plain) if kind == "yarn" else None


def kind_of(rope: dict[str, Any]) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"


def _llama3(rope: dict[str, Any], plain: Tensor) -> Tensor:
    low, high, old = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    lengths = 2 * math.pi / plain
    smooth = ((old / lengths - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / rope["factor"] + smooth * plain


def _yarn(rope: dict[str, Any], theta: float, width: int, longest: int, plain: Tensor) -> Rotation:
    """Frequencies with fewer than `beta_slow` turns in the old length are divided by the factor, those with more than
    `beta_fast` stay, and between is a line over their numbers (Peng et al., YaRN, 2023)."""
    old = rope["original_max_position_embeddings"]
    factor = rope.get("factor") or longest / old
    low, high = (
        width * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (rope.get("beta_fast") or 32, rope.get("beta_slow") or 1)
    )
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high = high + 0.001 if low == high else high
    divided = ((torch.arange(width // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    slow, fast = plain / factor * divided, plain * (1 - divided)
    frequencies = slow + fast
    # In fp32 `divided` has two roundings and the rest, 1 - divided, one more; then come the products and the sum.
    uncertain = FP32 * ((4 * plain / factor + 3 * plain) / frequencies + 4)
    uncertain = torch.where((divided == 0) | (divided == 1), 4 * FP32, uncertain)
    both = rope.get("mscale"), rope.get("mscale_all_dim")
    scale = rope.get("attention_factor")
    if scale is None:
        scale = _magnitude(factor, both[0]) / _magnitude(factor, both[1]) if all(both) else _magnitude(factor, 1.0)
    of_scores = _magnitude(factor, both[1]) ** 2 if both[1] else 1.0
    return Rotation(frequencies, uncertain, scale, of_scores)


def _magnitude(factor: float, share: float) -> float:
    return 0.1 * share * math.log(factor) + 1.0 if factor > 1 else 1.0
