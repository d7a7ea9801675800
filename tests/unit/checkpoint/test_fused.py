"""Tensors that one side keeps as one and the other as several, against transformers' own layers."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from megatron_rl.checkpoint.fused import join_qkv, put_together, split_qkv, take_apart
from megatron_rl.layers.cpu_layers import clamped_swiglu
from megatron_rl.model.architecture import KNOWN_MODELS, architecture_from
from megatron_rl.model.decoder import LinearAttention
from tests.support.rounding import assert_as_double

TOKENS, HIDDEN, WIDTH = 7, 6, 5
NEXT = replace(
    architecture_from(KNOWN_MODELS["Qwen3-Next-80B-A3B-Instruct"]),
    linear=LinearAttention(key_heads=2, value_heads=6, key_width=4, value_width=5, kernel=4),
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
)


def test_the_gate_and_the_up_projection_are_those_that_transformers_takes():
    torch.manual_seed(0)
    config = GptOssConfig(hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=1)
    x, fused = torch.randn(TOKENS, HIDDEN), 4 * torch.randn(HIDDEN, 2 * WIDTH)

    def ours(x, fused):
        gate, up = take_apart("interleaved", [fused], NEXT)
        return [clamped_swiglu(torch.cat([x @ gate.t(), x @ up.t()], dim=-1), torch.ones(len(x), dtype=x.dtype))]

    def theirs(x, fused):
        return [GptOssExperts(config)._apply_gate(x @ fused)]

    assert_as_double(ours(x, fused), theirs, [x, fused], longest_sum=HIDDEN)


def test_the_sections_of_a_delta_net_are_those_that_transformers_takes():
    m = NEXT.linear
    sizes = {"num_k_heads": m.key_heads, "num_v_heads": m.value_heads}
    layer = SimpleNamespace(**sizes, head_k_dim=m.key_width, head_v_dim=m.value_width)
    qkvz, ba = (torch.arange(float(sum(rows))) for rows in (m.sections[:4], m.sections[4:]))
    theirs = Qwen3NextGatedDeltaNet.fix_query_key_value_ordering(layer, qkvz[None, None], ba[None, None])
    ours = take_apart("delta_by_head", [qkvz, ba], NEXT)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other.flatten())


@pytest.mark.parametrize(
    ("sharding", "shapes", "parts"),
    [
        ("interleaved", [(HIDDEN, 2 * WIDTH)], [(WIDTH, HIDDEN)] * 2),
        ("interleaved", [(2 * WIDTH,)], [(WIDTH,)] * 2),
        ("gated", [(WIDTH, HIDDEN)] * 2, [(WIDTH, HIDDEN)] * 2),
        ("delta", [(46, 3), (30, 3), (6, 3), (6, 3)], [(8, 3), (8, 3), (30, 3), (30, 3), (6, 3), (6, 3)]),
        ("delta", [(46, 1, 4)], [(8, 1, 4), (8, 1, 4), (30, 1, 4)]),
        ("delta_by_head", [(76, 3), (12, 3)], [(8, 3), (8, 3), (30, 3), (30, 3), (6, 3), (6, 3)]),
    ],
)
def test_putting_together_undoes_the_cut(sharding, shapes, parts):
    tensors = [torch.randn(shape) for shape in shapes]
    cut = take_apart(sharding, tensors, NEXT)
    assert [tuple(part.shape) for part in cut] == parts
    for again, tensor in zip(put_together(sharding, cut, NEXT), tensors, strict=True):
        assert torch.equal(again, tensor)


def test_gates_of_attention_stand_behind_the_queries_of_their_group():
    """Hugging Face: each head's query and gate. Megatron: a group's queries, its gates, its key, its value."""
    heads, groups, width = NEXT.num_heads, NEXT.num_kv_heads, NEXT.head_dim
    q, k, v = torch.randn(2 * heads * width, 3), torch.randn(groups * width, 3), torch.randn(groups * width, 3)
    fused = join_qkv([q, k, v], NEXT)
    by_head = q.view(heads, 2, width, 3)
    each = heads // groups
    for group, rows in enumerate(fused.view(groups, 2 * each + 2, width, 3)):
        own = by_head[group * each : (group + 1) * each]
        key, value = (x.view(groups, 1, width, 3)[group] for x in (k, v))
        assert torch.equal(rows, torch.cat([own[:, 0], own[:, 1], key, value]))
    for again, tensor in zip(split_qkv(fused, NEXT), (q, k, v), strict=True):
        assert torch.equal(again, tensor)
