"""Every schedule of the length-decay study is what its file name says. The other keys: tests/unit/recipes."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

from megatron_rl.config import load_recipe
from megatron_rl.schedule import LearningRateSchedule

FOLDER = Path(__file__).parents[3] / "recipes" / "length_decay"
ARMS = sorted(path.stem for path in FOLDER.glob("*-*.yaml"))


@pytest.mark.parametrize("name", ARMS)
def test_schedule_is_what_its_name_says(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recipe = load_recipe(FOLDER / f"{name}.yaml")
    stated_lr, stated_period = re.search(r"-lr([^-]+-\d)$", name), re.search(r"-t(\d+)$", name)
    peak, steps = recipe.learner.optimizer.lr, recipe.num_updates
    assert peak == (float(stated_lr[1]) if stated_lr else 1e-6)
    schedule = LearningRateSchedule(recipe.schedule, peak, steps)
    rates = [schedule.lr(t) for t in range(steps)]
    if stated_period:
        period = int(stated_period[1])
        assert rates == [max(1e-6 / 2 ** (t // period), 1e-7) for t in range(steps)]
        assert rates[-1] == 1e-7, "the run is long enough for the whole schedule"
    else:
        assert set(rates) == {peak}
    if name.endswith("-auto"):
        for t in range(150):
            schedule.observe_length(t, 1000.0 if t < 110 else 3500.0)
        assert schedule.length_decay.decay_period / 204 == pytest.approx(
            1, abs=0.1
        )  # as docs/schedule-and-alarms.md says
