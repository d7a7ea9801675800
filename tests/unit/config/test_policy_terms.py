"""Parameters of policy terms: the bounds that a recipe may give, and what the objective knows of each term."""

import pytest
from pydantic import ValidationError

from megatron_rl.config import policy_terms
from megatron_rl.config.policy_terms import PpoClip, TermSection


@pytest.mark.parametrize("keys", [{"clip_low": 0.0}, {"clip_low": 1.0}, {"clip_high": 0.0}, {"dual_clip": 1.0}])
def test_bounds_are_not_part_of_what_is_allowed(keys):
    with pytest.raises(ValidationError):
        PpoClip(**keys)


def test_a_bound_of_a_term_may_be_absent():
    assert PpoClip().dual_clip is None
    assert PpoClip(dual_clip=1.5).dual_clip == 1.5


def terms() -> list[type[TermSection]]:
    classes = [value for value in vars(policy_terms).values() if isinstance(value, type)]
    return [value for value in classes if issubclass(value, TermSection) and "name" in value.model_fields]


def named(mark: str) -> set[str]:
    return {term.model_fields["name"].default for term in terms() if getattr(term, mark)}


def test_what_the_objective_knows_of_each_term():
    assert len({term.model_fields["name"].default for term in terms()}) == len(terms()) == 11
    assert named("has_sequence_ratio") == {"gspo", "gmpo"}
    assert named("is_anchored_on_rollout") == {"reinforce", "dppo", "drpo", "vespo"}
    assert named("carries_w") == {"minirl", "dppo", "drpo", "vespo"}
