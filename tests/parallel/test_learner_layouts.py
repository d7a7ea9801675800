"""The learner on every layout gives the loss, gradient norm, log-probs and weights of one rank; and those of HF.

fp32. Rollouts are stored (made from a seed), so that every layout updates on the same tokens. Ranks are started once
per number of ranks and run all layouts of that number one after the other.
"""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from tests.parallel.gloo import run_ranks
from tests.parallel.programs.learner import largest_difference
from tests.support.tiny import MODEL, stored_rollouts

STEPS = 5
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
    "tp2ep2pp2": (4, {"tensor": 2, "expert": 2, "pipeline": 2}),
}
VARIANTS = {
    "small microbatches": {"max_tokens_per_microbatch": 64},
    "one sequence each": {"max_tokens_per_microbatch": 1},
    "recompute full": {"recompute": "full"},
    "recompute selective": {"recompute": "selective"},
    "fused head": {"fused_head": True},
    # Without a C++ compiler the same functions are traced and run by tests/unit/learner/test_cpu_layers.py alone.
    **({"compiled": {"compile": True}} if shutil.which("g++") else {}),
}
# saved on (ranks, layout), continued on (ranks, layout)
RESHARDINGS = {
    "same layout": ((1, {}), (1, {})),
    "tp2ep2 to 1": ((2, {"tensor": 2, "expert": 2}), (1, {})),
    "1 to pp2": ((1, {}), (2, {"pipeline": 2})),
    "ep2 to dp2": ((2, {"expert": 2}), (2, {})),
}


def learner(parallel: dict | None = None, **overrides) -> dict:
    return {"optimizer": {"lr": 1e-4, "eps": EPS}, "parallel": parallel or {}, **overrides}


def train(section: dict, num_steps: int = STEPS, minibatches: int = 1) -> tuple[str, dict]:
    return "train_on_stored_rollouts", {"num_steps": num_steps, "minibatches": minibatches, "learner": section}


def start(world_size: int, jobs: dict) -> list[dict]:
    return run_ranks(
        "tests.parallel.jobs",
        "run_jobs",
        world_size,
        module="tests.parallel.programs.learner",
        jobs=jobs,
        timeout_s=500,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, list[dict]]:
    """Result of every job on every rank: ``runs[job][rank]``."""
    jobs: dict[int, dict[str, tuple[str, dict]]] = {
        1: {"one": train(learner()), "one, minibatches": train(learner(), 2, 4)},
        2: {"ep2, minibatches": train(learner({"expert": 2}), 2, 4)},
        4: {"round trip": train(learner(LAYOUTS["tp2ep2pp2"][1]), 0)},
    }
    jobs[1] |= {name: train(learner(**overrides)) for name, overrides in VARIANTS.items()}
    for name, (ranks, parallel) in LAYOUTS.items():
        jobs[ranks][name] = train(learner(parallel))
    jobs[4]["fused head, tp2ep2pp2"] = train(learner(LAYOUTS["tp2ep2pp2"][1], fused_head=True))
    for name, ((ranks, parallel), _) in RESHARDINGS.items():
        folder = str(tmp_path_factory.mktemp("checkpoint"))
        jobs[ranks][f"save, {name}"] = ("save_after", {"folder": folder, "num_steps": 2, "learner": learner(parallel)})
    results: dict[str, list[dict]] = {}
    for n in jobs:
        ranks = start(n, jobs[n])
        results |= {name: [rank[name] for rank in ranks] for name in jobs[n]}
    loads: dict[int, dict[str, tuple[str, dict]]] = {1: {}, 2: {}}
    for name, (_, (ranks, parallel)) in RESHARDINGS.items():
        path = results[f"save, {name}"][0]["path"]
        loads[ranks][f"load, {name}"] = ("load_and_continue", {"path": path, "learner": learner(parallel)})
    return results | {
        name: [rank[name] for rank in ranks] for n in loads for ranks in [start(n, loads[n])] for name in loads[n]
    }


