"""Keys that recipes had in earlier versions."""

from functools import reduce

import pytest
from pydantic import ValidationError

from megatron_rl.config import load_recipe
from megatron_rl.config.monitor import AlarmRule
from megatron_rl.config.recipe import REMOVED, without_removed
from megatron_rl.instruments.explain_schedule import schedule_of
from megatron_rl.monitor.alarms import own_rules
from tests.support.tiny import REPOSITORY

GRPO = REPOSITORY / "recipes" / "tiny" / "grpo.yaml"
# Sections that are null where a recipe does not ask for them.
SECTIONS = ["monitor.sinks.wandb={}", "rollout.engine=exact", "exact.noise.std=0.1"]


def test_removed_keys_without_effect_are_read_over():
    """Resolved recipes of runs that earlier versions started hold every key with its value."""
    recipe = load_recipe(GRPO, SECTIONS)
    values = recipe.model_dump(mode="json")
    for path, (neutral, _) in REMOVED.items():
        *sections, key = path.split(".")
        section = reduce(dict.__getitem__, sections, values)
        for holder in section if isinstance(section, list) else [section]:
            holder[key] = neutral
    assert without_removed(values) == recipe.model_dump(mode="json")
    assert type(recipe).model_validate(values) == recipe
    values["monitor"]["repetition_ngram"] = 8.0  # another type: not what a run has written
    with pytest.raises(ValidationError, match="repetition_ngram"):
        type(recipe).model_validate(values)


def test_readers_of_plain_recipes_read_over_them_too():
    rule = {"name": "a", "metric": "m", "above": 1.0}
    old = {"schedule": {"style": "constant", "weight_decay_end": None}, "monitor": {"alarms": [rule]}}
    old["monitor"]["alarms"][0]["again_after"] = None
    assert own_rules(old) == [AlarmRule(name="a", metric="m", above=1.0)]
    assert schedule_of({**old, "schedule": {**old["schedule"], "style": "length-decay", "mode": "auto"}}, "old", "")[2]
