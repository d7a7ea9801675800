"""Recipes in files of a test."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_rl.config import load_recipe
from megatron_rl.errors import InputError
from tests.support.small_recipe import SOUND


@pytest.fixture
def write(tmp_path):
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


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
