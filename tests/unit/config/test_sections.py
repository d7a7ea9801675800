"""Small sections of a recipe: numbers are taken as they are written."""

from megatron_rl.config.sections import OversampleConfig


def test_a_factor_is_taken_as_it_is_written():
    assert OversampleConfig(factor=1.1, rest="abort").num_asked(10) == 11
    assert OversampleConfig(factor=1.25, rest="abort").num_asked(10) == 13
