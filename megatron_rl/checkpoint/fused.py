"""Tensors that Megatron or Hugging Face keeps as one and the other as several: cut apart, and put together again.

Whole tensors of a model that no ranks share; `shards` cuts them over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rl.model.architecture import Architecture
from megatron_rl.model.families.weights import Sharding, qkv_rows

PARTED = ("gated", "interleaved", "delta", "delta_by_head")
"""Ways to share a weight that consists of sections, of which each rank has a part of each."""


def sections_of(sharding: Sharding, rows: int, a: Architecture) -> tuple[int, ...]:
    """The rows of each section of a Megatron tensor of so many."""
    if sharding in ("gated", "interleaved"):
        return (rows // 2,) * 2
    sections = a.linear.sections
    return sections if rows == sum(sections) else sections[:3]  # those that the convolution sees


def take_apart(sharding: Sharding, tensors: Sequence[torch.Tensor], a: Architecture) -> list[torch.Tensor]:
    """Hugging Face's tensors → Megatron's sections, for each sharding of `PARTED`."""
    if sharding == "gated":
        return list(tensors)
    if sharding == "interleaved":
        return [tensors[0][..., half::2].t() for half in range(2)]
    if sharding == "delta":
        whole = torch.cat(list(tensors))
        return list(whole.split(sections_of(sharding, len(whole), a)))
    parts: list[torch.Tensor] = []
    for tensor, sections in zip(tensors, (a.linear.sections[:4], a.linear.sections[4:]), strict=True):
        by_head = tensor.unflatten(0, (a.linear.key_heads, -1))
        rows = [section // a.linear.key_heads for section in sections]
        parts += [part.flatten(0, 1) for part in by_head.split(rows, dim=1)]
    return parts


def put_together(sharding: Sharding, parts: Sequence[torch.Tensor], a: Architecture) -> list[torch.Tensor]:
    """The inverse of `take_apart`."""
    if sharding == "gated":
        return list(parts)
    if sharding == "interleaved":
        return [torch.stack(list(parts), dim=1).flatten(0, 1).t().contiguous()]
    if sharding == "delta":
        return [torch.cat(list(parts[:3])), *parts[3:]]
    by_head = [part.unflatten(0, (a.linear.key_heads, -1)) for part in parts]
    return [torch.cat(some, dim=1).flatten(0, 1) for some in (by_head[:4], by_head[4:])]


def join_qkv(tensors: Sequence[torch.Tensor], a: Architecture) -> torch.Tensor:
    """q, k and v, each [heads · D, …], or one tensor of all three behind each other → Megatron's fused rows: per
    key/value group its queries, their gates if attention has any, its key, its value."""
    if len(tensors) == 1:
        tensors = tensors[0].split(qkv_rows(a))
    blocks = [tensor.reshape(a.num_kv_heads, -1, *tensor.shape[1:]) for tensor in tensors]
    if a.output_gate:  # Hugging Face has each head's gate behind its query
        blocks[0] = blocks[0].unflatten(1, (-1, 2, a.head_dim)).transpose(1, 2).flatten(1, 3)
    return torch.cat(blocks, dim=1).flatten(0, 1)


def split_qkv(fused: torch.Tensor, a: Architecture) -> list[torch.Tensor]:
    """The inverse of `join_qkv`: three tensors."""
    blocks = fused.reshape(a.num_kv_heads, -1, a.head_dim, *fused.shape[1:])
    queries, keys, values = blocks.split((blocks.size(1) - 2, 1, 1), dim=1)
    if a.output_gate:
        queries = queries.unflatten(1, (2, -1)).transpose(1, 2)
        return [queries.flatten(0, 3), keys.flatten(0, 2), values.flatten(0, 2)]
    return [queries.flatten(0, 2), keys.flatten(0, 2), values.flatten(0, 2)]
