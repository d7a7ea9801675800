"""The recipe's way to Megatron's TransformerConfig: the dispatcher of tokens, and fields that have no key."""

import pytest
import torch
from pydantic import ValidationError

from megatron_rl.config.learner import LearnerConfig, PrecisionConfig
from megatron_rl.errors import InputError
from megatron_rl.learner.model import transformer_config
from megatron_rl.model.architecture import read_architecture
from tests.support.tiny import MODEL, tiny_recipe


def config(**learner):
    section = LearnerConfig.model_validate(learner)
    return transformer_config(read_architecture(MODEL), section, torch.device("cpu"), PrecisionConfig())


def test_a_field_without_a_key_reaches_megatron():
    assert config().moe_router_topk_scaling_factor is None
    assert config(megatron={"moe_router_topk_scaling_factor": 2.0}).moe_router_topk_scaling_factor == 2.0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"moe_router_top_k": 2}, "no such field; did you mean moe_router_topk"),
        ({"num_layers": 3}, r"learner.megatron.num_layers: found 3; the model, the layout or another key"),
        ({"recompute_granularity": "half"}, "Megatron refuses the model's configuration"),
    ],
)
def test_other_fields_are_refused(fields, said):
    with pytest.raises(InputError, match=said):
        config(megatron=fields)


def test_the_dispatcher_is_the_recipes(monkeypatch):
    assert config().moe_token_dispatcher_type == "alltoall"
    assert config(token_dispatcher="allgather").moe_token_dispatcher_type == "allgather"
    with pytest.raises(InputError, match="flex needs DeepEP, and deep_ep is not installed"):
        config(token_dispatcher="flex", parallel={"expert": 2})


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"token_dispatcher": "allgather", "parallel": {"pipeline": 2}}, "allgather with learner.parallel.pipeline 2"),
        ({"token_dispatcher": "allgather", "parallel": {"expert": 2}}, "expert_tensor = 2: .* tensor · context = 1"),
        ({"token_dispatcher": "flex"}, "no token leaves its rank"),
    ],
)
def test_layouts_that_a_dispatcher_cannot_serve_are_refused(sections, said):
    with pytest.raises(ValidationError, match=said):
        tiny_recipe(learner=sections)


@pytest.mark.parametrize(
    "learner", [{"megatron": {"moe_router_topk_scaling_factor": 2.0}}, {"token_dispatcher": "allgather"}]
)
def test_the_exact_engine_refuses_both(learner):
    (key,) = learner
    with pytest.raises(ValidationError, match=f"learner.{key}: .* with rollout.engine exact"):
        tiny_recipe(learner=learner, rollout={"engine": "exact"})
