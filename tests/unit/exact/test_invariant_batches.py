"""Batch-invariant computation on a CPU: 1,000 random batches of 1 to 64 rows an operation and type, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from megatron_rl.exact.invariant import KEY_BLOCK, BatchInvariant, add_rows, attention
from megatron_rl.learner.logprobs import token_logprobs
from tests.support.slow import slow_but

BATCHES = 1000
MOST = 64
TOTAL = 150
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
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
