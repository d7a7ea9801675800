"""Gated delta nets over packed rows: against the recurrence written out, and against each sequence alone."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_chunk_gated_delta_rule

from megatron_rl.errors import InputError
from megatron_rl.layers import delta_net
from megatron_rl.layers.delta_net import CHUNK, causal_conv, chunk_places, chunked_delta_rule, fields_with_delta_nets
from megatron_rl.model.architecture import KNOWN_MODELS, architecture_from
from tests.support.in_double import Widened
from tests.support.rounding import bound_from_double

LENGTHS = (1, CHUNK + 1, 3, 2 * CHUNK, 7, 2 * CHUNK + 9)
HEADS, EACH, KEY, VALUE = 2, 3, 8, 5


def offsets(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def drawn(tokens: int, seed: int = 0) -> list[torch.Tensor]:
    """Queries, keys, values, decays and strengths of a row."""
    random = torch.Generator().manual_seed(seed)
    shapes = ((HEADS, KEY), (HEADS, KEY), (HEADS * EACH, VALUE), (HEADS * EACH,), (HEADS * EACH,))
    query, key, value, decay, strength = (torch.randn(1, tokens, *shape, generator=random) for shape in shapes)
    return [query, key, value, -F.softplus(decay), strength.sigmoid()]


def written_out(query, key, value, decay, strength) -> np.ndarray:
    """S ← exp(g)·S; S ← S + k ⊗ β·(v − Sᵀk); o = Sᵀq / √K, token after token, in float64."""
    out = np.zeros(value.shape)
    for head in range(value.shape[1]):
        state = np.zeros((KEY, VALUE))
        for t in range(len(value)):
            q, k = (x[t, head // EACH] / np.sqrt((x[t, head // EACH] ** 2).sum() + 1e-6) for x in (query, key))
            state = np.exp(decay[t, head]) * state
            state = state + np.outer(k, strength[t, head] * (value[t, head] - state.T @ k))
            out[t, head] = state.T @ q / np.sqrt(KEY)
    return out


def test_chunks_are_the_recurrence():
    arguments = drawn(sum(LENGTHS))
    out, _ = chunked_delta_rule(*arguments, cu_seqlens=offsets(LENGTHS))
    row = [x[0].double().numpy() for x in arguments]
    at = 0
    for length in LENGTHS:
        wanted = written_out(*(x[at : at + length] for x in row))
        assert np.abs(out[0, at : at + length].numpy() - wanted).max() <= 64 * 2**-24
        at += length


def gradients(arguments, lengths, weights) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in arguments]
    out, _ = chunked_delta_rule(*leaves, cu_seqlens=offsets(lengths))
    (out * weights).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def test_a_row_is_its_sequences_alone(monkeypatch):
    arguments = drawn(sum(LENGTHS))
    weights = torch.randn(1, sum(LENGTHS), HEADS * EACH, VALUE)
    together = gradients(arguments, LENGTHS, weights)
    alone = [
        gradients([x[:, a:b] for x in arguments], [b - a], weights[:, a:b])
        for a, b in zip(offsets(LENGTHS), offsets(LENGTHS)[1:])
    ]
    # What a backward pass computes again is outside of `Widened`.
    monkeypatch.setattr(delta_net, "checkpoint", lambda function, *arguments, **_: function(*arguments))
    with Widened():
        in_double = gradients([x.double() for x in arguments], LENGTHS, weights.double())
    for row, exact, parts in zip(together, in_double, zip(*alone, strict=True), strict=True):
        assert exact.dtype == torch.float64
        assert (row - torch.cat(parts, dim=1)).abs().max() <= 2 * bound_from_double(row, exact, max(LENGTHS))


def test_gradients_are_those_of_transformers():
    lengths = (CHUNK + 5, 2)
    arguments, weights = drawn(sum(lengths)), torch.randn(1, sum(lengths), HEADS * EACH, VALUE)
    ours = gradients(arguments, lengths, weights)
    leaves = [x.clone().requires_grad_() for x in arguments]
    query, key = (x.repeat_interleave(EACH, dim=2) for x in leaves[:2])
    parts = zip(*(x.split(lengths, dim=1) for x in (query, key, *leaves[2:])), strict=True)
    outputs = [
        torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]
        for q, k, v, g, beta in parts
    ]
    theirs = torch.cat(outputs, dim=1)
    (theirs * weights).sum().backward()
    for mine, other in zip(ours, [theirs.detach(), *(leaf.grad for leaf in leaves)], strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=2e-6 * float(other.abs().max()))


class Written(TorchDispatchMode):
    """Counts the numbers that operations give."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        self.numbers += sum(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))
        return out


def test_the_work_of_a_sequence_grows_with_its_length():
    def work(chunks: int) -> int:
        length = chunks * CHUNK
        with Written() as written:
            gradients(drawn(length), [length], 1.0)
        return written.numbers

    assert work(32) <= 4.1 * work(8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_convolution_sees_no_other_sequence(dtype):
    tokens, channels = sum(LENGTHS), 6
    x, weight = torch.randn(1, tokens, channels).to(dtype), torch.randn(channels, 4).to(dtype)
    out, _ = causal_conv(x, weight, cu_seqlens=offsets(LENGTHS), activation="silu")
    parts = [
        causal_conv1d_fn(part.transpose(1, 2).double(), weight.double(), activation="silu").transpose(1, 2)
        for part in x.split(LENGTHS, dim=1)
    ]
    assert out.dtype == dtype
    assert torch.allclose(out.double(), torch.cat(parts, dim=1), rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_chunks_of_one_number_lie_from_the_longest_sequence_to_the_shortest():
    places = chunk_places(LENGTHS, torch.device("cpu"))
    assert places.counts == [6, 3, 1]
    assert places.valid.sum() == sum(LENGTHS)
    assert torch.equal(places.pad.flatten()[places.unpad], torch.arange(sum(LENGTHS)))
    assert torch.equal(places.position, torch.cat([torch.arange(n) for n in LENGTHS]))


def test_transformer_engines_layers_need_the_kernels_of_fla(monkeypatch):
    monkeypatch.setattr(delta_net.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install flash-linear-attention"):
        delta_net.use_delta_nets(None, None, te=True)


def test_megatrons_fields_say_widths_layers_gates_and_norms():
    fields = fields_with_delta_nets(architecture_from(KNOWN_MODELS["Qwen3.5-35B-A3B"]))
    assert fields == {
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
        "linear_attention_freq": [1, 1, 1, 0] * 10,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    assert fields_with_delta_nets(architecture_from(KNOWN_MODELS["Qwen3-30B-A3B"])) == {}
