"""Values and gradients of the learner's own layers against the plain compositions that they replace."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megatron_rl.layers import cpu_layers
from tests.support.rounding import assert_as_double

EPS = 1e-6


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape).requires_grad_()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def assert_same(ours, reference, inputs: list[torch.Tensor], longest_sum: int) -> None:
    """Both functions of ``inputs`` have the same outputs, and the same gradients of a random sum of them."""
    seeds = [torch.randn_like(out) for out in reference(*inputs)]

    def with_gradients(function, *inputs: torch.Tensor) -> list[torch.Tensor]:
        outputs = function(*inputs)
        return [*outputs, *torch.autograd.grad(outputs, inputs, [s.to(o.dtype) for s, o in zip(seeds, outputs)])]

    assert_as_double(with_gradients(ours, *inputs), partial(with_gradients, reference), inputs, longest_sum)


def test_rms_norm():
    assert_same(
        lambda x, w: (cpu_layers._RMSNorm.apply(x, w, EPS),),
        lambda x, w: (F.rms_norm(x, (16,), w, EPS),),
        [random(7, 2, 16), random(16)],
        longest_sum=16,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_that_is_centred_at_zero(dtype):
    """1 + weight is made in fp32: in 16 bits it would lose the weight's last bits."""
    config = SimpleNamespace(layernorm_zero_centered_gamma=True, sequence_parallel=False)
    norm = cpu_layers.FewPassRMSNorm(config, 16, EPS).to(dtype)
    norm.weight.data.normal_(std=1e-2)
    x = random(7, 2, 16).to(dtype)
    wanted = F.rms_norm(x.double(), (16,), None, EPS) * (1 + norm.weight.double())
    assert (norm(x).double() - wanted).abs().max() <= 1.01 * torch.finfo(dtype).eps / 2 * wanted.abs().max() + 1e-6


