"""The sections data and reward: values that mean nothing or contradict each other are refused."""

import pytest
from pydantic import ValidationError

from megatron_rl.config.data import DataConfig, RewardConfig


def test_values_of_on_error_are_named():
    with pytest.raises(ValidationError, match=r"'mask', 'zero' or 'end'"):
        RewardConfig(on_error="skip")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "maths"}, "unknown reward 'maths': allowed are math, modsum, exact, by_source"),
        ({"name": "by_source"}, "go together"),
        ({"name": "math", "by_source": {"a": "math"}}, "go together"),
        ({"name": "by_source", "by_source": {"a": "by_source"}}, "unknown reward 'by_source'"),
        ({"nmae": "math"}, "nmae"),
        ({"timeout_s": 0}, "timeout_s"),
    ],
)
def test_impossible_sections_are_refused(section, message):
    with pytest.raises(ValidationError, match=message):
        RewardConfig.model_validate(section)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": [{"path": "a.jsonl", "weight": 1}, "b.jsonl"]}, "b.jsonl: no weight, but other sources have one"),
        (
            {"train": [{"path": "x/a.jsonl", "weight": 1}, {"path": "a.jsonl", "weight": 1}]},
            "two sources are named 'a'",
        ),
        ({"train": "a.jsonl", "validation": {"path": "b.jsonl", "weight": 2}}, "b.jsonl has weight 2"),
        ({"train": {"path": "a.jsonl", "weight": 0}}, "greater than 0"),
    ],
)
def test_weights_that_mean_nothing_are_refused(data, message):
    with pytest.raises(ValueError, match=message):
        DataConfig.model_validate(data)
