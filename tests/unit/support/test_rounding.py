"""The bounds of tests/support/rounding.py let through every order of a computation, and no other computation."""

import math

import numpy as np
import pytest
import torch

from tests.support.rounding import (
    assert_as_double,
    assert_rounded,
    printed,
    rounded,
    standard_errors,
)

WIDTH = 64
SMALLER = {torch.float32: torch.float16, torch.float16: torch.float8_e4m3fn, torch.bfloat16: torch.float8_e4m3fn}


def layer(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """A product, its log-softmax, and the gradients of a sum of both."""
    logits = x @ weight.t()
    out = logits.log_softmax(-1)
    return [out, *torch.autograd.grad(out[:, :7].sum(), [x, weight], retain_graph=True)]


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, WIDTH, generator=generator).to(dtype).requires_grad_() for n in (40, 90)]


def one_by_one(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """The worst order of the product: terms added to each other from the largest column number down."""
    logits = torch.zeros(len(x), len(weight), dtype=x.dtype)
    for column in reversed(range(x.size(1))):
        logits = logits + x[:, column, None] * weight[:, column]
    out = logits.log_softmax(-1)
    return [out, *torch.autograd.grad(out[:, :7].sum(), [x, weight])]


MUTATIONS = {
    "a weight in the next smaller type": lambda x, w: layer(x, w.to(SMALLER[w.dtype]).to(w.dtype)),
    "one column left out": lambda x, w: layer(torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1), w),
    "two tokens exchanged": lambda x, w: layer(x[[1, 0, *range(2, len(x))]], w),
    "a temperature of 1.1": lambda x, w: layer(x, w / 1.1),
    "one gradient twice": lambda x, w: [*layer(x, w)[:2], 2 * layer(x, w)[2]],
}


@pytest.mark.parametrize("dtype", SMALLER, ids=str)
def test_another_order_is_within_the_bound(dtype):
    inputs = tensors(dtype)
    assert_as_double(one_by_one(*inputs), layer, inputs, longest_sum=90)


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("dtype", SMALLER, ids=str)
def test_another_computation_is_not(dtype, mutation):
    inputs = tensors(dtype)
    with pytest.raises(AssertionError, match=r"result \d: .* from float64's, bound"):
        assert_as_double(MUTATIONS[mutation](*inputs), layer, inputs, longest_sum=90)


def test_a_closed_form_has_as_many_roundings_as_it_has_steps():
    terms = np.random.default_rng(0).normal(size=63)
    assert sum(terms) == rounded(math.fsum(terms), roundings=63, scale=float(np.abs(terms).sum()))
    assert sum(terms) * (1 + 2**-40) != rounded(math.fsum(terms))
    assert sum(np.float32(x) for x in terms) != rounded(math.fsum(terms))
    sums = torch.tensor(terms).cumsum(0)
    assert_rounded(sums, torch.tensor([math.fsum(terms[: i + 1]) for i in range(63)], dtype=torch.float64), scale=63)
    with pytest.raises(AssertionError):
        assert_rounded(sums.float(), sums)


def test_means_and_printed_digits():
    draws = np.random.default_rng(0).normal(3.0, 2.0, size=10_000)
    assert abs(draws.mean() - 3.0) < standard_errors(2.0, 10_000) == 0.1
    assert math.pi == printed(3.14, 2)
    assert math.pi != printed(3.15, 2)
