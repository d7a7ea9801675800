"""The norm over heads that ranks share: values and gradients of the plain formula, each rank with its part."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_rl.exact.layers import norm_over_heads
from megatron_rl.layers import attention

ROWS, WIDTH, EPS = 5, 12, 1e-3


def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


@pytest.mark.parametrize("own", [slice(0, 12), slice(0, 4), slice(4, 12)])
def test_each_rank_has_its_part_of_values_and_gradients(own, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((ROWS, WIDTH), (WIDTH,), (ROWS, WIDTH))
    )
    x.requires_grad_(), weight.requires_grad_()
    expected = plain(x, weight)
    expected.backward(grad)
    others = [i for i in range(WIDTH) if i not in range(WIDTH)[own]]
    sums = [  # of the other ranks: forward, then backward
        x.detach()[:, others].square().sum(-1, keepdim=True),
        (grad * x.detach() * weight.detach())[:, others].sum(-1, keepdim=True),
    ]
    monkeypatch.setattr(attention, "_over_ranks", lambda part: part + sums.pop(0).float())
    mine, part = (tensor.detach()[..., own].float().requires_grad_() for tensor in (x, weight))
    computed = attention._WideNorm.apply(mine, part, WIDTH, EPS)
    computed.backward(grad[:, own].float())
    assert sums == []
    for got, want in (
        (computed.detach(), expected.detach()[:, own]),
        (mine.grad, x.grad[:, own]),
        (part.grad, weight.grad[own]),
    ):
        # Some twenty roundings of numbers that are no larger than a few units.
        assert (got.double() - want).abs().max() <= 20 * 2**-24 * max(1.0, float(want.abs().max()))


def test_exact_mode_wants_all_heads_on_one_rank():
    part = SimpleNamespace(weight=torch.ones(4), width=WIDTH, eps=EPS)
    with pytest.raises(NotImplementedError, match="over 12 columns, of which a rank has 4"):
        norm_over_heads(part, torch.ones(ROWS, 4))