def test_gates_of_attention_are_put_aside_before_queries_are_turned():
    """Of a group: its queries, their gates, its key, its value."""
    groups, heads, width = 2, 3, 8
    mixed = random(5, 1, groups, 2 * heads + 2, width)
    layer = object.__new__(cpu_layers.FewPassSelfAttention)
    torch.nn.Module.__init__(layer)
    layer.linear_qkv = lambda hidden: (mixed.flatten(2), None)
    layer.num_query_groups_per_partition, layer.hidden_size_per_attention_head = groups, width
    layer.q_layernorm = layer.k_layernorm = None
    layer.config = SimpleNamespace(attention_output_gate=True, layernorm_epsilon=EPS)
    layer._cos_sin = torch.cat([torch.ones(5, 1, 1, width // 2), torch.zeros(5, 1, 1, width // 2)], dim=-1)
    query, key, value, gate = layer.get_query_key_value_tensors(mixed)
    parts = mixed.split([heads, heads, 1, 1], dim=3)
    assert all(torch.equal(x, part.flatten(2, 3)) for x, part in zip((query, key, value), (parts[0], *parts[2:])))
    out = random(5, 1, groups * heads * width)
    gated = out * torch.sigmoid(parts[1].flatten(2).view_as(out))
    assert torch.equal(layer._apply_output_gate(out, gate), gated)


def plain_rotation(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return x * angles.cos().repeat(1, 1, 1, 2) + torch.cat([-x2, x1], dim=-1) * angles.sin().repeat(1, 1, 1, 2)


@pytest.mark.parametrize("normed", [True, False], ids=["qk-norm", "no norm"])
def test_split_norm_rotate(normed: bool):
    groups, heads, width = 2, 3, 8
    angles = torch.rand(5, 1, 1, width // 2) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)

    def ours(mixed, *weights):
        return cpu_layers._SplitNormRotate.apply(mixed, *(weights or (None, None)), cos_sin, EPS)

    def reference(mixed, *weights):
        query, key, value = mixed.split([heads, 1, 1], dim=3)
        query, key, value = query.flatten(2, 3), key.squeeze(3), value.squeeze(3)
        if weights:
            query, key = (F.rms_norm(x, (width,), w, EPS) for x, w in zip((query, key), weights))
        return plain_rotation(query, angles), plain_rotation(key, angles), value

    weights = [random(width), random(width)] if normed else []
    assert_same(ours, reference, [random(5, 1, groups, heads + 2, width), *weights], 5 * groups * heads)  # rows


def test_experts_after_local_dispatch():
    """Tokens to their experts, through them, and back: the sum over each token's experts, probs included."""
    num_tokens, num_experts, top_k, hidden, width = 9, 4, 2, 6, 5
    dispatcher = cpu_layers.LocalDispatcher.__new__(cpu_layers.LocalDispatcher)
    dispatcher.config = SimpleNamespace(moe_router_topk=top_k)
    chosen = torch.stack([torch.randperm(num_experts - 1)[:top_k] for _ in range(num_tokens)])  # the last one is idle
    routing_map = torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter_(1, chosen, True)

    def ours(x, probs, *weights):
        rows, row_probs = dispatcher.dispatch_preprocess(x, routing_map, probs)
        rows, counts, row_probs = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(rows, row_probs))
        rows = cpu_layers.Experts.apply(rows, row_probs, counts.tolist(), *weights)
        rows = dispatcher.token_combine(dispatcher.combine_preprocess(rows))
        return (dispatcher.combine_postprocess(rows),)

    def reference(x, probs, *weights):
        out = 0.0
        for e, (fc1, fc2) in enumerate(zip(weights[:num_experts], weights[num_experts:])):
            gate, up = (x @ fc1.t()).chunk(2, dim=-1)
            out = out + ((F.silu(gate) * up) @ fc2.t()) * (probs * routing_map)[:, e].view(-1, 1, 1)
        return (out,)

    weights = [random(2 * width, hidden) for _ in range(num_experts)]
    weights += [random(hidden, width) for _ in range(num_experts)]
    inputs = [random(num_tokens, 1, hidden), random(num_tokens, num_experts), *weights]
    assert_same(ours, reference, inputs, longest_sum=num_tokens * top_k)


def gpt_oss_experts(rows, probs, counts, weights):
    """As transformers' model has them, expert by expert."""
    parts = zip(rows.split(counts), probs.split(counts), *(weights[i::4] for i in range(4)), strict=True)
    outputs = []
    for x, prob, fc1, bias1, fc2, bias2 in parts:
        gate, up = F.linear(x, fc1, bias1).chunk(2, dim=-1)
        gate, up = gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)
        outputs.append(F.linear((up + 1) * gate * torch.sigmoid(gate * 1.702), fc2, bias2) * prob[:, None])
    return torch.cat(outputs)


def test_experts_with_biases_and_a_clamped_gate():
    """The second of three experts is idle; some gates and ups are beyond their limits, on both sides."""
    counts, hidden, width = [4, 0, 5], 6, 5
    shapes = [(2 * width, hidden), (2 * width,), (hidden, width), (hidden,)]
    weights = [(3 * torch.randn(shape)).requires_grad_() for _ in counts for shape in shapes]
    rows, probs = random(sum(counts), hidden), torch.rand(sum(counts)).requires_grad_()
    first = torch.cat([F.linear(x, *weights[4 * e : 4 * e + 2]) for e, x in enumerate(rows.split(counts))])
    gate, up = first.chunk(2, dim=-1)
    assert all(0.05 < share.float().mean() < 0.6 for share in (gate > 7, gate < -7, up > 7, up < -7))

    def ours(rows, probs, *weights):
        by_kind = [weights[i::4] for i in (0, 2, 1, 3)]
        return (cpu_layers.Experts.apply(rows, probs, counts, *(w for kind in by_kind for w in kind)),)

    def reference(rows, probs, *weights):
        return (gpt_oss_experts(rows, probs, counts, weights),)

    assert_same(ours, reference, [rows, probs, *weights], longest_sum=sum(counts) * 2 * width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_types_of_outputs_and_gradients(dtype):
    """Those of the activations and parameters, also where the router's probabilities are float32."""
    x, weight = torch.randn(6, 1, 16, dtype=dtype).requires_grad_(), torch.ones(16, dtype=dtype).requires_grad_()
    out = cpu_layers._RMSNorm.apply(x, weight, EPS)
    assert [out.dtype, *(g.dtype for g in torch.autograd.grad(out.sum(), [x, weight]))] == [dtype] * 3
    mixed, weights = torch.randn(6, 1, 2, 4, 8, dtype=dtype).requires_grad_(), [torch.ones(8, dtype=dtype)] * 2
    qkv = cpu_layers._SplitNormRotate.apply(mixed, *weights, torch.rand(6, 1, 1, 8), EPS)
    assert [part.dtype for part in qkv] == [dtype] * 3
    assert all(part.is_contiguous() for part in qkv)
    assert torch.autograd.grad(sum(part.sum() for part in qkv), mixed)[0].dtype == dtype
    rows, probs = torch.randn(6, 4, dtype=dtype).requires_grad_(), torch.rand(6).requires_grad_()
    experts = [torch.randn(shape, dtype=dtype).requires_grad_() for shape in ((6, 4), (6, 4), (4, 3), (4, 3))]
    out = cpu_layers.Experts.apply(rows, probs, [2, 4], *experts)
    grads = torch.autograd.grad(out.sum(), [rows, *experts, probs])
    assert [out.dtype, *(g.dtype for g in grads)] == [dtype] * 6 + [torch.float32]
    experts += [torch.randn(shape, dtype=dtype).requires_grad_() for shape in ((6,), (6,), (4,), (4,))]
    out = cpu_layers.Experts.apply(rows, probs, [2, 4], *experts)
    grads = torch.autograd.grad(out.sum(), [rows, *experts, probs])
    assert [out.dtype, *(g.dtype for g in grads)] == [dtype] * 10 + [torch.float32]


def test_gated_silu_in_bf16():
    """Near float64's values, whatever is rounded where."""
    hidden, probs, grad = torch.randn(40, 16), torch.rand(40), torch.randn(40, 8)
    rounded = [x.to(torch.bfloat16) for x in (grad, hidden, probs)]

    def with_gradients(hidden: torch.Tensor, probs: torch.Tensor) -> list[torch.Tensor]:
        gate, up = hidden.chunk(2, dim=-1)
        out = F.silu(gate) * up * probs[:, None]
        return [out, out, *torch.autograd.grad(out, [hidden, probs], rounded[0].to(out.dtype))]

    computed = cpu_layers.gated_silu_backward(rounded[0].clone(), rounded[1], rounded[2].float())
    forward = cpu_layers.gated_silu(rounded[1], rounded[2].float())
    inputs = [x.requires_grad_() for x in rounded[1:]]
    assert_as_double([forward, *computed], with_gradients, inputs, longest_sum=grad.size(1))
