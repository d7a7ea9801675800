"""Every recipe of the length-decay study is what its file name says: model, layout, schedule, correction, precision."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

from megatron_rl.config import load_recipe
from megatron_rl.config.recipe import Recipe
from megatron_rl.schedule import LearningRateSchedule

FOLDER = Path(__file__).parents[3] / "recipes" / "length_decay"
ARMS = sorted(path.stem for path in FOLDER.glob("*-*.yaml"))
MODELS = {"qwen3-4b-base": "Qwen3-4B-Base", "qwen3-8b-base": "Qwen3-8B-Base", "qwen3-30b-a3b": "Qwen3-30B-A3B-Base"}
NAME = re.compile(
    r"rloo-(?P<model>.+)-(?P<nodes>\d)n8g-tp(?P<tensor>\d)(ep(?P<expert>\d))?-"
    r"(lr(?P<lr>.+)|t(?P<period>\d+)|(?P<mode>auto)|(?P<correction>tis|mis)|(?P<dtype>fp16))"
)


@pytest.fixture(scope="module")
def recipes() -> dict[str, Recipe]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return {name: load_recipe(FOLDER / f"{name}.yaml") for name in ARMS}


def test_the_papers_arms_are_there():
    suffixes = {name.split("-", 1)[1] for name in ARMS}
    four, eight = "qwen3-4b-base-1n8g-tp2-", "qwen3-8b-base-1n8g-tp4-"
    paper = {four + arm for arm in ("lr1e-6", "lr1e-7", "t125", "t204", "t250", "tis", "mis", "fp16")}
    paper |= {eight + arm for arm in ("t100", "t160", "t204")}
    assert suffixes >= paper | {"qwen3-30b-a3b-4n8g-tp4ep8-auto"}


@pytest.mark.parametrize("name", ARMS)
def test_recipe_is_what_its_name_says(recipes, name):
    recipe, stated = recipes[name], NAME.fullmatch(name)
    assert recipe.name == name
    assert recipe.model.path == Path("models") / MODELS[stated["model"]]
    assert recipe.objective.advantage == "rloo"
    assert recipe.learner.parallel.tensor == int(stated["tensor"])
    assert recipe.learner.parallel.expert == int(stated["expert"] or 1)
    assert (int(stated["nodes"]) * 8) % (recipe.learner.parallel.tensor * recipe.learner.parallel.expert) == 0
    assert [c.mode for c in recipe.objective.correction] == ([stated["correction"]] if stated["correction"] else [])
    assert {recipe.learner.dtype, recipe.rollout.dtype} == {stated["dtype"] or "bf16"}


@pytest.mark.parametrize("name", ARMS)
def test_schedule_is_what_its_name_says(recipes, name):
    recipe, stated = recipes[name], NAME.fullmatch(name)
    peak, steps = recipe.learner.optimizer.lr, recipe.num_updates
    assert peak == (float(stated["lr"]) if stated["lr"] else 1e-6)
    schedule = LearningRateSchedule(recipe.schedule, peak, steps)
    rates = [schedule.lr(t) for t in range(steps)]
    if stated["period"]:
        period = int(stated["period"])
        assert rates == [max(1e-6 / 2 ** (t // period), 1e-7) for t in range(steps)]
        assert rates[-1] == 1e-7  # the run is long enough for the whole schedule
    else:
        assert set(rates) == {peak}
    if stated["mode"]:
        for t in range(150):
            schedule.observe_length(t, 1000.0 if t < 110 else 3500.0)
        assert schedule.length_decay.decay_period / 204 == pytest.approx(
            1, abs=0.1
        )  # as docs/schedule-and-alarms.md says


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_differs_from_the_base_in_one_thing(name):
    lines = (FOLDER / f"{name}.yaml").read_text().splitlines()
    header = [line for line in lines if line.startswith("#")]
    assert [line.split(":")[0] for line in header] == ["# Purpose", "# Source", "# Layout", "# Plan"]
    assert "Status:" in header[2]
    sections = [
        line.split(":")[0] for line in lines if line[0] not in "# " and not line.startswith(("extends", "name"))
    ]
    assert sections in ([], ["schedule"], ["learner"], ["objective"], ["rollout", "learner"])
