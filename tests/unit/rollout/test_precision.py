"""Routers in fp32 inside vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from vllm.model_executor.models.bailing_moe import BailingMoE

from megatron_rl.rollout import precision


def test_logits_of_lings_router_stay_in_fp32():
    """vLLM's own pass rounds them to the type of the hidden states."""
    gate = torch.nn.Linear(8, 4, bias=False)
    seen = []
    block = SimpleNamespace(gate=gate, experts=lambda **given: seen.append(given) or given["hidden_states"])
    hidden = torch.randn(3, 8).bfloat16()
    assert BailingMoE.forward is precision.ling_experts
    assert BailingMoE.forward(block, hidden) is hidden
    assert torch.equal(seen[0]["router_logits"], gate(hidden.float()))
    assert seen[0]["router_logits"].dtype is torch.float32
