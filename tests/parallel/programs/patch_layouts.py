"""Layouts of the tests of patches/megatron-core-0.16, and what their ranks send back: needs no Megatron."""

import dataclasses
from typing import Any

import torch

from tests.support.rounding import norm_from_double


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


DOUBLE = Layout(
    options={"params_dtype": torch.float64, "pipeline_dtype": torch.float64}, ddp={"grad_reduce_in_fp32": False}
)


def limits(single: dict[str, torch.Tensor], double: dict[str, torch.Tensor], longest_sum: int) -> dict[str, float]:
    """How far two layouts' gradients of each tensor may lie apart in norm, from one layout's in float32 and float64."""
    return {key: 2 * norm_from_double(single[key].numpy(), double[key].numpy(), longest_sum) for key in single}


def assemble(ranks: list[dict]) -> dict[str, torch.Tensor]:
    """Global gradients from those of all ranks; replicas must agree."""
    full: dict[str, torch.Tensor] = {}
    for shards in ranks:
        for (key, offset), (shape, data) in shards.items():
            target = full.setdefault(key, torch.full(shape, float("nan"), dtype=data.dtype))
            region = tuple(slice(o, o + n) for o, n in zip(offset, data.shape))
            seen = target[region]
            assert seen.isnan().all() or torch.equal(seen, data), f"replicas of {key} differ"
            target[region] = data
    assert not any(tensor.isnan().any() for tensor in full.values())
    return full
