"""The sections `reference` and `scoring`, and what they need of the rest of a recipe."""

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


def test_scoring_says_what_differs_from_the_learners_precision():
    recipe = tiny_recipe(precision={"fp32_head": True}, scoring="bf16")
    assert (recipe.scoring.dtype, recipe.scoring.every) == ("bf16", 1)
    assert recipe.scoring.of(recipe.precision) == recipe.precision
    recipe = tiny_recipe(precision={"fp32_head": True}, scoring={"fp32_head": False, "fp32_router": True})
    of_scoring = recipe.scoring.of(recipe.precision)
    assert (recipe.scoring.dtype, of_scoring.fp32_head, of_scoring.fp32_router) == ("fp32", False, True)
    assert tiny_recipe().scoring is None


@pytest.mark.parametrize(("term", "goes"), [("ppo_clip", True), ("reinforce", False)])
def test_scoring_compares_equal_weights(term, goes):
    """Of several updates, where there is a pass for log po."""
    sections = {"scoring": "bf16", "objective": {"policy_term": term}}
    assert tiny_recipe(**sections).scoring is not None
    if goes:
        assert tiny_recipe(**sections, batch={"minibatches": 2}).makes_old_logprobs
    else:
        with pytest.raises(
            ValidationError, match=r"scoring: set with batch\.minibatches 2 and an objective that makes"
        ):
            tiny_recipe(**sections, batch={"minibatches": 2})


@pytest.mark.parametrize(
    ("learner", "scoring", "own"),
    [
        ("bf16", None, set()),
        ("bf16", "fp16", set()),
        ("bf16", "fp32", {"fp32"}),
        ("bf16", {"dtype": "bf16", "fp32_head": True}, {"fp32"}),
        ("bf16", "tf32", {"tf32"}),
    ],
)
def test_products_of_scoring_are_the_learners(learner, scoring, own):
    sections = {"runtime": {"device": "cuda"}, "learner": {"dtype": learner}, "scoring": scoring}
    recipe = tiny_recipe(**sections, rollout={"dtype": "bf16"})
    assert recipe.fp32_products == (own, set())
    if own:
        with pytest.raises(ValidationError, match=r"scoring\.dtype: .*one process multiplies all fp32 matrices alike"):
            tiny_recipe(**sections, rollout={"dtype": "fp32" if own == {"tf32"} else "tf32"})
