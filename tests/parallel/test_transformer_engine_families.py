"""Families beside Qwen3-MoE over TransformerEngine's layers, on a CPU, against Megatron's own layers on one rank."""

from __future__ import annotations

import numpy as np
import pytest

from tests.parallel.programs.learner import largest_difference
from tests.parallel.transformer_engine import EPS, learner, over_local, over_te
from tests.support import te
from tests.support.families import save_family
from tests.support.plain_training import float32_limits

pytestmark = [pytest.mark.skipif(te.MISSING is not None, reason=str(te.MISSING)), pytest.mark.slow]

FAMILIES = ("olmoe", "deepseek_v3", "bailing_moe")
STEPS = 2
LAYOUTS = {"one": (1, {}), "tp2ep2": (2, {"tensor": 2, "expert": 2})}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {family: save_family(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@pytest.fixture(scope="module")
def runs(transformer_engine, models):
    """Of Megatron's own layers, and of TransformerEngine's."""
    own: dict[str, tuple] = {}
    jobs: dict[int, dict] = {1: {}, 2: {}}
    for family, path in models.items():
        call = {"num_steps": STEPS, "model": {"path": str(path)}}
        own[family] = ("learner.train_on_stored_rollouts", call | {"learner": learner()})
        for name, (ranks, parallel) in LAYOUTS.items():
            train = ("learner.train_on_stored_rollouts", call | {"learner": learner(parallel)})
            jobs[ranks][f"{family} {name}"] = train
    with over_local(own) as local, over_te(transformer_engine, jobs) as found:
        yield local, found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_megatrons_own_layers_on_one_rank(family, layout, runs, models):
    local, found = runs
    (reference,), limits = local[family], float32_limits(STEPS, eps=EPS, path=str(models[family]))
    for result in found[f"{family} {layout}"]:
        for step, (got, want) in enumerate(zip(result["metrics"], reference["metrics"], strict=True)):
            assert abs(got["actor/grad_norm"] - want["actor/grad_norm"]) <= limits.of_metric("actor/grad_norm", step)
        for when in ("before", "after"):
            assert np.abs(np.concatenate(result[when]) - np.concatenate(reference[when])).max() <= limits.logprobs
        assert largest_difference(result["weights"], reference["weights"]) <= limits.weights
