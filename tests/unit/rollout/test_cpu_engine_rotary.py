"""Rotary embeddings on a CPU, as the engine's process has them."""

from __future__ import annotations

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from megatron_rl.rollout import cpu_engine

WIDTH, THETA = 64, 10000.0


def turned(x: torch.Tensor, positions: torch.Tensor, halves: bool) -> torch.Tensor:
    """``x`` [n, heads, D] by the definition, in float64."""
    angles = positions[:, None].double() * THETA ** -(torch.arange(0, WIDTH, 2).double() / WIDTH)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.double().chunk(2, -1) if halves else (x.double()[..., 0::2], x.double()[..., 1::2])
    pair = first * cos - second * sin, second * cos + first * sin
    return torch.cat(pair, -1) if halves else torch.stack(pair, -1).flatten(-2)


@pytest.mark.parametrize("has_dimension_of_heads", [True, False])
@pytest.mark.parametrize("halves", [True, False])
def test_every_head_is_turned_by_its_token_position(halves, has_dimension_of_heads):
    rope = {"rope_theta": THETA, "rope_type": "default"}
    with set_current_vllm_config(VllmConfig()):
        embedding = get_rope(WIDTH, 2048, halves, rope, torch.float32)
    torch.manual_seed(0)
    positions = torch.arange(5) + 3
    query, key = torch.randn(5, 4, WIDTH), torch.randn(5, 1, WIDTH)
    wanted = turned(query, positions, halves), turned(key, positions, halves)
    given = query.clone(), key.clone()
    if not has_dimension_of_heads:
        given = given[0].flatten(1), given[1].flatten(1)
    computed = cpu_engine.rotate(embedding, positions, *given)
    for turned_by_engine, want in zip(computed, wanted, strict=True):
        got = turned_by_engine.view(want.shape)
        # Angles up to 7 in float32, two products and a sum of numbers up to 5.
        assert (got.double() - want).abs().max() <= 64 * torch.finfo(torch.float32).eps
