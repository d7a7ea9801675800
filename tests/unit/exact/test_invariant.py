"""Batch-invariant computation: rows keep their bits in any batch, and are the right numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron_rl.exact.invariant import KEY_BLOCK, BatchInvariant, add_rows, attention
from megatron_rl.layers.attention import attend
from tests.support.rounding import CLOSED_FORM, assert_as_double, assert_rounded

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = 97
FUNCTION = (
    8  # roundings: libraries give functions to within 4 units of the last place, silu is a function and a division
)
HALF = 2  # a function in float32, and one rounding to the half-precision type


def test_functions_in_place_and_on_strided_views():
    torch.manual_seed(0)
    x = torch.randn(7, 66)
    with BatchInvariant():
        half = F.silu(x.chunk(2, dim=-1)[0])
        grown = (x.clone() - 1).exp_()
    assert_rounded(half, F.silu(x[:, :33].double()), FUNCTION, dtype=torch.float32)
    largest = float((x - 1).abs().max())  # the difference is rounded too, by which exp moves by as much
    assert_rounded(grown, (x.double() - 1).exp(), FUNCTION + largest, dtype=torch.float32)


def test_gradients_pass_through():
    torch.manual_seed(0)
    weight = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
    x = torch.randn(19, 6, dtype=torch.float64, requires_grad=True)

    def loss() -> torch.Tensor:
        return (F.silu(F.linear(x, weight)).exp() * torch.arange(8)).sum()

    expected = torch.autograd.grad(loss(), (x, weight))
    with BatchInvariant():
        computed = torch.autograd.grad(loss(), (x, weight))
    for got, want in zip(computed, expected, strict=True):
        # Sums over 19 rows and 8 columns of closed forms, whose exp has arguments of up to 10.
        assert_rounded(got, want, 19 * 8 + 10 * CLOSED_FORM, scale=float(want.abs().max()))


def test_rows_are_added_in_the_order_of_the_source():
    """Four roundings to bf16, one after the other: another order, or one rounding at the end, gives another sum."""
    index = torch.tensor([0, 1, 0, 0, 0])
    source = torch.tensor([1.0, 5.0, 2.0**-9, 2.0**-9, 2.0**-8]).to(torch.bfloat16)[:, None].expand(-1, 3)
    expanded = index[:, None].expand(-1, 3)
    one_by_one = torch.zeros((), dtype=torch.bfloat16)
    for value in source[index == 0, 0]:
        one_by_one = one_by_one + value
    computed = add_rows(torch.zeros(2, 3, dtype=torch.bfloat16), 0, expanded, source)
    assert computed.tolist() == [[one_by_one.item()] * 3, [5.0] * 3]


def attention_inputs(dtype, num_sequences=3, queries=21, heads=4, kv_heads=2, width=8):
    torch.manual_seed(0)
    keys = -(-queries // KEY_BLOCK) * KEY_BLOCK
    query = torch.randn(num_sequences, heads, keys, width).to(dtype)
    key, value = (torch.randn(num_sequences, kv_heads, keys, width).to(dtype) for _ in "kv")
    return query, key, value, torch.arange(keys).expand(num_sequences, -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1, 21, 40, 70])
def test_attention_is_causal_softmax_attention(dtype, queries):
    query, key, value, last = attention_inputs(dtype, queries=queries)
    computed = attention(query, key, value, last, 0.3)

    def plain(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [attend(*tensors, scale=0.3, is_causal=True)]

    assert_as_double([computed], plain, [query, key, value], longest_sum=key.size(2))
    assert computed.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_query_with_a_cache_equals_the_same_query_among_all(dtype):
    query, key, value, last = attention_inputs(dtype, queries=70)
    whole = attention(query, key, value, last, 0.3)
    for position in (0, 1, 30, 31, 32, 63, 64, 69):
        seen = -(-(position + 1) // KEY_BLOCK) * KEY_BLOCK  # later blocks of keys are not there yet
        one = (slice(1, 2), slice(None), slice(position, position + 1))
        alone = attention(query[one], key[1:2, :, :seen], value[1:2, :, :seen], last[1:2, position, None], 0.3)
        assert torch.equal(alone, whole[one]), position
        late = torch.cat([key[:, :, : position + 1], torch.full_like(key, 7.0)[:, :, position + 1 :]], 2)
        assert torch.equal(attention(query, late, value, last, 0.3)[one], whole[one]), "a hidden key shows"


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_tiles_of_one_sequence_lie_in_memory_as_they_come(dtype):
    """No padding, and a key head for each head: nothing on the way has copied the queries."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 32, 2, 8).to(dtype).transpose(1, 2) for _ in "qkv")
    last = torch.arange(32)[None]
    whole = [x.contiguous() for x in (query, key, value)]
    assert torch.equal(attention(query, key, value, last, 0.3), attention(*whole, last, 0.3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_and_functions_are_the_right_numbers(dtype):
    """Whatever other rows there are: test_invariant_batches.py."""
    torch.manual_seed(0)
    x, weight = torch.randn(ROWS, 33).to(dtype), torch.randn(17, 33).to(dtype)
    with BatchInvariant():
        products = [f(x, weight.t()) for f in (torch.matmul, torch.mm, lambda x, w: F.linear(x, w.t()))]
        computed = {f: f(x) for f in (torch.exp, torch.sigmoid, torch.sin, torch.cos, F.silu)}
    for product in products:
        assert product.dtype == dtype
        assert_as_double([product], lambda x, weight: [x @ weight.t()], [x, weight], longest_sum=33)
    for function, values in computed.items():
        assert_rounded(values, function(x.double()), FUNCTION if dtype == torch.float32 else HALF, dtype=dtype)
