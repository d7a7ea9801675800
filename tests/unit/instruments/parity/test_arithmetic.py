"""Bounds of `instruments.parity`: rounded operators stay within them, operators that compute something else do not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron_rl.instruments.parity import arithmetic
from megatron_rl.instruments.parity.arithmetic import UNITS, Bounded, Rounding, gamma

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
N, D, H, G = 24, 32, 4, 2


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(x: torch.Tensor) -> Bounded:
    return Bounded.exact(x)


def share(computed: torch.Tensor, wanted: Bounded) -> float:
    """Largest error over its bound."""
    return float(((computed.double() - wanted.value).abs() / wanted.error).max())


def test_gamma_is_the_sum_of_rounding_errors_of_a_sum():
    """(1 + u)ⁿ − 1 ≤ γ(n), and it is no larger than needed by more than its second order."""
    for terms in (1, 128, 4096):
        grown = (1 + 2.0**-24) ** terms - 1
        assert grown <= gamma(terms) <= grown + 2 * (terms * 2.0**-24) ** 2


@pytest.mark.parametrize("dtype", DTYPES)
class TestOperators:
    def test_a_sum_in_the_worst_order_is_within_the_bound(self, dtype):
        """One large term first: every later one is rounded to its unit."""
        x = torch.cat([torch.full((1, 1), 256.0), torch.full((1, 511), 1.3)], 1).to(dtype)
        w = torch.ones(1, 512, dtype=dtype)
        total = torch.zeros(1, 1)
        for term in x[0].float():
            total += term
        assert share(total.to(dtype), arithmetic.linear(exact(x), w.double(), None, Rounding.of(dtype))) <= 1

    def test_parts_that_ranks_round_one_by_one(self, dtype):
        x, w = drawn(N, 256, dtype=dtype), drawn(64, 256, dtype=dtype, seed=1)
        parts = [F.linear(a, b) for a, b in zip(x.chunk(2, 1), w.chunk(2, 1), strict=True)]
        wanted = arithmetic.linear(exact(x), w.double(), None, Rounding.of(dtype), parts=2)
        assert share(parts[0] + parts[1], wanted) <= 1
        assert share(parts[0], wanted) > 1

    def test_rotation(self, dtype):
        x = drawn(N, H, D, dtype=dtype)
        frequencies = 1e4 ** -(torch.arange(0, D, 2).double() / D)
        angles = torch.arange(N).double()[:, None] * frequencies
        wanted = arithmetic.rotate(exact(x), exact(angles), Rounding.of(dtype))

        def rotated(shift: float) -> torch.Tensor:
            moved = (torch.arange(N)[:, None] + shift) * frequencies.float()
            cos, sin = (f(torch.cat([moved, moved], -1))[:, None].to(dtype) for f in (torch.cos, torch.sin))
            first, second = x.chunk(2, -1)
            return x * cos + torch.cat([-second, first], -1) * sin

        assert share(rotated(0.0), wanted) <= 1
        assert share(rotated(1.0), wanted) > 1
        uncertain = Bounded(angles, torch.full_like(angles, 1.0))  # a position is an angle of at most one
        assert share(rotated(1.0), arithmetic.rotate(exact(x), uncertain, Rounding.of(dtype))) <= 1
        scaled = arithmetic.rotate(exact(x), exact(angles), Rounding.of(dtype), scale=1.5)
        assert share(rotated(0.0), scaled) > 1
        assert share((1.5 * rotated(0.0).double()).to(dtype), scaled) <= 1

    def test_attention(self, dtype):
        q, k, v = (drawn(N, heads, D, dtype=dtype, seed=i) for i, heads in enumerate((H, G, G)))
        lengths = [N - 8, 8]
        wanted = arithmetic.attention(exact(q), exact(k), exact(v), lengths, Rounding.of(dtype))

        def attended(lengths: list[int]) -> torch.Tensor:
            parts = [
                F.scaled_dot_product_attention(
                    *(x.transpose(0, 1)[None] for x in qkv), is_causal=True, enable_gqa=True
                )[0].transpose(0, 1)
                for qkv in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
            ]
            return torch.cat(parts)

        assert share(attended(lengths), wanted) <= 1
        assert share(attended([N]), wanted) > 1  # across sequences
        assert share(attended([N - 9, 9]), wanted) > 1

    @pytest.mark.parametrize("renormalised", [True, False])
    def test_weights_of_experts(self, dtype, renormalised):
        logits = 3 * drawn(N, 8, dtype=dtype)
        chosen = logits.topk(2).indices
        wanted = arithmetic.route_weights(exact(logits), chosen, renormalised, Rounding.of(dtype))
        picked = logits.gather(1, chosen)
        over_chosen = picked.softmax(-1, dtype=torch.float32).to(dtype)
        over_all = (picked - logits.logsumexp(-1, keepdim=True)).exp()
        right, wrong = (over_chosen, over_all) if renormalised else (over_all, over_chosen)
        assert share(right, wanted) <= 1
        assert share(wrong, wanted) > 1

    def test_logprobs(self, dtype):
        logits, tokens = 4 * drawn(N, 120, dtype=dtype), torch.arange(N)
        wanted = arithmetic.logprobs(exact(logits), tokens, 0.8)
        computed = (logits.float() / 0.8).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        assert share(computed, wanted) <= 1
        padded = (F.pad(logits, (0, 8)).float() / 0.8).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        assert share(padded, wanted) > 1
        assert share(logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0], wanted) > 1

    def test_errors_of_inputs_are_carried_on(self, dtype):
        """Each operator of inputs that are off by their bounds is within its bound."""
        unit = UNITS[dtype]
        x = Bounded(drawn(N, 128, dtype=dtype).double(), torch.full((N, 128), 8 * unit, dtype=torch.float64))
        off = x.value + x.error * drawn(N, 128, dtype=dtype, seed=5).sign().double()
        w, to = drawn(64, 128, dtype=dtype, seed=1).double(), Rounding.of(dtype)
        assert share(off @ w.t(), arithmetic.linear(x, w, None, to)) <= 1
        norm = arithmetic.rms_norm(x, w[0], 1e-6, to)
        assert share(off * (off.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w[0], norm) <= 1
