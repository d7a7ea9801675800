"""Layouts of the tests of patches/megatron-core-0.16, and what their ranks send back: needs torch alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions; `options` go to the TransformerConfig, `ddp` to the DDP config."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    ddp: dict[str, Any] = dataclasses.field(default_factory=dict)


def assemble(ranks: list[dict]) -> dict[str, torch.Tensor]:
    """Global gradients from those of all ranks; replicas must agree."""
    full: dict[str, torch.Tensor] = {}
    for shards in ranks:
        for (key, offset), (shape, data) in shards.items():
            target = full.setdefault(key, torch.full(shape, float("nan")))
            region = tuple(slice(o, o + n) for o, n in zip(offset, data.shape))
            seen = target[region]
            assert seen.isnan().all() or torch.allclose(seen, data, atol=1e-6), f"replicas of {key} differ"
            target[region] = data
    assert not any(tensor.isnan().any() for tensor in full.values())
    return full
