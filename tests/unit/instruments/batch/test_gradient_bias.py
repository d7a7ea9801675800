"""The reference of a gradient's bias is a recipe, whatever the run's own objective is."""

import pytest

from megatron_rl.config.loader import load_recipe
from megatron_rl.instruments.batch.gradient_bias import reference_changes
from tests.support.tiny import REPOSITORY

STUDENT = ["teacher={top_k: 4, tokens: student, engine: learner}", "rollout.sampled_head=4"]
CENTERED = [*STUDENT, "objective.score_centering=true", "objective.policy_term=reinforce"]


@pytest.mark.parametrize(("name", "changes"), [("demo", []), ("centered", []), ("distillation", CENTERED)])
def test_it_keeps_what_others_read(name, changes):
    file = REPOSITORY / "recipes" / "tiny" / f"{name}.yaml"
    reference = load_recipe(file, [*changes, *reference_changes(load_recipe(file, changes))])
    assert [(item.mode, item.level) for item in reference.objective.correction] == [("is", "sequence")]
    assert not reference.objective.score_centering
