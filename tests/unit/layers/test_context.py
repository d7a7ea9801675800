"""What each context-parallel rank has of a packed row, and attention of its chunks, in one process."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.errors import InputError
from megatron_rl.layers import attention
from megatron_rl.layers.attention import ContextKeys, refuse_unfused_attention
from megatron_rl.layers.context import ContextShare, cut_ranges
from megatron_rl.learner.packing import build_microbatch
from megatron_rl.types import Batch
from tests.support.groups import whole_sequence
from tests.support.rounding import assert_as_double

CPU = torch.device("cpu")


def batch_of(lengths: list[int]) -> Batch:
    """Every token is another number."""
    starts, sequences = np.cumsum([1, *lengths]), []
    for i, (start, length) in enumerate(zip(starts, lengths)):
        response = np.arange(length - 1, dtype=np.float32)
        sequences.append(
            whole_sequence(
                id=f"{i}/0",
                tokens=np.arange(start, start + length),
                prompt_length=1,
                inference_logprobs=-response,
                loss_mask=response >= 0,
                advantage=1.0,
                reward=1.0,
                policy_versions=np.zeros(length - 1, np.int32),
                kept_tokens=np.arange(start + 1, start + length, dtype=np.int32)[:, None] * [1, -1],
            )
        )
    return Batch(0, sequences, [list(range(len(lengths)))])


@settings(max_examples=100)
@given(
    lengths=st.lists(st.integers(2, 40), max_size=6), size=st.sampled_from([2, 3, 4]), tensor=st.sampled_from([1, 2, 3])
)
def test_ranks_have_the_row_between_them(lengths, size, tensor):
    batch, everything = batch_of(lengths), list(range(len(lengths)))
    shares = [
        build_microbatch(batch, everything, multiple_of=tensor, pad_token=0, device=CPU, share=ContextShare(size, rank))
        for rank in range(size)
    ]
    assert len({m.tokens.numel() for m in shares}) == 1
    assert shares[0].tokens.numel() % tensor == 0
    tokens = torch.cat([m.tokens[0] for m in shares])
    assert sorted(tokens[tokens > 0].tolist()) == list(range(1, sum(lengths) + 1))
    assert sum(m.num_real_tokens for m in shares) == sum(lengths)
    places = torch.cat([m.places for m in shares])
    assert sorted(places.tolist()) == list(range(sum(lengths) - len(lengths)))
    for m in shares:
        assert [int(a) for start, stop in m.row.ranges for a in range(start, stop)] == sorted(
            {int(a) for start, stop in m.row.ranges for a in range(start, stop)}
        )
        # A response token is one more than the token that predicts it, whichever rank has the token itself.
        assert (m.tokens[0, m.positions] + 1 == m.labels).all()
        assert (torch.stack([m.labels, -m.labels], dim=1) == m.kept).all() if lengths else m.kept is None
        starts = np.cumsum([1, *lengths])
        for token, position in zip(m.tokens[0].tolist(), m.position_ids.tolist()):
            assert token == 0 or position == token - starts[np.searchsorted(starts, token, "right") - 1]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_see_as_many_keys(size):
    length = 16 * size
    seen = [sum(p + 1 for p in ContextShare(size, rank).positions(length)) for rank in range(size)]
    assert sum(seen) == length * (length + 1) // 2
    assert len(set(seen)) == 1


def test_one_rank_has_the_row_as_it_lies():
    assert ContextShare().ranges([5, 3]) == [(0, 5), (5, 8)]
    assert (ContextShare().padded(7), ContextShare().row_multiple(4)) == (7, 4)


def test_transformer_engine_has_no_attention_over_parts_in_fp32():
    config = SimpleNamespace(params_dtype=torch.float32, context_parallel_size=2)
    with pytest.raises(InputError, match=r"parallel\.context: 2 with learner\.dtype or scoring\.dtype fp32.* use bf16"):
        refuse_unfused_attention(config)
    refuse_unfused_attention(SimpleNamespace(params_dtype=torch.float32, context_parallel_size=1))


def test_cut_takes_rows_across_ranges():
    ranges = [(0, 3), (10, 12), (20, 26)]
    rows = [row for a, b in ranges for row in range(a, b)]
    for start in range(len(rows) + 1):
        for stop in range(start, len(rows) + 1):
            assert [row for a, b in cut_ranges(ranges, start, stop) for row in range(a, b)] == rows[start:stop]


@pytest.mark.parametrize("entries", [2**24, 50], ids=["one call", "blocks"])
@pytest.mark.parametrize("rank", [0, 1])
def test_chunks_attend_as_in_the_whole_sequence(monkeypatch, entries, rank):
    """Values and gradients of this rank's queries, for both ways in which queries go, with grouped heads."""
    monkeypatch.setattr(attention, "MASK_ENTRIES", entries)
    length, share = 24, ContextShare(2, rank)
    keys, own = ContextKeys([length], share, CPU), torch.from_numpy(share.positions(length))
    random = torch.Generator().manual_seed(rank)
    query, key, value = (torch.randn(1, heads, length, 8, generator=random).requires_grad_() for heads in (4, 2, 2))
    weights = torch.randn(1, 4, length // 2, 8, generator=random)

    def through(attend, *inputs):
        out = attend(*inputs)
        return [out, *torch.autograd.grad((out * weights.to(out.dtype)).sum(), inputs)]

    def whole(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[:, :, own]

    computed = through(lambda q, k, v: keys.attend(q[:, :, own], k, v, None, 0), query, key, value)
    assert_as_double(computed, lambda *x: through(whole, *x), (query, key, value), longest_sum=4 * length * 8)
