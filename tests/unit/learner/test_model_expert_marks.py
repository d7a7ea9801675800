"""Every expert weight counts in the gradient norm of every rank that holds it."""

import pytest
import torch
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

from megatron_rl.learner.model import mark_expert_parameters, mark_whole_parameters


class SecondRank:
    """A tensor-parallel group as its second rank sees it, where copies do not count."""

    def rank(self) -> int:
        return 1


class GroupedWeights(torch.nn.Module):
    """One discrete weight per expert, unmarked, as TransformerEngine's GroupedLinear has them."""

    def __init__(self, num_experts: int):
        super().__init__()
        for expert in range(num_experts):
            self.register_parameter(f"weight{expert}", torch.nn.Parameter(torch.zeros(2, 2)))


def layer(**experts: torch.nn.Module) -> torch.nn.Module:
    mlp = torch.nn.Module()
    mlp.experts = torch.nn.ModuleDict(experts)
    mlp.router = torch.nn.Linear(2, 2, bias=False)
    model = torch.nn.Module()
    model.mlp = mlp
    return model


@pytest.mark.parametrize("megatrons", [None, False, True])
def test_expert_weights_are_no_copies_whatever_their_layers_mark(megatrons):
    model = layer(linear_fc1=GroupedWeights(2), linear_fc2=GroupedWeights(2))
    for parameter in model.mlp.experts.parameters() if megatrons is not None else ():
        set_tensor_model_parallel_attributes(parameter, megatrons, 1, 2)
    mark_expert_parameters(model)
    for name, parameter in model.named_parameters():
        is_expert = "experts" in name
        assert param_is_not_tensor_parallel_duplicate(parameter, SecondRank()) == is_expert, name
        assert getattr(parameter, "allreduce", True) != is_expert, name
        assert not is_expert or not parameter.sequence_parallel


def test_projections_to_latent_vectors_count_once_whatever_their_layers_mark():
    model = torch.nn.ModuleDict(
        {n: torch.nn.Linear(2, 2, bias=False) for n in ("linear_kv_down_proj", "linear_q_proj")}
    )
    for parameter in model.parameters():
        set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    mark_whole_parameters(model)
    counts = {n: param_is_not_tensor_parallel_duplicate(p, SecondRank()) for n, p in model.named_parameters()}
    assert counts == {"linear_kv_down_proj.weight": False, "linear_q_proj.weight": True}
