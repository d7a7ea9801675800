"""Batch-invariant computation: rows keep their bits in any batch, and are the right numbers."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from megatron_rl.exact.invariant import KEY_BLOCK, BatchInvariant, add_rows, attention
from megatron_rl.layers.attention import attend
from megatron_rl.learner.logprobs import token_logprobs
from tests.support.rounding import CLOSED_FORM, assert_as_double, assert_rounded
from tests.support.slow import slow_but

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


BATCHES = 1000
MOST = 64
TOTAL = 150

Tensor = torch.Tensor

Rows = Callable[[Tensor], Tensor]

"""Numbers of rows [n] → what is computed of them [n, …]."""


def linear(dtype: torch.dtype) -> Rows:
    x, weight = torch.randn(TOTAL, 24).to(dtype), torch.randn(20, 24).to(dtype)
    return lambda rows: F.linear(x[rows], weight)


def rms_norm(dtype: torch.dtype) -> Rows:
    x, norm = 3 * torch.randn(TOTAL, 40).to(dtype), torch.nn.RMSNorm(40, eps=1e-6).to(dtype)
    return lambda rows: norm(x[rows])


def gated_silu(dtype: torch.dtype) -> Rows:
    x = 3 * torch.randn(TOTAL, 22).to(dtype)  # 11 to a row: rows begin anywhere in a register

    def call(rows: Tensor) -> Tensor:
        gate, up = x[rows].chunk(2, dim=-1)
        return F.silu(gate) * up

    return call


def rotary(dtype: torch.dtype) -> Rows:
    angles = 100 * torch.rand(TOTAL, 13)
    return lambda rows: torch.cat([angles[rows].cos().to(dtype), angles[rows].sin().to(dtype)], -1)


def router(dtype: torch.dtype) -> Rows:
    """Logits, the choice of experts and their weights."""
    x, weight = torch.randn(TOTAL, 24).to(dtype), torch.randn(9, 24).to(dtype)

    def call(rows: Tensor) -> Tensor:
        top, chosen = F.linear(x[rows], weight).topk(3)
        return torch.cat([torch.softmax(top, -1, dtype=torch.float32), chosen], -1)

    return call


def gate(dtype: torch.dtype) -> Rows:
    """Of a shared expert: one column."""
    x, weight = torch.randn(TOTAL, 128).to(dtype), torch.randn(1, 128).to(dtype)
    return lambda rows: F.sigmoid(F.linear(x[rows], weight))


def experts(dtype: torch.dtype) -> Rows:
    """Rows sorted by expert, a product for each expert, and the sum over a token's experts."""
    x, weights = torch.randn(TOTAL, 16).to(dtype), torch.randn(4, 16, 16).to(dtype)
    chosen = torch.stack([torch.randperm(4)[:2].sort().values for _ in range(TOTAL)])

    def call(rows: Tensor) -> Tensor:
        sources, places = [], []
        for expert in range(4):
            own = (chosen[rows] == expert).any(1).nonzero().flatten()
            sources.append(F.linear(x[rows][own], weights[expert]))
            places.append(own)
        index = torch.cat(places)[:, None].expand(-1, 16)
        return add_rows(torch.zeros(len(rows), 16, dtype=dtype), 0, index, torch.cat(sources))

    return call


def log_probs(dtype: torch.dtype) -> Rows:
    logits, labels = 4 * torch.randn(TOTAL, 50).to(dtype), torch.randint(0, 47, (TOTAL,))

    def call(rows: Tensor) -> Tensor:
        places = torch.arange(len(rows))
        computed = token_logprobs(logits[rows], places, labels[rows], vocab_size=47, temperature=0.9)
        return torch.stack(computed, 1)

    return call


def decode(dtype: torch.dtype) -> Rows:
    """Single queries of any sequences at any positions, in as many blocks of keys as the longest of them needs."""
    query, key, value, sequences, positions = sequences_of(dtype)

    def call(rows: Tensor) -> Tensor:
        seen = (int(positions[rows].max()) // KEY_BLOCK + 1) * KEY_BLOCK
        own, places = sequences[rows], positions[rows]
        keys, values = key[own, :, :seen], value[own, :, :seen]
        return attention(query[own, :, places][:, :, None], keys, values, places[:, None], 0.3).squeeze(2)

    return call


def sequences_of(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Three sequences of 50 tokens: queries [3, 4, M, 8], keys and values [3, 2, M, 8]; where each token is."""
    whole = -(-50 // KEY_BLOCK) * KEY_BLOCK
    query = torch.randn(3, 4, whole, 8).to(dtype)
    key, value = (torch.randn(3, 2, whole, 8).to(dtype) for _ in "kv")
    return query, key, value, torch.arange(3).repeat_interleave(50), torch.arange(50).repeat(3)


OPERATIONS = [linear, rms_norm, gated_silu, rotary, router, gate, experts, log_probs, decode]


def compositions(seed: int) -> list[Tensor]:
    """Rows of random batches: every size from 1 to `MOST`, any rows in any order, some of them twice."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.cat([torch.arange(1, MOST + 1), torch.randint(1, MOST + 1, (BATCHES - MOST,), generator=random)])
    return [torch.randint(0, TOTAL, (int(size),), generator=random) for size in sizes]


@pytest.mark.parametrize("dtype", slow_but([torch.bfloat16], DTYPES), ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_batch_changes_a_bit_of_a_row(operation, dtype):
    torch.manual_seed(0)
    with torch.no_grad(), BatchInvariant():
        call = operation(dtype)
        alone = torch.cat([call(torch.tensor([row])) for row in range(TOTAL)])
        changed = sum(not torch.equal(call(rows), alone[rows]) for rows in compositions(seed=1))
    assert changed == 0


@pytest.mark.parametrize("dtype", slow_but([torch.bfloat16], DTYPES), ids=["fp32", "bf16", "fp16"])
def test_prompt_step_and_training_pass_attend_alike(dtype):
    """Sequences in one call, as in training; their first tokens, as in a prompt; and single tokens with a cache."""
    torch.manual_seed(0)
    with torch.no_grad(), BatchInvariant():
        call = decode(dtype)
        torch.manual_seed(0)
        query, key, value, sequences, positions = sequences_of(dtype)
        last = torch.arange(query.size(2)).expand(3, -1)
        whole = attention(query, key, value, last, 0.3)
        trained = whole[sequences, :, positions]
        prompts = [attention(*(x[:, :, :KEY_BLOCK] for x in (query, key, value)), last[:, :KEY_BLOCK], 0.3)]
        changed = sum(not torch.equal(call(rows), trained[rows]) for rows in compositions(seed=2))
    assert changed == 0
    assert torch.equal(prompts[0], whole[:, :, :KEY_BLOCK])


def test_a_sum_that_is_split_in_large_batches_is_seen():
    """A mutation: two halves of K, as a library does where there are many rows."""
    torch.manual_seed(0)
    x, weight = torch.randn(TOTAL, 64), torch.randn(20, 64)

    def call(rows: Tensor) -> Tensor:
        if len(rows) <= 9:
            return F.linear(x[rows], weight)
        first, second = (F.linear(x[rows][:, part], weight[:, part]) for part in (slice(0, 32), slice(32, 64)))
        return first + second

    with torch.no_grad(), BatchInvariant():
        alone = torch.cat([call(torch.tensor([row])) for row in range(TOTAL)])
        changed = sum(not torch.equal(call(rows), alone[rows]) for rows in compositions(seed=1))
    assert changed > BATCHES // 2
