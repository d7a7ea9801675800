"""The learner over the real TransformerEngine's layers, on a CPU, against Megatron's own layers on one rank.

`tests.support.te` says what runs and what does not. One helper imports TransformerEngine, ranks start once per number
of ranks, and run the programs of the other tests of the learner.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.parallel.gloo import run_ranks
from tests.parallel.programs.learner import largest_difference
from tests.support import te
from tests.support.plain_training import float32_limits
from tests.support.zygote import Zygote

pytestmark = pytest.mark.skipif(te.MISSING is not None, reason=str(te.MISSING))

EPS = 1e-3  # as in test_learner_layouts.py: updates are as exact as gradients
STEPS = 3
LAYOUTS = {
    "one": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tensor": 2}),
    "ep2": (2, {"expert": 2}),
    "tp2ep2": (2, {"tensor": 2, "expert": 2}),
    "tp2etp2": (2, {"tensor": 2, "expert_tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "pp2ep2": (4, {"pipeline": 2, "expert": 2}),
    "tp2ep2pp2": (4, {"tensor": 2, "expert": 2, "pipeline": 2}),
}
VARIANTS = {
    "small microbatches": {"max_tokens_per_microbatch": 64},
    "recompute full": {"recompute": "full"},
    "recompute selective": {"recompute": "selective"},
    "fused head": {"fused_head": True},
}
MIXED = LAYOUTS["tp2ep2"][1]


def learner(parallel: dict | None = None, **overrides) -> dict:
    return {"optimizer": {"lr": 1e-4, "eps": EPS}, "parallel": parallel or {}, **overrides}


def train(section: dict) -> tuple[str, dict]:
    return "learner.train_on_stored_rollouts", {"num_steps": STEPS, "learner": section}


@pytest.fixture(scope="module")
def helper():
    with Zygote({"NVTE_PROJECT_BUILDING": "1"}) as own:
        yield own


@pytest.fixture(scope="module")
def local() -> dict:
    """Megatron's own layers on one rank."""
    jobs = {"one": ("train_on_stored_rollouts", {"num_steps": STEPS, "learner": learner()})}
    (results,) = run_ranks(
        "tests.parallel.jobs", "run_jobs", 1, module="tests.parallel.programs.learner", jobs=jobs, timeout_s=500
    )
    return results


@pytest.fixture(scope="module")
def runs(helper) -> dict[str, list[dict]]:
    """Result of every job on every rank: ``runs[job][rank]``."""
    jobs: dict[int, dict] = {1: {}, 2: {}, 4: {}}
    for name, (ranks, parallel) in LAYOUTS.items():
        jobs[ranks][name] = train(learner(parallel))
    for name, overrides in VARIANTS.items():
        jobs[2][name] = train(learner(MIXED, **overrides))
    jobs[2]["unmarked tp2ep2"] = train(learner(MIXED))
    return {
        name: [rank[name] for rank in ranks] for n in jobs for ranks in [start(helper, n, jobs[n])] for name in jobs[n]
    }


def start(helper: Zygote, world_size: int, jobs: dict) -> list[dict]:
    return run_ranks(
        "tests.parallel.programs.transformer_engine", "run_jobs", world_size, helper=helper, jobs=jobs, timeout_s=500
    )


@pytest.mark.parametrize("name", [*LAYOUTS, *VARIANTS])
def test_equals_megatrons_own_layers_on_one_rank(runs, local, name):
    reference, limits = local["one"], float32_limits(STEPS, eps=EPS)
    for result in runs[name]:
        for step, (got, want) in enumerate(zip(result["metrics"], reference["metrics"], strict=True)):
            for metric in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "mismatch/rho_std"):
                assert abs(got[metric] - want[metric]) <= limits.of_metric(metric, step), (step, metric)
        for part in ("before", "after"):
            assert np.abs(np.concatenate(result[part]) - np.concatenate(reference[part])).max() <= limits.logprobs
        assert largest_difference(result["weights"], reference["weights"]) <= limits.weights


def test_without_the_marks_of_experts_the_gradient_norm_leaves_some_out(runs, local):
    for got, want in zip(runs["unmarked tp2ep2"][0]["metrics"], local["one"]["metrics"], strict=True):
        assert got["actor/grad_norm"] < 0.99 * want["actor/grad_norm"]
