"""The learner on every layout gives the loss, gradient norm, log-probs and weights of one rank; and those of HF.

fp32. Rollouts are stored (made from a seed), so that every layout updates on the same tokens. Ranks are started once
per number of ranks and run all layouts of that number one after the other.
"""

from functools import partial

import numpy as np
import pytest
import torch

from tests.parallel.pool import Jobs
from tests.parallel.programs.learner import largest_difference
from tests.support.plain_training import Limits, float32_limits, run
from tests.support.rounding import rounded
from tests.support.slow import slow_but
from tests.support.tiny import MODEL, stored_rollouts

STEPS = 3  # of Adam: without moments, with them, and once more
THREADS_OF_A_GROUP = 3
# Adam divides by the root of a second moment: with the usual 1e-8 a gradient that is all rounding moves a weight by up
# to lr, and layouts, which round differently, drift apart by that. With this one updates are as exact as gradients.
EPS = 1e-3
LAYOUTS = {
    "dp2": (2, {}),
    "tp2": (2, {"tensor": 2}),
    "ep2": (2, {"expert": 2}),
    "tp2ep2": (2, {"tensor": 2, "expert": 2}),
    "tp2etp2": (2, {"tensor": 2, "expert_tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "cp2": (2, {"context": 2}),
    "cp2ep2": (2, {"context": 2, "expert": 2}),
    "cp2tp2ep2": (4, {"context": 2, "tensor": 2, "expert": 2}),
    "cp2pp2": (4, {"context": 2, "pipeline": 2}),
    "cp4": (4, {"context": 4}),
    "tp2ep2pp2": (4, {"tensor": 2, "expert": 2, "pipeline": 2}),
}
VARIANTS = {
    "small microbatches": {"max_tokens_per_microbatch": 64},
    "one sequence each": {"max_tokens_per_microbatch": 1},
    "recompute full": {"recompute": "full"},
    "recompute selective": {"recompute": "selective"},
    "fused head": {"fused_head": True},
}
ON_TWO_CONTEXT_RANKS = {
    "one sequence each": {"max_tokens_per_microbatch": 1},
    "recompute full, fused head": {"recompute": "full", "fused_head": True},
    "recompute selective": {"recompute": "selective"},
}
# saved on (ranks, layout), continued on (ranks, layout)
RESHARDINGS = {
    "same layout": ((1, {}), (1, {})),
    "tp2ep2 to 1": ((2, {"tensor": 2, "expert": 2}), (1, {})),
    "1 to pp2": ((1, {}), (2, {"pipeline": 2})),
    "ep2 to dp2": ((2, {"expert": 2}), (2, {})),
    "cp2 to 1": ((2, {"context": 2}), (1, {})),
    "1 to cp2": ((1, {}), (2, {"context": 2})),
}


def learner(parallel: dict | None = None, **overrides) -> dict:
    return {"optimizer": {"lr": 1e-4, "eps": EPS}, "parallel": parallel or {}, **overrides}


def train(section: dict, num_steps: int = STEPS, minibatches: int = 1) -> tuple[str, dict]:
    return "train_on_stored_rollouts", {"num_steps": num_steps, "minibatches": minibatches, "learner": section}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Result of every job on every rank: ``runs[job][rank]``."""
    jobs: dict[int, dict] = {
        1: {
            "one": train(learner()),
            "one, minibatches": train(learner(), 2, 4),
            "exported": ("exported", {"learner": learner()}),
            "closed": ("closed", {"learner": learner()}),
            "closed, bf16": ("closed", {"learner": learner(dtype="bf16")}),
        },
        2: {
            "tp2ep2, allgather": train(learner({"tensor": 2, "expert": 2}, token_dispatcher="allgather")),
            "ep2, minibatches": train(learner({"expert": 2}), 2, 4),
            "closed, ep2": ("closed", {"learner": learner({"expert": 2})}),
            "threads": ("threads", {"learner": learner({"expert": 2})}),
        },
        4: {"round trip": train(learner(LAYOUTS["tp2ep2pp2"][1]), 0)},
    }
    jobs[1] |= {name: train(learner(**overrides)) for name, overrides in VARIANTS.items()}
    for name, (ranks, parallel) in LAYOUTS.items():
        jobs[ranks][name] = train(learner(parallel))
    for name, overrides in ON_TWO_CONTEXT_RANKS.items():
        jobs[2][f"cp2, {name}"] = train(learner({"context": 2}, **overrides))
    jobs[4]["fused head, tp2ep2pp2"] = train(learner(LAYOUTS["tp2ep2pp2"][1], fused_head=True))
    for name, ((ranks, parallel), _) in RESHARDINGS.items():
        folder = str(tmp_path_factory.mktemp("checkpoint"))
        jobs[ranks][f"save, {name}"] = ("save_after", {"folder": folder, "num_steps": 2, "learner": learner(parallel)})

    def load(name: str, parallel: dict) -> tuple[str, dict]:
        path = results[f"save, {name}"][0]["path"]
        return "load_and_continue", {"path": path, "learner": learner(parallel)}

    for name, (_, (ranks, parallel)) in RESHARDINGS.items():
        jobs[ranks][f"load, {name}"] = partial(load, name, parallel)
    with Jobs(jobs, module="tests.parallel.programs.learner") as results:
        yield results


@pytest.fixture(scope="module")
def limits() -> Limits:
    """How far rounding may take two of these runs apart."""
    return float32_limits(STEPS, eps=EPS)


def assert_same_run(result: dict, reference: dict, limits: Limits, updates_a_step: int = 1) -> None:
    for step, (got, want) in enumerate(zip(result["metrics"], reference["metrics"], strict=True)):
        # The noise scale takes a layout with parts: see test_learner_noise.py.
        assert {n for n in got if "noise/" not in n} == {n for n in want if "noise/" not in n}
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "mismatch/rho_std", "actor/ppo_kl"):
            limit = limits.of_metric(name, step if updates_a_step == 1 else None)
            assert abs(got[name] - want[name]) <= limit, (step, name)
    for when in ("before", "after"):
        assert np.abs(np.concatenate(result[when]) - np.concatenate(reference[when])).max() <= limits.logprobs
    assert largest_difference(result["weights"], reference["weights"]) <= limits.weights


@pytest.mark.parametrize("layout", slow_but(["dp2", "tp2etp2", "cp2ep2", "tp2ep2pp2"], LAYOUTS))
def test_layout_equals_one_rank(runs, layout, limits):
    first, *others = runs[layout]
    assert_same_run(first, runs["one"][0], limits)
    for other in others:  # every rank reports the same and exports the same
        assert other["metrics"] == first["metrics"]
        assert largest_difference(other["weights"], first["weights"]) == 0.0


def test_tokens_that_all_ranks_get_are_computed_alike(runs, limits):
    assert_same_run(runs["tp2ep2, allgather"][0], runs["one"][0], limits)


def test_several_minibatches_on_two_ranks(runs):
    one = runs["one, minibatches"][0]
    limits = float32_limits(2, minibatches=4, eps=EPS)
    assert_same_run(runs["ep2, minibatches"][0], one, limits, updates_a_step=4)
    assert abs(one["metrics"][0]["actor/ppo_kl"]) > limits.of_metric("actor/ppo_kl"), "old log-probs were not used"
    loss = np.mean(run(torch.float64, 1, minibatches=4, eps=EPS).losses)
    assert abs(loss) > limits.of_metric("actor/pg_loss"), "a sum over the mini-batches would not show"
    assert abs(one["metrics"][0]["actor/pg_loss"] - loss) <= limits.of_metric("actor/pg_loss")


@pytest.mark.parametrize("variant", slow_but(["small microbatches", "recompute full", "fused head"], VARIANTS))
def test_microbatches_recompute_and_compilation_change_nothing(runs, variant, limits):
    assert_same_run(runs[variant][0], runs["one"][0], limits)


@pytest.mark.parametrize("variant", slow_but(["recompute full, fused head"], ON_TWO_CONTEXT_RANKS))
def test_variants_on_two_context_ranks(runs, variant, limits):
    assert_same_run(runs[f"cp2, {variant}"][0], runs["one"][0], limits)


@pytest.mark.slow
def test_fused_head_on_a_mixed_layout(runs, limits):
    assert_same_run(runs["fused head, tp2ep2pp2"][0], runs["one"][0], limits)


def test_first_step_equals_hugging_face(runs, limits):
    """Log-probs, loss and gradient norm of the first step against transformers' Qwen3-MoE and autograd in float64."""
    one, plain = runs["one"][0], run(torch.float64, STEPS, eps=EPS)
    assert np.abs(np.concatenate(one["before"]) - plain.before).max() <= limits.logprobs
    metrics = one["metrics"][0]
    assert abs(metrics["actor/grad_norm"] - np.linalg.norm(plain.gradients[0])) <= limits.of_metric(
        "actor/grad_norm", 0
    )
    # One update per batch: r is 1, so that the loss is a mean of advantages, whatever the log-probs.
    tokens = sum(s.whole_length for s in stored_rollouts(0).sequences)
    assert metrics["actor/pg_loss"] == rounded(plain.losses[0], tokens, limits.mean_advantage, torch.float32)


def test_weights_survive_the_round_trip(runs):
    """What is exported without an update is the checkpoint's own tensors, bit for bit, on a mixed layout."""
    from safetensors.torch import load_file

    original = {name: tensor.float() for name, tensor in load_file(MODEL / "model.safetensors").items()}
    assert all(largest_difference(rank["weights"], original) == 0.0 for rank in runs["round trip"])


def test_one_rank_exports_views_of_its_parameters(runs):
    """Only fused queries, keys and values are copied, each time. A view is made anew where a parameter has moved."""
    (exported,) = runs["exported"]
    assert {name.split(".")[-2] for name in exported["copied"]} == {"q_proj", "k_proj", "v_proj"}
    assert exported["follow"] == [True, True]
    assert exported["rounded"] == {"torch.bfloat16"}


@pytest.mark.parametrize("layout", ["closed", "closed, bf16", "closed, ep2"])
def test_a_closed_learner_leaves_nothing(runs, layout):
    for left in runs[layout]:
        assert left == []


def test_a_finished_job_leaves_the_threads_of_one_group(runs):
    """C++ keeps one of Megatron's twenty groups."""
    for first, second, third in runs["threads"]:
        assert second - first <= THREADS_OF_A_GROUP
        assert third - second <= THREADS_OF_A_GROUP


@pytest.mark.parametrize("resharding", slow_but(["tp2ep2 to 1", "1 to cp2"], RESHARDINGS))
def test_checkpoint_continues_the_run(runs, resharding):
    saved, loaded = runs[f"save, {resharding}"][0], runs[f"load, {resharding}"][0]
    exact = resharding == "same layout"
    limits = float32_limits(4, eps=EPS)
    assert loaded["num_updates"] == saved["num_updates"] == 4
    assert np.abs(loaded["logprobs"] - saved["logprobs"]).max() <= (0.0 if exact else limits.logprobs)
    assert largest_difference(loaded["weights"], saved["weights"]) <= (0.0 if exact else limits.weights)
    moved = largest_difference(loaded["weights"], runs["round trip"][0]["weights"])
    assert moved > 10 * limits.weights, "hardly moved: no proof"
    for step, (got, want) in enumerate(zip(loaded["metrics"], saved["metrics"], strict=True), start=2):
        limit = 0.0 if exact else limits.of_metric("actor/grad_norm", step)
        assert abs(got["actor/grad_norm"] - want["actor/grad_norm"]) <= limit
