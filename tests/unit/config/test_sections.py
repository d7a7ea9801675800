"""Small sections of a recipe."""

import pytest

from megatron_rl.config.sections import ValidationConfig


@pytest.mark.parametrize(
    ("fields", "due"),
    [({}, []), ({"every": 3}, [0, 3, 6]), ({"every": 3, "at_start": False}, [3, 6]), ({"at_start": True}, [0])],
)
def test_the_steps_before_which_a_run_validates(fields, due):
    assert [step for step in range(8) if ValidationConfig(**fields).is_due(step)] == due
