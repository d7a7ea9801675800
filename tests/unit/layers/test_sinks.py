"""Attention with sinks, over windows, and over packed rows: values and gradients of the plain formula."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType

from megatron_rl.layers import sinks
from megatron_rl.layers.attention import PackedSequences
from megatron_rl.layers.sinks import SinkAttention, attend_with_sinks
from tests.support.rounding import CLOSED_FORM, assert_as_double, assert_rounded

HEADS, GROUPS, WIDTH, WINDOW = 4, 2, 16, 5


def plain(query, key, value, sink, scale, window):
    """[S, H, M, D], and the probabilities: all scores, a mask, and the sink as one more column of the softmax."""
    key, value = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (key, value))
    place = torch.arange(query.size(2))
    back = place[:, None] - place
    hidden = (back < 0) | (back >= (window or len(place)))
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(hidden, -torch.inf)
    column = (sink / scale * scale).view(1, -1, 1, 1).expand(len(query), -1, len(place), 1)
    probs = torch.cat([scores, column], dim=-1).softmax(-1)
    return probs[..., :-1] @ value, probs


def steps(query, key, value, sink, seed, scale, window):
    """`plain` and its gradients by the steps of PyTorch's attention, whose rounding is not that of autograd's.

    Σ p · dp over the keys is taken from the output, as seed · out. Its error is therefore not that of each dp, and
    stays where only one key is seen, whose p and dp autograd subtracts from each other.
    """
    out, probs = plain(query, key, value, sink, scale, window)
    key, value = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (key, value))
    of_probs = F.pad(seed @ value.transpose(2, 3), (0, 1))
    of_scores = probs * (of_probs - (seed * out).sum(-1, keepdim=True))
    of_keys = of_scores[..., :-1].transpose(2, 3) @ query * scale
    of_values = probs[..., :-1].transpose(2, 3) @ seed
    of_groups = [x.unflatten(1, (GROUPS, -1)).sum(2) for x in (of_keys, of_values)]
    return [out, of_scores[..., :-1] @ key * scale, *of_groups, of_scores[..., -1].sum((0, 2))]


def assert_steps_are_derivatives(query, key, value, sink, seed, scale, window):
    """In float64, where rounding is far below what any mistake gives."""
    tensors = [x.detach().double().requires_grad_() for x in (query, key, value, sink)]
    out, _ = plain(*tensors, scale, window)
    derived = [out, *torch.autograd.grad(out, tensors, seed.double())]
    roundings = query.size(2) * WIDTH * len(query) * CLOSED_FORM
    for computed, expected in zip(steps(*tensors, seed.double(), scale, window), derived, strict=True):
        assert_rounded(computed, expected, roundings, scale=1 + expected.detach().abs().max().item())


def inputs(length: int, sequences: int = 2) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(length)
    tensors = [torch.randn(sequences, heads, length, WIDTH, generator=random) for heads in (HEADS, GROUPS, GROUPS)]
    return [x.requires_grad_() for x in (*tensors, 2 * torch.randn(HEADS, generator=random))]


# Shorter than the window, as long, one longer, whole pieces, a piece that is not full.
@pytest.mark.parametrize("length", [1, 4, WINDOW, WINDOW + 1, 3 * WINDOW, 3 * WINDOW + 2])
@pytest.mark.parametrize("window", [None, WINDOW, 1])
def test_values_and_gradients_are_those_of_the_plain_formula(length, window):
    seed = torch.randn(2, HEADS, length, WIDTH, generator=torch.Generator().manual_seed(0))

    tensors = inputs(length)
    out = attend_with_sinks(*tensors, scale=0.3, window=window)
    computed = [out, *torch.autograd.grad(out, tensors, seed)]
    assert_steps_are_derivatives(*tensors, seed, 0.3, window)
    reference = lambda *x: steps(*x, seed.to(x[0].dtype), 0.3, window)  # noqa: E731
    assert_as_double(computed, reference, tensors, longest_sum=length * WIDTH)


LENGTHS = {
    "one": [13],
    "equal": [7, 7, 7],
    "padded": [9, 13, 11, 6],
    "one by one": [2, 40, 1, 3, 2, 5],  # padding to the longest would be most of the work
}


@pytest.mark.parametrize("layer", [1, 2], ids=["window", "all"])
@pytest.mark.parametrize("case", LENGTHS)
def test_each_packed_sequence_is_attended_to_by_itself(case, layer, monkeypatch):
    monkeypatch.setattr(sinks, "set_tensor_model_parallel_attributes", lambda *arguments: None)
    config = SimpleNamespace(
        window_size=(WINDOW - 1, 0),
        window_attn_skip_freq=[1, 0],
        num_attention_heads=HEADS,
        tensor_model_parallel_size=1,
        params_dtype=torch.float32,
    )
    attention = SinkAttention(config, layer, AttnMaskType.causal, "self")
    lengths = LENGTHS[case]
    query, key, value, sink = inputs(sum(lengths), 1)
    attention.softmax_offset.data.copy_(sink.detach())
    row = [x.permute(2, 0, 1, 3) for x in (query, key, value)]  # [N, 1, H, D]
    packed = PackedSequences.from_lengths(lengths, torch.device("cpu"))
    computed = attention(*row, packed_seq_params=packed)
    seed = torch.randn(computed.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(computed, [query, key, value, attention.softmax_offset], seed)

    def reference(*tensors):
        *qkv, sink = tensors
        of_heads = seed.to(sink.dtype).unflatten(2, (HEADS, WIDTH)).permute(1, 2, 0, 3)
        parts = zip(*(x.split(lengths, dim=2) for x in (*qkv, of_heads)), strict=True)
        window = WINDOW if layer == 1 else None
        results = [steps(*part[:3], sink, part[3], WIDTH**-0.5, window) for part in parts]
        *tokens, of_sinks = zip(*results, strict=True)
        out, *of_qkv = (torch.cat(x, dim=2) for x in tokens)
        return [out.permute(2, 0, 1, 3).flatten(2), *of_qkv, sum(of_sinks)]

    assert_as_double([computed, *grads], reference, [query, key, value, sink], longest_sum=max(lengths) * WIDTH)


def test_the_pieces_of_a_window_grow_with_the_length_and_not_with_its_square(monkeypatch):
    sizes = []
    attend = sinks.attend
    monkeypatch.setattr(sinks, "attend", lambda *x, **options: sizes.append(x[4].numel()) or attend(*x, **options))
    for length in (4 * WINDOW, 8 * WINDOW):
        attend_with_sinks(*inputs(length), window=WINDOW)
    assert sizes[1] == 2 * sizes[0]
