"""YAML 1.2 is read as it says, and nothing in it is executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_rl.check import check_recipe
from megatron_rl.config import load_recipe
from megatron_rl.errors import InputError
from tests.support.tiny import DATA, MODEL, REPOSITORY

GRPO = REPOSITORY / "recipes" / "tiny" / "grpo.yaml"


@pytest.fixture
def write(tmp_path):
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def minimal(**changes) -> str:
    values = {"name": "x", "num_steps": 1, "model": {"path": str(MODEL)}, "data": {"train": str(DATA / "train.jsonl")}}
    return yaml.safe_dump({**values, **changes})


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        check_recipe(load_recipe(path, overrides))
    return str(caught.value)


def test_yaml_is_read_as_1_2(write):
    """`off` is a word and 1e-6 a number; a key given twice is an error, not the last value."""
    recipe = load_recipe(write("r.yaml", minimal(name="off") + "learner: {optimizer: {lr: 1e-6}}\n"))
    assert recipe.learner.optimizer.lr == 1e-6
    assert load_recipe(GRPO, ["name=off"]).name == "off"
    assert "given twice" in error_of(write("t.yaml", minimal() + "seed: 1\nseed: 2\n"))


def test_nothing_in_yaml_is_executed(write):
    assert "not valid YAML" in error_of(write("r.yaml", minimal() + "seed: !!python/object/apply:os.getpid []\n"))


SOUND = {
    "name": "x",
    "num_steps": 1,
    "model": {"path": str(MODEL)},
    "data": {"train": [{"path": str(DATA / "train.jsonl")}]},
}


@pytest.fixture
def message(tmp_path):
    """What is said of a recipe that extends one with these values; '' where nothing is wrong."""

    def load(values: dict[str, Any], *overrides: str) -> str:
        merged = {**SOUND, **values}
        if "data" in values and isinstance(values["data"], dict):
            merged["data"] = {**SOUND["data"], **values["data"]}
        (tmp_path / "base.yaml").write_text(yaml.safe_dump(merged))
        (tmp_path / "middle.yaml").write_text("extends: base.yaml\n")
        own = "" if "name" in values else "name: own\n"  # a name is never inherited
        (tmp_path / "own.yaml").write_text(f"extends: [middle.yaml]\n{own}")
        try:
            load_recipe(tmp_path / ("own.yaml" if own else "base.yaml"), overrides)
        except InputError as error:
            return str(error)
        return ""

    return load


def test_numbers_are_read_as_yaml_1_2_says(message, tmp_path):
    for text, value in (("010", 10), ("0o10", 8), ("0x10", 16), ("1e3", 1000), ("+7", 7)):
        (tmp_path / "r.yaml").write_text(f"{yaml.safe_dump(SOUND)}\nseed: {text}\n")
        assert load_recipe(tmp_path / "r.yaml").seed == value
        assert load_recipe(tmp_path / "r.yaml", [f"num_steps={text}"]).num_steps == value
