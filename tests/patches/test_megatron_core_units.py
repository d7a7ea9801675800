"""Patched functions of megatron.core that need neither ranks nor a model."""

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.moe_utils import router_gating_linear

from tests.support.rounding import assert_as_double


def test_router_runs_without_transformer_engine():
    hidden = torch.randn(3, 2, 8, requires_grad=True)
    weight = torch.randn(4, 8, requires_grad=True)
    logits = router_gating_linear(hidden, weight, None, torch.float32)

    def plain(hidden: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        logits = hidden @ weight.t()
        return [logits, *torch.autograd.grad(logits.sin().sum(), weight)]

    computed = [logits, *torch.autograd.grad(logits.sin().sum(), weight)]
    assert_as_double(computed, plain, [hidden, weight], longest_sum=8)


def test_norm_of_moe_layers_keeps_its_name_in_checkpoints():
    moe = get_gpt_layer_local_spec(num_experts=2, moe_grouped_gemm=False).submodules.sharded_state_dict_keys_map
    dense = get_gpt_layer_local_spec(num_experts=None).submodules.sharded_state_dict_keys_map
    assert "pre_mlp_layernorm." not in moe
    assert dense["pre_mlp_layernorm."] == "mlp.linear_fc1.layer_norm_"
    assert moe["input_layernorm."] == dense["input_layernorm."]
