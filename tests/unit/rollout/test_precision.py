"""Routers in fp32 inside vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.models.bailing_moe import BailingMoE

from megatron_rl.rollout import precision


@pytest.mark.parametrize("gives_a_pair", [False, True])  # as vLLM's linear layers do; from 0.31 on Ling's gate is one
def test_logits_of_lings_router_stay_in_fp32(gives_a_pair):
    """vLLM's own pass rounds them to the type of the hidden states."""
    linear, seen = torch.nn.Linear(8, 4, bias=False), []
    gate = linear
    if gives_a_pair:
        gate = object.__new__(GateLinear)
        torch.nn.Module.__init__(gate)
        gate.forward = lambda x: (linear(x.float()), None)
    block = SimpleNamespace(gate=gate, experts=lambda **given: seen.append(given) or given["hidden_states"])
    hidden = torch.randn(3, 8).bfloat16()
    assert BailingMoE.forward is precision.ling_experts
    assert BailingMoE.forward(block, hidden) is hidden
    assert torch.equal(seen[0]["router_logits"], linear(hidden.float()))
    assert seen[0]["router_logits"].dtype is torch.float32
