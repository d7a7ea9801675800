"""docs/own-data-and-reward.md: its files are taken out of the page, checked as a user would, and scored."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_rl.__main__ import main
from megatron_rl.config import load_recipe
from megatron_rl.errors import EXIT_DONE
from megatron_rl.process.user_functions import load_function
from megatron_rl.rewards.worker import call_reward
from tests.support.tiny import REPOSITORY

PAGE = (REPOSITORY / "docs" / "own-data-and-reward.md").read_text()
FILES = {"train.jsonl": "jsonl", "reward.py": "python", "recipe.yaml": "yaml"}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A checkout's recipes, and beside them the folder of the page's files."""
    (tmp_path / "my").mkdir()
    for name, language in FILES.items():
        (block,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
        assert f"`my/{name}`" in PAGE
        (tmp_path / "my" / name).write_text(block)
    (tmp_path / "recipes").symlink_to(REPOSITORY / "recipes")
    return tmp_path / "my"


def test_the_example_passes_check(folder, capsys):
    arguments = ["--no-transformers", "--set", f"run_root={folder}"]
    assert main(["check", str(folder / "recipe.yaml"), *arguments]) == EXIT_DONE
    told = capsys.readouterr().out
    assert "4 prompts" in told


def test_the_recipe_names_the_files_beside_it(folder):
    recipe = load_recipe(folder / "recipe.yaml")
    assert Path(recipe.data.train[0].path) == folder / "train.jsonl"
    assert recipe.reward.name == f"{folder / 'reward.py'}:last_digit"


@pytest.mark.parametrize(("response", "reward"), [("1,3#3", 1.0), ("1,3#4", 0.1), ("1,3#", 0.0), ("", 0.0)])
def test_the_reward_scores_what_the_page_says(folder, response, reward):
    function = load_function(f"{folder / 'reward.py'}:last_digit")
    assert call_reward(function, {"solution_str": response, "ground_truth": "3"}) == reward
