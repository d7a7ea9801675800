"""The schema for editors takes every recipe that the loader takes, and refuses what it refuses."""

from __future__ import annotations

import warnings

import jsonschema
import pytest

from megatron_rl.config import load_recipe
from megatron_rl.config.loader import is_base, read_yaml, recipe_schema
from megatron_rl.instruments.lab.jobs import is_study
from tests.support.tiny import REPOSITORY

SCHEMA = recipe_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
RECIPES = sorted(path for path in (REPOSITORY / "recipes").rglob("*.yaml") if not is_study(path))


def problems(values: dict) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(values)]


def test_it_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(REPOSITORY / "recipes")))
def test_every_shipped_recipe_is_valid_as_written_and_resolved(path):
    assert problems(read_yaml(path, "recipe")) == []
    if not is_base(path):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert problems(load_recipe(path).model_dump(mode="json")) == []


@pytest.mark.parametrize(
    "values",
    [
        {"extends": "base.yaml"},
        {"extends": ["a.yaml", "b.yaml"], "num_steps": 3},
        {"extends": None},
        {"data": {"train": "a.jsonl"}},
        {"data": {"train": {"path": "a.jsonl", "limit": None}, "validation": None}},
        {"data": {"train": ["a.jsonl", {"path": "b.jsonl"}], "validation": []}},
        {"reward": "my.py:f"},
        {"reward": {"name": "math", "overlong": None}},
        {"objective": {"policy_term": "gspo", "correction": None}},
        {"objective": {"policy_term": {"clip_high": 0.5}, "correction": "tis"}},
        {"objective": {"correction": ["tis", {"mode": "veto"}], "distortion": None}},
        {"validation": {"every": None}, "checkpoint": {"every": None, "keep_best": None}, "rollout": {"top_k": None}},
        {"learner": {"lora": None, "optimizer": {"clip_grad": None, "lr": 1}}},
    ],
)
def test_what_the_loader_takes(values):
    assert problems(values) == []


@pytest.mark.parametrize(
    "values",
    [
        {"extnds": "base.yaml"},
        {"extends": 3},
        {"seed": -1},
        {"seed": "1"},
        {"seed": True},
        {"batch": None},
        {"data": {"train": 7}},
        {"data": {"train": [{"pth": "a"}]}},
        {"objective": {"policy_term": {"name": "gspo", "dual_clip": 3}}},
        {"objective": {"policy_term": {"name": "gsop"}}},
        {"objective": {"correction": [{"mode": "tis", "caps": 2}]}},
        {"learner": {"lr": 1e-6}},
        {"learner": {"dtype": "fp8"}},
        {"rollout": {"temperature": 0}},
    ],
)
def test_what_the_loader_refuses(values):
    assert problems(values) != []