def assert_same_run(result: dict, reference: dict, tolerance: float = 1e-5) -> None:
    for step, (got, want) in enumerate(zip(result["metrics"], reference["metrics"], strict=True)):
        # The noise scale takes a layout with parts: see test_learner_noise.py.
        assert {n for n in got if "noise/" not in n} == {n for n in want if "noise/" not in n}
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "mismatch/rho_std", "actor/ppo_kl"):
            assert got[name] == pytest.approx(want[name], rel=tolerance, abs=tolerance), (step, name)
    np.testing.assert_allclose(np.concatenate(result["before"]), np.concatenate(reference["before"]), 1e-5, 1e-5)
    np.testing.assert_allclose(np.concatenate(result["after"]), np.concatenate(reference["after"]), 1e-5, 1e-5)
    assert largest_difference(result["weights"], reference["weights"]) < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_one_rank(runs, layout):
    first, *others = runs[layout]
    assert_same_run(first, runs["one"][0])
    for other in others:  # every rank reports the same and exports the same
        assert other["metrics"] == first["metrics"]
        assert largest_difference(other["weights"], first["weights"]) == 0.0


def test_several_minibatches_on_two_ranks(runs):
    one = runs["one, minibatches"][0]
    assert_same_run(runs["ep2, minibatches"][0], one)
    assert abs(one["metrics"][0]["actor/ppo_kl"]) > 1e-6, "old log-probs were not used"


@pytest.mark.parametrize("variant", VARIANTS)
def test_microbatches_recompute_and_compilation_change_nothing(runs, variant):
    assert_same_run(runs[variant][0], runs["one"][0], tolerance=1e-5)


def test_fused_head_on_a_mixed_layout(runs):
    assert_same_run(runs["fused head, tp2ep2pp2"][0], runs["one"][0])


def test_first_step_equals_hugging_face(runs):
    """Log-probs, loss and gradient norm of the first step against transformers' Qwen3-MoE and autograd."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager")

    def logprobs(s) -> torch.Tensor:
        logits = model(torch.from_numpy(s.tokens)[None]).logits[0, s.prompt_length - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.from_numpy(s.tokens[s.prompt_length :, None])).squeeze(1)

    sequences = stored_rollouts(0).sequences
    terms = []
    for s in sequences:
        chosen = logprobs(s)
        # One update per batch: r = exp(log pi - sg(log pi)) is 1, its gradient that of log pi.
        terms.append(-(chosen - chosen.detach()).exp() * s.advantage * torch.from_numpy(s.loss_mask))
    loss = torch.cat(terms).sum() / sum(int(s.loss_mask.sum()) for s in sequences)
    loss.backward()
    norm = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None]).norm().item()
    one = runs["one"][0]
    assert one["metrics"][0]["actor/pg_loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    assert one["metrics"][0]["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
    with torch.no_grad():
        expected = torch.cat([logprobs(s) for s in stored_rollouts(100).sequences])
    np.testing.assert_allclose(np.concatenate(one["before"]), expected.numpy(), rtol=1e-5, atol=1e-5)


def test_weights_survive_the_round_trip(runs):
    """What is exported without an update is the checkpoint's own tensors, bit for bit, on a mixed layout."""
    from safetensors.torch import load_file

    original = {name: tensor.float() for name, tensor in load_file(MODEL / "model.safetensors").items()}
    assert all(largest_difference(rank["weights"], original) == 0.0 for rank in runs["round trip"])


@pytest.mark.parametrize("resharding", RESHARDINGS)
def test_checkpoint_continues_the_run(runs, resharding):
    tolerance = 0.0 if resharding == "same layout" else 1e-5
    saved, loaded = runs[f"save, {resharding}"][0], runs[f"load, {resharding}"][0]
    assert loaded["num_updates"] == saved["num_updates"] == 4
    np.testing.assert_allclose(loaded["logprobs"], saved["logprobs"], rtol=tolerance, atol=tolerance)
    assert largest_difference(loaded["weights"], saved["weights"]) <= tolerance / 10
    assert largest_difference(loaded["weights"], runs["round trip"][0]["weights"]) > 1e-4, "hardly moved: no proof"
    for got, want in zip(loaded["metrics"], saved["metrics"], strict=True):
        assert got["actor/grad_norm"] == pytest.approx(want["actor/grad_norm"], rel=tolerance, abs=0)
