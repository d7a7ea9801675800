"""The section `reference`, and what it needs of the rest of a recipe."""

import pytest
from pydantic import ValidationError

from megatron_rl.config import load_recipe
from tests.support.tiny import MODEL, REPOSITORY, tiny_recipe

TRUNCATED = {"top_k": 5, "top_p": 0.9}


def test_its_folder_is_looked_up_as_the_models():
    recipe = load_recipe(REPOSITORY / "recipes/tiny/reference_kl.yaml")
    assert recipe.reference.path == recipe.model.path == MODEL
    assert load_recipe(REPOSITORY / "recipes/tiny/grpo.yaml").reference is None


@pytest.mark.parametrize("key", ["kl_loss", "kl_in_reward"])
def test_a_divergence_needs_a_reference(key):
    with pytest.raises(ValidationError, match=f"objective.{key}: set, but the section reference is null"):
        tiny_recipe(objective={key: {}})
    assert getattr(tiny_recipe(objective={key: {}}, reference={}).objective, key).coef == 0.001


def test_both_policies_are_over_the_tokens_that_were_sampled_from():
    with pytest.raises(ValidationError, match=r"reference: set with rollout\.top_p 0\.9, top_k 5"):
        tiny_recipe(reference={}, rollout=TRUNCATED)
    assert tiny_recipe(reference={}, rollout={**TRUNCATED, "kept_sets": True}).reference is not None


def test_a_divergence_in_the_reward_makes_the_pass_for_old_logprobs():
    assert tiny_recipe(reference={}, objective={"kl_in_reward": {}}).makes_old_logprobs
    assert not tiny_recipe(reference={}, objective={"kl_loss": {}}).makes_old_logprobs
