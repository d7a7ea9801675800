"""What a recipe may not ask of the model that it names."""

from __future__ import annotations

import pytest

from megatron_rl.config.model_rules import model_problems
from megatron_rl.model.architecture import architecture_from
from megatron_rl.model.known_models import KNOWN_MODELS
from tests.support.tiny import tiny_recipe

SHARED = architecture_from(KNOWN_MODELS["Qwen1.5-MoE-A2.7B"])


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"rollout": {"engine": "exact"}}, "rollout.engine: exact, but the model (qwen2_moe) has a shared expert"),
        ({"learner": {"lora": {"rank": 4}}}, "learner.lora: the model (qwen2_moe) has a shared expert"),
        ({"rollout": {"quantization": {"weights": "int4"}}}, "rollout.quantization.weights: int4, but the model"),
    ],
)
def test_what_no_shared_expert_has_is_refused(sections, said):
    problems = model_problems(tiny_recipe(**sections), SHARED, 1)
    assert any(problem.startswith(said) for problem in problems), problems
    assert not any("shared expert" in problem for problem in model_problems(tiny_recipe(), SHARED, 1))
