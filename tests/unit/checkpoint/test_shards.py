"""The two halves of gpt-oss's fused projection, against transformers' own layer."""

import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from megatron_rl.checkpoint.shards import half_of, interleaved
from megatron_rl.layers.cpu_layers import clamped_swiglu
from tests.support.rounding import assert_as_double

TOKENS, HIDDEN, WIDTH = 7, 6, 5


def test_the_gate_and_the_up_projection_are_those_that_transformers_takes():
    torch.manual_seed(0)
    config = GptOssConfig(hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=1)
    x, fused = torch.randn(TOKENS, HIDDEN), 4 * torch.randn(HIDDEN, 2 * WIDTH)

    def ours(x, fused):
        gate, up = (half_of(fused, half) for half in range(2))
        return [clamped_swiglu(torch.cat([x @ gate.t(), x @ up.t()], dim=-1), torch.ones(len(x), dtype=x.dtype))]

    def theirs(x, fused):
        return [GptOssExperts(config)._apply_gate(x @ fused)]

    assert_as_double(ours(x, fused), theirs, [x, fused], longest_sum=HIDDEN)


def test_interleaving_undoes_the_cut():
    for fused in (torch.randn(HIDDEN, 2 * WIDTH), torch.randn(2 * WIDTH)):
        gate, up = (half_of(fused, half) for half in range(2))
        assert gate.shape == up.shape == (WIDTH, *fused.shape[:-1])
        assert torch.equal(interleaved(gate, up), fused)
