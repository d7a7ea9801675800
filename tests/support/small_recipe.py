"""The least that a recipe says, and what is said of a wrong one."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_rl.config import load_recipe
from megatron_rl.errors import InputError
from megatron_rl.run.prepare import check_recipe
from tests.support.tiny import DATA, MODEL

SOUND: dict[str, Any] = {
    "name": "x",
    "num_steps": 1,
    "model": {"path": str(MODEL)},
    "data": {"train": [{"path": str(DATA / "train.jsonl")}]},
}


def minimal(**changes) -> str:
    values = {"name": "x", "num_steps": 1, "model": {"path": str(MODEL)}, "data": {"train": str(DATA / "train.jsonl")}}
    return yaml.safe_dump({**values, **changes})


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        check_recipe(load_recipe(path, overrides))
    return str(caught.value)
