"""What a teacher teaches on every layout and packing is what it teaches on one rank; its log-probs are random."""

import pytest

from tests.parallel.pool import Jobs
from tests.parallel.programs.learner import assert_same_training, largest_difference
from tests.support.plain_training import float32_limits
from tests.support.slow import slow_but

STEPS, EPS, MINIBATCHES = 2, 1e-3, 4  # of Adam: see test_learner_layouts.py
LAYOUTS = {
    "one sequence each": (1, {}, {"max_tokens_per_microbatch": 1}),
    "dp2": (2, {}, {"max_tokens_per_microbatch": 64}),
    "tp2ep2": (2, {"tensor": 2, "expert": 2}, {}),
    "cp2": (2, {"context": 2}, {}),
    "pp2": (2, {"pipeline": 2}, {}),
}
NAMES = ("actor/pg_loss", "actor/grad_norm", "teacher/kl", "teacher/kl_max", "teacher/share_floor")


def train(parallel: dict, overrides: dict, **teacher) -> tuple[str, dict]:
    return "train_on_stored_rollouts", {
        "num_steps": STEPS,
        "minibatches": MINIBATCHES,
        "learner": {"optimizer": {"lr": 1e-4, "eps": EPS}, "parallel": parallel, **overrides},
        "teacher": {"weight": 0.5, "discount": 0.9, **teacher},
    }


@pytest.fixture(scope="module")
def runs():
    """Result of every job on every rank: ``runs[job][rank]``."""
    jobs: dict[int, dict] = {1: {"one": train({}, {}), "measured": train({}, {}, weight=0.0)}, 2: {}}
    for name, (ranks, parallel, overrides) in LAYOUTS.items():
        jobs[ranks][name] = train(parallel, overrides)
    with Jobs(jobs, module="tests.parallel.programs.learner") as results:
        yield results


@pytest.mark.parametrize("layout", slow_but(["one sequence each", "dp2", "cp2"], LAYOUTS))
def test_layout_equals_one_rank(runs, layout):
    (first, *others), reference = runs[layout], runs["one"][0]
    assert_same_training(first, reference, NAMES, float32_limits(STEPS, minibatches=MINIBATCHES, eps=EPS))
    for other in others:
        assert other["metrics"] == first["metrics"]


def test_a_teacher_without_weight_is_measured_alone(runs):
    taught, measured = runs["one"][0], runs["measured"][0]
    assert taught["metrics"][0]["teacher/kl"] == measured["metrics"][0]["teacher/kl"] != 0
    limits = float32_limits(STEPS, minibatches=MINIBATCHES, eps=EPS)
    assert largest_difference(taught["weights"], measured["weights"]) > limits.weights
