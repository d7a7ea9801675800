"""The list of a model's tensors has what is no parameter, whatever it is called."""

import torch

from megatron_rl.checkpoint.state import model_tensors


def test_parameters_and_buffers_also_those_that_no_checkpoint_has():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[0].register_buffer("count", torch.zeros(3), persistent=False)
    found = model_tensors(model)
    assert {*found} == {*model.state_dict(), "0.count"}
    assert found["0.weight"] is model[0].weight
    assert found["1.running_mean"] is model[1].running_mean
