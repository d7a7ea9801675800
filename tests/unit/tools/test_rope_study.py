"""The arithmetics of the study of rotary embeddings are those that they are named after."""

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

from tools.dev.rope_study import BASE, WIDTH, fused, half_turned, study, tables, unfused, vllm


def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(200, WIDTH, generator=generator).bfloat16(), torch.arange(200) * 160


def test_unfused_is_megatrons_bit_for_bit():
    x, positions = drawn()
    angles = torch.outer(positions.float(), 1.0 / (BASE ** (torch.arange(0, WIDTH, 2) / WIDTH))).repeat(1, 2)
    theirs = _apply_rotary_pos_emb_bshd(x[:, None, None], angles[:, None, None])[:, 0, 0]
    assert torch.equal(unfused(x, *tables(positions)), theirs)


def test_vllm_is_the_engines_kernel_bit_for_bit():
    ops, (x, positions) = pytest.importorskip("vllm._custom_ops"), drawn()
    cos, sin = (table[:, : WIDTH // 2] for table in tables(torch.arange(32000)))
    query, key = x.clone(), x.clone()
    ops.rotary_embedding(positions, query, key, WIDTH, torch.cat([cos, sin], dim=1).bfloat16(), True)
    assert torch.equal(query, vllm(x, *tables(positions)))
    assert torch.equal(query, key)


@pytest.mark.parametrize(("rotate", "tables_in"), [(fused, torch.float32), (vllm, torch.bfloat16)])
def test_the_others_round_once(rotate, tables_in):
    """The nearest bf16 number of the product with its tables, but where float32 cannot tell two of them apart."""
    x, positions = drawn()
    cos, sin = tables(positions)
    exact = x.double() * cos.to(tables_in).double() + half_turned(x).double() * sin.to(tables_in).double()
    differ = rotate(x, cos, sin) != exact.bfloat16()
    assert differ.float().mean() < 1e-3


def test_positions_of_zero_turn_nothing():
    x, _ = drawn()
    for rotate in (fused, unfused, vllm):
        assert torch.equal(rotate(x, *tables(torch.zeros(200))), x)
    assert study(1, 500)["fused - vllm"] == 0.0
