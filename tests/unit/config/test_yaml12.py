"""YAML 1.2 is read as it says, and nothing in it is executed."""

import yaml

from megatron_rl.config import load_recipe
from tests.support.small_recipe import SOUND, error_of, minimal
from tests.support.tiny import REPOSITORY

GRPO = REPOSITORY / "recipes" / "tiny" / "grpo.yaml"


def test_yaml_is_read_as_1_2(write):
    """`off` is a word and 1e-6 a number; a key given twice is an error, not the last value."""
    recipe = load_recipe(write("r.yaml", minimal(name="off") + "learner: {optimizer: {lr: 1e-6}}\n"))
    assert recipe.learner.optimizer.lr == 1e-6
    assert load_recipe(GRPO, ["name=off"]).name == "off"
    assert "given twice" in error_of(write("t.yaml", minimal() + "seed: 1\nseed: 2\n"))


def test_nothing_in_yaml_is_executed(write):
    assert "not valid YAML" in error_of(write("r.yaml", minimal() + "seed: !!python/object/apply:os.getpid []\n"))


def test_numbers_are_read_as_yaml_1_2_says(message, tmp_path):
    for text, value in (("010", 10), ("0o10", 8), ("0x10", 16), ("1e3", 1000), ("+7", 7)):
        (tmp_path / "r.yaml").write_text(f"{yaml.safe_dump(SOUND)}\nseed: {text}\n")
        assert load_recipe(tmp_path / "r.yaml").seed == value
        assert load_recipe(tmp_path / "r.yaml", [f"num_steps={text}"]).num_steps == value
