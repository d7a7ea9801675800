"""Dealing sequences over ranks and microbatches, and the packed layout."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.layers.context import WHOLE_ROW
from megatron_rl.learner.packing import Row, _first_dropped, build_microbatch, deal
from megatron_rl.objective.corrections import condensed, smallest_dropped
from megatron_rl.types import Batch, Rollout
from tests.support.groups import whole_sequence
from tests.support.rounding import assert_as_double


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    num_ranks=st.integers(1, 4),
    max_tokens=st.integers(10, 200),
)
def test_every_sequence_is_dealt_once_within_the_limit(lengths, num_ranks, max_tokens):
    plan = deal(lengths, num_ranks, max_tokens)
    assert len(plan) == num_ranks
    assert len({len(microbatches) for microbatches in plan}) == 1, "ranks must run the same number of microbatches"
    dealt = [i for rank in plan for microbatch in rank for i in microbatch]
    assert sorted(dealt) == list(range(len(lengths)))
    for rank in plan:
        for microbatch in rank:
            assert len(microbatch) == 1 or sum(lengths[i] for i in microbatch) <= max_tokens


def test_ranks_are_balanced_on_a_long_tail():
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(5, 1, 512).astype(int), 10, 8192).tolist()
    loads = [sum(lengths[i] for m in rank for i in m) for rank in deal(lengths, 8, 16384)]
    # No rounding: what dealing is for. In turns, without it, the largest load here is 1.37 times the mean.
    assert max(loads) / np.mean(loads) < 1.05


def test_the_rank_with_the_most_tokens_of_a_round_has_the_fewest_of_the_next():
    """Rounds of microbatches are dealt forwards and backwards in turn."""
    lengths = [8, 7, 6, 5, 4, 3, 2, 1]
    plan = deal(lengths, 2, 8)
    totals = [[sum(lengths[i] for i in microbatch) for microbatch in rank] for rank in plan]
    assert all(a >= b for a, b in zip(totals[0][::2], totals[1][::2], strict=True))
    assert all(a <= b for a, b in zip(totals[0][1::2], totals[1][1::2], strict=True))
    assert deal([4, 3, 2, 1], 2, 4) == [[[0], [3]], [[1], [2]]]


def _sequence(prompt: list[int], response: list[int], old: bool = True) -> Rollout:
    r = len(response)
    return whole_sequence(
        id="x/0",
        tokens=np.array(prompt + response),
        prompt_length=len(prompt),
        inference_logprobs=-np.arange(1, r + 1, dtype=np.float32),
        loss_mask=np.ones(r, dtype=bool),
        advantage=float(response[0]),
        reward=1.0,
        policy_versions=np.zeros(r, dtype=np.int32),
        old_logprobs=-np.arange(1, r + 1, dtype=np.float32) / 2 if old else None,
    )


def test_layout_of_a_microbatch():
    batch = Batch(0, [_sequence([10, 11], [12, 13, 14]), _sequence([20], [21]), _sequence([30, 31], [32])], [[0, 1, 2]])
    m = build_microbatch(batch, [0, 2], multiple_of=3, pad_token=0, device=torch.device("cpu"))
    assert m.tokens.tolist() == [[10, 11, 12, 13, 14, 30, 31, 32, 0]]
    assert m.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0]
    assert m.packed.lengths == (5, 3, 1), "padding is a sequence of its own"
    # the row that predicts a response token is the one before it
    assert m.tokens[0, m.positions + 1].tolist() == m.labels.tolist() == [12, 13, 14, 32]
    assert m.cu_seqlens.tolist() == [0, 3, 4]
    assert m.inference_logprobs.tolist() == [-1, -2, -3, -1]
    assert m.old_logprobs.tolist() == [-0.5, -1, -1.5, -0.5]
    assert m.advantages.tolist() == [12, 32]
    assert m.num_real_tokens == 8


def test_heads_follow_their_tokens():
    """Ids at the rows that predict the response tokens, and whether the token is one of them; kept sets are heads."""
    batch = Batch(0, [_sequence([10, 11], [12, 13]), _sequence([20], [21])], [[0, 1]])
    build = lambda: build_microbatch(batch, [0, 1], multiple_of=1, pad_token=0, device=torch.device("cpu"))  # noqa: E731
    assert build().head is None
    for s, name in zip(batch.sequences, ("head_tokens", "kept_tokens"), strict=True):
        setattr(s, name, np.array([[12, 9], [5, -1]], np.int32)[: s.length])
        s.head_logprobs = np.array([[-0.5, -1], [-0.1, -np.inf]], np.float32)[: s.length]
    m = build()
    assert m.head.tolist() == [[12, 9], [5, -1], [12, 9]]
    assert m.head_inference.tolist() == [[-0.5, -1], [np.float32(-0.1), -np.inf], [-0.5, -1]]
    assert m.head_has_sampled.tolist() == [True, False, False]
    assert m.teacher_tokens.tolist() == m.head.tolist(), "unless a teacher has sets of its own"
    assert m.teacher_set_logprobs is None
    for s in batch.sequences:
        s.teacher_tokens = np.array([[3, 4], [6, 7]], np.int32)[: s.length]
        s.teacher_set_logprobs = np.array([[-1, -2], [-3, -4]], np.float32)[: s.length]
    m = build()
    assert m.teacher_tokens.tolist() == [[3, 4], [6, 7], [3, 4]]
    assert m.teacher_set_logprobs.tolist() == [[-1, -2], [-3, -4], [-1, -2]]
    assert m.head.tolist() == [[12, 9], [5, -1], [12, 9]]
    batch.sequences[1].head_logprobs = None
    assert build().head is None


def test_a_row_knows_where_its_sequences_start():
    """Padding follows its sequence; the tail is a sequence of its own."""
    assert Row([3, 5], [1, 3], 2, WHOLE_ROW).starts == [0, 4, 12]
    assert Row([3, 5], [0, 0], 0, WHOLE_ROW).starts == [0, 3]
    assert Row([], [], 0, WHOLE_ROW).starts == []


def test_transformer_engine_is_told_where_sequences_end(monkeypatch):
    """Without offsets its attention would run across the sequences of a row, silently."""
    monkeypatch.setattr("megatron_rl.learner.packing.use_transformer_engine", lambda *_: True)
    batch = Batch(0, [_sequence([10, 11], [12, 13, 14]), _sequence([20], [21])], [[0, 1]])
    packed = build_microbatch(batch, [0, 1], multiple_of=4, pad_token=0, device=torch.device("cpu")).packed
    assert packed.qkv_format == "thd"
    assert packed.cu_seqlens_q.dtype == torch.int32
    assert packed.cu_seqlens_q.tolist() == packed.cu_seqlens_kv.tolist() == [0, 5, 7, 8]
    assert packed.max_seqlen_q == packed.max_seqlen_kv == 5


def test_empty_microbatch_still_has_tokens_to_run_the_collectives_with():
    m = build_microbatch(Batch(0, [], []), [], multiple_of=4, pad_token=0, device=torch.device("cpu"))
    assert m.tokens.shape == (1, 4)
    assert len(m.labels) == 0


def test_old_logprobs_are_all_or_none():
    batch = Batch(0, [_sequence([1], [2], old=True), _sequence([1], [2], old=False)], [[0, 1]])
    m = build_microbatch(batch, [0, 1], multiple_of=1, pad_token=0, device=torch.device("cpu"))
    assert m.old_logprobs is None


@pytest.mark.parametrize("lengths", [[4, 4, 4], [3, 5, 4], [1, 200, 2, 3, 1, 1], [7]])
def test_packed_attention_equals_one_sequence_at_a_time(lengths):
    """The three ways to attend (as they lie, padded, one by one) against plain attention per sequence, GQA 4:2."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_rl.layers.attention import PackedSequences, SDPACoreAttention

    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2)
    attention = SDPACoreAttention(config, 1, AttnMaskType.causal, "self")
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), 1, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    packed = PackedSequences.from_lengths(lengths, torch.device("cpu"))
    out = attention(q, k, v, packed_seq_params=packed)
    weight = torch.randn_like(out)

    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        pieces = []
        for qs, ks, vs in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
            qs, ks, vs = (
                x.squeeze(1).transpose(0, 1) for x in (qs, ks.repeat_interleave(2, 2), vs.repeat_interleave(2, 2))
            )
            scores = qs @ ks.transpose(1, 2) / 8**0.5
            hidden = torch.ones_like(scores).triu(1).bool()
            pieces.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ vs).transpose(0, 1).flatten(1))
        out = torch.cat(pieces)[:, None]
        return [out, *torch.autograd.grad((out * weight).sum(), (q, k, v), retain_graph=True)]

    computed = [out, *torch.autograd.grad((out * weight).sum(), (q, k, v))]
    assert_as_double(computed, reference, [q, k, v], longest_sum=max(8, *lengths))


@pytest.mark.parametrize("threshold", [0.01, 0.04, 0.3, 5.0, 1e9])
def test_the_first_square_that_is_dropped_is_found_without_sorting(threshold):
    squares = np.random.default_rng(1).normal(0, 0.7, 500).astype(np.float32) ** 2
    rows = torch.from_numpy(np.stack([squares, np.arange(500) % 3 > 0], 1)).double()
    want = smallest_dropped(rows, threshold).item()
    assert _first_dropped(rows, threshold) == _first_dropped(condensed(rows, threshold), threshold) == want
    assert _first_dropped(None, threshold) == np.inf
