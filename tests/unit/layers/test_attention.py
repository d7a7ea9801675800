"""PyTorch's attention under AMX, and the norm over heads that ranks share."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megatron_rl.exact.layers import norm_over_heads
from megatron_rl.layers import attention
from megatron_rl.layers.attention import PACKS_IN_VAIN, attend


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    """Query with four heads, key and value with two: [B, H, S, D]."""
    random = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, 24, 16, generator=random).to(dtype).requires_grad_() for heads in (4, 2, 2)]


def failing(message: str):
    """torch's attention, which fails in 16 bits."""
    real = F.scaled_dot_product_attention

    def attention(query: torch.Tensor, *others: torch.Tensor, **options) -> torch.Tensor:
        if query.dtype.itemsize == 2:
            raise RuntimeError(message)
        return real(query, *others, **options)

    return attention


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_where_16_bits_fail_they_are_computed_in_fp32(monkeypatch, dtype, masked):
    qkv = inputs(dtype)
    wide = [x.detach().float().requires_grad_() for x in qkv]
    mask = torch.zeros(24, 24, dtype=dtype).masked_fill_(torch.ones(24, 24).triu(1) > 0, -torch.inf) if masked else None
    options = {"attn_mask": mask.float()} if masked else {"is_causal": True}
    expected = F.scaled_dot_product_attention(*wide, scale=0.3, enable_gqa=True, **options)
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", failing(f"{PACKS_IN_VAIN} when …"))
    computed = attend(*qkv, scale=0.3, mask=mask, is_causal=not masked)
    assert computed.dtype == dtype
    assert torch.equal(computed, expected.to(dtype))
    grads = torch.autograd.grad(computed.float().sum(), qkv)
    for grad, whole in zip(grads, torch.autograd.grad(expected.sum(), wide), strict=True):
        assert torch.equal(grad, whole.to(dtype))


def test_another_failure_is_one(monkeypatch):
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", failing("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        attend(*inputs(torch.bfloat16), scale=0.3, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_does_not_fail_is_torchs_own(dtype):
    qkv = inputs(dtype)
    expected = F.scaled_dot_product_attention(*qkv, is_causal=True, scale=0.3, enable_gqa=True)
    assert torch.equal(attend(*qkv, scale=0.3, is_causal=True), expected)


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
