"""Commands on a recipe."""

import json

import pytest

from megatron_rl.__main__ import main
from megatron_rl.config.loader import recipe_schema
from tests.support.tiny import REPOSITORY

DENSE = REPOSITORY / "recipes" / "length_decay" / "rloo-qwen3-8b-base-2n8g-tp4-lr1e-6.yaml"


def test_check_offline_goes_by_the_name(capsys):
    assert main(["check", str(DENSE)]) == 2
    capsys.readouterr()
    assert main(["check", str(DENSE), "--offline", "--ranks", "8"]) == 0
    printed = capsys.readouterr().out
    assert "not here  model models/Qwen3-8B-Base" in printed
    assert "megatron-rl plan" in printed
    assert main(["check", str(DENSE), "--offline", "--ranks", "6"]) == 2


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK"])
@pytest.mark.parametrize("number", ["", "two", "-1", "2.5", "9" * 20])
def test_a_number_of_a_job_that_is_none_is_answered_with_its_variable(name, number, capsys, monkeypatch):
    monkeypatch.setenv(name, number)
    assert main(["check", str(DENSE), "--offline"]) == 2
    assert f"the environment's {name}: {number!r} is not a whole number from " in capsys.readouterr().err


SCHEMA = recipe_schema()


def test_the_command_prints_it(capsys):
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA
