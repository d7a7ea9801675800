"""The reference of a gradient's bias is a recipe, whatever the run's own objective is."""

import pytest

from megatron_rl.config.loader import load_recipe
from megatron_rl.instruments.batch.gradient_bias import reference_changes
from tests.support.tiny import REPOSITORY

CENTERED = ["objective.score_centering=true", "rollout.sampled_head=4", "objective.policy_term=reinforce"]


@pytest.mark.parametrize("of_run", [[], CENTERED, [*CENTERED, "teacher={top_k: 4, tokens: student, engine: learner}"]])
def test_the_reference_of_every_run_is_a_recipe(of_run):
    file = REPOSITORY / "recipes" / "tiny" / ("distillation.yaml" if len(of_run) == 4 else "demo.yaml")
    recipe = load_recipe(file, of_run)
    reference = load_recipe(file, [*of_run, *reference_changes(recipe)])
    assert [(item.mode, item.level) for item in reference.objective.correction] == [("is", "sequence")]
    assert not reference.objective.score_centering
