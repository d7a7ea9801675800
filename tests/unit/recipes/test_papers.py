"""Every recipe at paper scale says what the papers' tables say (papers.yaml), key by key; what differs is declared.

A recipe is compared whole with one that is built of the table, so that a key that neither paper nor table names fails.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_rl.config import Recipe, load_recipe

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
STUDIES: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "papers.yaml").read_text())
ARMS = {
    f"{study['folder']}/{arm}": (name, arm) for name, study in STUDIES.items() for arm in study["arms"]
}  # file below recipes/ → study, arm
SIZED = re.compile(r"-(\d+)n(\d+)g-")
PLAN = re.compile(r"# Plan: \d+ × (\S+):")
ELSEWHERE = ("nodes", "gpus_per_node", "gpu", "training engine")
"""Rows of the papers' tables that are no keys of a recipe."""
MACHINE = (
    "learner.parallel",
    "learner.recompute",
    "learner.offload",
    "rollout.tensor_parallel",
    "rollout.gpu_memory_utilization",
    "rollout.deadline_s",
    "checkpoint",
    "monitor",
)
"""Keys that follow from the machine: layout, memory, patience. The planner holds them (check_recipes)."""


@pytest.fixture(scope="module")
def recipes() -> dict[str, Recipe]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return {name: load_recipe(RECIPES / f"{name}.yaml") for name in ARMS}


def stated(study: dict[str, Any], arm: str) -> dict[str, Any]:
    """Key → value of a study's table and of one arm, in the order in which later ones replace earlier ones."""
    about = study["arms"][arm]
    if "like" in about:
        values = stated(study, about["like"])
    else:
        values = {key: value for key, (value, _) in study["paper"].items()}
        values |= study.get("ours", {}) | study.get("deviations", {})
    return values | about.get("set", {})


def assign(values: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        values = values.setdefault(part, {})
    values[last] = value


def lookup(values: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} → {"a.b": 1}; lists are values."""
    if not isinstance(values, dict) or not values:
        return {prefix: values}
    return {k: v for key, item in values.items() for k, v in flat(item, f"{prefix}.{key}" if prefix else key).items()}


def sources(path: Path) -> list[Path]:
    """A recipe file and all that it extends."""
    extended = yaml.safe_load(path.read_text()).get("extends", [])
    extended = [extended] if isinstance(extended, str) else extended
    return [path, *(file for other in extended for file in sources((path.parent / other).resolve()))]


def test_every_recipe_of_a_study_is_in_the_tables():
    files = {str(p.relative_to(RECIPES).with_suffix("")) for p in RECIPES.rglob("*.yaml") if SIZED.search(p.stem)}
    of_no_study = {file for file in files if file.startswith("families/")}
    assert files - of_no_study == set(ARMS)


@pytest.mark.parametrize("file", ARMS)
def test_recipe_is_what_the_paper_says(recipes, file):
    name, arm = ARMS[file]
    study, actual = STUDIES[name], recipes[file].model_dump(mode="json")
    table = stated(study, arm)
    values: dict[str, Any] = {"name": study.get("name_prefix", "") + arm}
    for key in (*MACHINE, "learner.max_tokens_per_microbatch"):
        assign(values, key, lookup(actual, key))
    for key, value in table.items():
        if key not in ELSEWHERE:
            assign(values, key, value)
    values["objective"].setdefault("max_response_length", values["rollout"]["max_response_length"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = flat(Recipe.model_validate(values).model_dump(mode="json"))
    values_of_recipe = flat(actual)
    for key in ("data.train", "data.validation"):  # the loader looks relative paths up beside the recipe
        wanted[key], values_of_recipe[key] = (
            [Path(s["path"]).name for s in side[key]] for side in (wanted, values_of_recipe)
        )
    differ = {
        key: (wanted.get(key), values_of_recipe.get(key))
        for key in wanted | values_of_recipe
        if wanted.get(key) != values_of_recipe.get(key)
    }
    assert differ == {}, "key: (papers.yaml, recipe)"


@pytest.mark.parametrize("file", ARMS)
def test_size_of_the_job_is_the_papers(file):
    name, arm = ARMS[file]
    table = stated(STUDIES[name], arm)
    size = SIZED.search(arm)
    assert (int(size[1]), int(size[2])) == (table["nodes"], table["gpus_per_node"])
    assert PLAN.search((RECIPES / f"{file}.yaml").read_text())[1] == table["gpu"]


@pytest.mark.parametrize("file", ARMS)
def test_deviations_stand_in_the_header_with_a_reason(file):
    study = STUDIES[ARMS[file][0]]
    headers = "\n".join(path.read_text() for path in sources(RECIPES / f"{file}.yaml"))
    declared = dict(re.findall(r"^# Deviation: ([^,]+), (.+)$", headers, re.MULTILINE))
    assert set(declared) == set(study.get("deviations", {}))
    for key, value in study.get("deviations", {}).items():
        assert study["paper"][key][0] != value, f"{key} is what the paper says: no deviation"


def test_every_row_of_a_paper_names_its_place():
    for name, study in STUDIES.items():
        for key, (_, where) in study["paper"].items():
            assert re.match(r"(LD|FP16|OH|scripts)\b", where), f"{name}: {key}"


def test_no_recipe_says_that_its_source_was_missing():
    said = re.compile(r"not at hand|not available", re.IGNORECASE)
    assert [str(path) for path in RECIPES.rglob("*.yaml") if said.search(path.read_text())] == []
