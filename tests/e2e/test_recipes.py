"""Every recipe at paper scale loads, is checked, is planned, and has a tiny twin that runs on real engines."""

import math
import re
import warnings

import pytest

from megatron_rl.config import Recipe, load_recipe
from tests.parallel.gloo import run_ranks
from tests.support.tiny import REPOSITORY
from tests.support.twins import STEPS, shared_keys, twin, twin_key
from tools.dev import check_recipes
from tools.dev.make_tiny_checkpoint import build_model, build_tiny_config, save_checkpoint

SIZED = sorted(path for path in (REPOSITORY / "recipes").rglob("*.yaml") if re.search(r"-\d+n\d+g-", path.stem))
SCALED = [path for path in SIZED if path.parent.name != "families"]  # twins are of two families: see test_families.py
IDS = [str(path.relative_to(REPOSITORY / "recipes").with_suffix("")) for path in SCALED]


@pytest.fixture(scope="module")
def recipes() -> dict[str, Recipe]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return dict(zip(IDS, map(load_recipe, SCALED), strict=True))


@pytest.fixture(scope="module")
def representatives(recipes) -> dict[str, str]:
    """Key of a twin → the recipe that it is made of: the first of those that differ in numbers alone."""
    chosen: dict[str, str] = {}
    for name, recipe in recipes.items():
        chosen.setdefault(twin_key(recipe), name)
    return chosen


@pytest.fixture(scope="module")
def twins(recipes, representatives, tmp_path_factory) -> dict[str, Recipe]:
    root = tmp_path_factory.mktemp("twins")
    dense = root / "dense"
    save_checkpoint(build_model(build_tiny_config("qwen2", "nano")), dense)
    return {key: twin(recipes[name], root, dense) for key, name in representatives.items()}


@pytest.fixture(scope="module")
def finished(twins) -> dict:
    (result,) = run_ranks(
        "tests.e2e.programs.twin",
        "run_twins",
        world_size=1,
        recipes=[recipe.model_dump(mode="json") for recipe in twins.values()],
    )
    return result


def test_the_studies_are_there():
    folders = {name.split("/")[0] for name in IDS}
    paper = {"length_decay", "fp16", "sanity", "objective_hacking", "exact", "router_replay"}
    assert folders == {*paper, "servers", "quantized", "long_context"}


@pytest.mark.parametrize("path", list({path.parent: path for path in SIZED}.values()), ids=lambda path: path.stem)
def test_recipe_is_checked_and_fits_as_its_header_says(path):
    """One of every study; `make lint` checks them all."""
    assert " GiB a GPU; " in check_recipes.check(path)


@pytest.mark.parametrize("path", SCALED, ids=IDS)
def test_header_says_what_it_is_for(path):
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert header[0].startswith("# Purpose: ")
    text = "\n".join(header)
    assert "Layout: " in text
    assert "Status: not yet run on hardware." in text


def test_a_stale_header_is_found_and_written_anew(tmp_path, monkeypatch):
    """On a copy: a number that is not the planner's fails, and --write puts the planner's there."""
    original = SCALED[IDS.index("fp16/grpo-octothinker-3b-1n8g-dp8-fp16")]
    text = original.read_text()
    bases = REPOSITORY / "recipes"
    moved = text.replace("../base/", f"{bases}/base/").replace(" scripts.yaml", f" {bases}/fp16/scripts.yaml")
    copy = tmp_path / original.name
    copy.write_text(re.sub(r"learning [\d.]+", "learning 1.0", moved))
    with pytest.raises(check_recipes.InputError, match="run with --write"):
        check_recipes.check(copy)
    check_recipes.check(copy, write=True)
    assert copy.read_text() == moved
    copy.write_text(re.sub(r"# Plan: .*\n", "", moved))
    with pytest.raises(check_recipes.InputError, match="lacks a line"):
        check_recipes.check(copy)


def test_every_recipe_has_a_twin_that_switches_the_same(recipes, representatives, twins):
    assert set(representatives) == set(twins) == {twin_key(recipe) for recipe in recipes.values()}
    for key, name in representatives.items():
        assert shared_keys(twins[key]) == shared_keys(recipes[name]), name
        assert twin_key(twins[key]) == key


@pytest.mark.slow
@pytest.mark.parametrize("name", IDS)
def test_twin_runs(recipes, representatives, twins, finished, name):
    recipe = recipes[name]
    rows = finished["rows"][twins[twin_key(recipe)].name]
    assert [row["step"] for row in rows] == list(range(STEPS))
    for row in rows:
        assert math.isfinite(row["actor/pg_loss"])
        assert 0 <= row["critic/rewards/mean"] <= 1
        assert (row["perf/time/old_logprobs"] > 0) == (
            recipe.routing.replay == "r2" or recipe.objective.needs_old_logprobs(recipe.batch.minibatches)
        )
        if recipe.routing.is_on:
            assert 0.5 < row["router/agree_frac"] <= 1
            assert row["perf/time/routes"] > 0
        if recipe.rollout.engine == "exact":
            assert row["training/rollout_probs_diff_max"] == 0
        if recipe.learner.dtype == "fp16":
            assert row["precision/loss_scale"] > 1


@pytest.mark.slow
def test_engines_are_shared(finished):
    assert finished["num_engines"] <= 7
