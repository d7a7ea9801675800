"""What a teacher teaches on every layout and packing is what it teaches on one rank; its log-probs are random."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parallel.pool import Jobs
from tests.parallel.programs.learner import assert_same_training, largest_difference
from tests.support.plain_training import float32_limits
from tests.support.slow import slow_but
from tests.support.tiny import MODEL

STEPS, EPS, MINIBATCHES = 2, 1e-3, 4  # of Adam: see test_learner_layouts.py
LAYOUTS = {
    "one sequence each": (1, {}, {"max_tokens_per_microbatch": 1}),
    "dp2": (2, {}, {"max_tokens_per_microbatch": 64}),
    "tp2ep2": (2, {"tensor": 2, "expert": 2}, {}),
    "cp2": (2, {"context": 2}, {}),
    "pp2": (2, {"pipeline": 2}, {}),
}
SETS = {"top_k": 6, "forward": 0.3, "discount": 0.0}
FORMS = {"": {}, ", sets": SETS, ", scored": {**SETS, "engine": "learner"}}
"""Of the sampled token; on sets that come with the batch; on those that the ranks find."""
OF_SETS = ("actor/regularizer_loss", "teacher/divergence", "teacher/set_mass", "teacher/set_mass_pi")
NAMES = ("actor/pg_loss", "actor/grad_norm", "teacher/kl", "teacher/kl_max", "teacher/share_floor")


def train(parallel: dict, overrides: dict, **teacher) -> tuple[str, dict]:
    return "train_on_stored_rollouts", {
        "num_steps": STEPS,
        "minibatches": MINIBATCHES,
        "learner": {"optimizer": {"lr": 1e-4, "eps": EPS}, "parallel": parallel, **overrides},
        "teacher": {"weight": 0.5, "discount": 0.9, **teacher},
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Result of every job on every rank: ``runs[job][rank]``."""
    folder = tmp_path_factory.mktemp("teacher") / "hf"
    shutil.copytree(MODEL, folder)
    torch.manual_seed(0)
    other = {name: x + 0.05 * torch.randn_like(x) for name, x in load_file(folder / "model.safetensors").items()}
    save_file(other, folder / "model.safetensors", metadata={"format": "pt"})
    jobs: dict[int, dict] = {1: {"measured": train({}, {}, weight=0.0)}, 2: {}}
    for form, keys in FORMS.items():
        keys = {**keys, "path": str(folder)}
        jobs[1][f"one{form}"] = train({}, {}, **keys)
        for name, (ranks, parallel, overrides) in LAYOUTS.items():
            jobs[ranks][f"{name}{form}"] = train(parallel, overrides, **keys)
    fused = {"fused_head": True}
    jobs[2]["tp2ep2, fused, scored"] = train({"tensor": 2, "expert": 2}, fused, **{**keys, **FORMS[", scored"]})
    with Jobs(jobs, module="tests.parallel.programs.learner") as results:
        yield results


QUICK = ["one sequence each", "dp2", "cp2", "tp2ep2, scored"]
ALL = [f"{name}{form}" for name in LAYOUTS for form in FORMS] + ["tp2ep2, fused, scored"]


@pytest.mark.parametrize("layout", slow_but(QUICK, ALL))
def test_layout_equals_one_rank(runs, layout):
    form = layout.rpartition(", ")[2]
    (first, *others), reference = runs[layout], runs[f"one, {form}" if f", {form}" in FORMS else "one"][0]
    names = NAMES if f", {form}" not in FORMS else (*NAMES, *OF_SETS)
    assert all(step[name] != 0 for step in reference["metrics"] for name in names if name != "teacher/share_floor")
    assert_same_training(first, reference, names, float32_limits(STEPS, minibatches=MINIBATCHES, eps=EPS))
    for other in others:
        assert other["metrics"] == first["metrics"]


def test_the_losses_of_mini_batches_are_averaged(runs):
    """λ D of mini-batches of unequal length, 0.5 times about the mean over all tokens."""
    for step in runs["one, sets"][0]["metrics"]:
        assert step["actor/regularizer_loss"] == pytest.approx(0.5 * step["teacher/divergence"], rel=0.2)


def test_a_teacher_without_weight_is_measured_alone(runs):
    taught, measured = runs["one"][0], runs["measured"][0]
    assert taught["metrics"][0]["teacher/kl"] == measured["metrics"][0]["teacher/kl"] != 0
    limits = float32_limits(STEPS, minibatches=MINIBATCHES, eps=EPS)
    assert largest_difference(taught["weights"], measured["weights"]) > limits.weights
