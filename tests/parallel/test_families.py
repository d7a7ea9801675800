"""Families beside Qwen3-MoE with experts on several ranks: log-probs, gradients, weights and conversion of one rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.checkpoint import conversion
from megatron_rl.model.architecture import read_architecture
from megatron_rl.model.names import extra_states, stored_tensors
from tests.parallel.pool import Jobs
from tests.parallel.programs.learner import largest_difference
from tests.support.families import save_family
from tests.support.plain_training import float32_limits, run
from tests.support.slow import slow_but

FAMILIES = ["qwen2_moe"]
LAYOUTS = {
    "tp2ep2": {"tensor": 2, "expert": 2},
    "pp3": {"pipeline": 3},
    "recompute": {},
}
STEPS, EPS = 2, 1e-3  # of Adam: see test_learner_layouts.py


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    return {family: save_family(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@pytest.fixture(scope="module")
def runs(models, tmp_path_factory):
    jobs: dict[int, dict] = {1: {}, 2: {}, 3: {}}
    for family, path in models.items():

        def train(parallel: dict, path: Path = path, **learner) -> tuple[str, dict]:
            section = {"optimizer": {"lr": 1e-4, "eps": EPS}, "parallel": parallel, **learner}
            return "train_on_stored_rollouts", {"num_steps": STEPS, "model": {"path": str(path)}, "learner": section}

        folder = str(tmp_path_factory.mktemp("checkpoint"))
        jobs[1][f"{family} one"] = train({})
        jobs[1][f"{family} recompute"] = train({}, recompute="selective")
        jobs[2][f"{family} tp2ep2"] = train(LAYOUTS["tp2ep2"])
        jobs[3][f"{family} pp3"] = train(LAYOUTS["pp3"])
        call = train(LAYOUTS["tp2ep2"])[1] | {"folder": folder, "num_steps": 1}
        jobs[2][f"{family} saved"] = ("save_after", call)
    with Jobs(jobs, module="tests.parallel.programs.learner") as found:
        yield found


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_first_step_equals_hugging_face(family, runs, models):
    one, plain = runs[f"{family} one"][0], run(torch.float64, 1, eps=EPS, path=str(models[family]))
    limits = float32_limits(STEPS, eps=EPS, path=str(models[family]))
    assert np.abs(np.concatenate(one["before"]) - plain.before).max() <= limits.logprobs
    norm = np.linalg.norm(plain.gradients[0])
    assert abs(one["metrics"][0]["actor/grad_norm"] - norm) <= limits.of_metric("actor/grad_norm", 0)


@pytest.mark.parametrize("layout", slow_but(["tp2ep2"], LAYOUTS))
@pytest.mark.parametrize("family", FAMILIES)
def test_layout_equals_one_rank(family, layout, runs, models):
    one, others = runs[f"{family} one"][0], runs[f"{family} {layout}"]
    limits = float32_limits(STEPS, eps=EPS, path=str(models[family]))
    for result in others:
        for when in ("before", "after"):
            assert np.abs(np.concatenate(result[when]) - np.concatenate(one[when])).max() <= limits.logprobs
        for step, (got, want) in enumerate(zip(result["metrics"], one["metrics"], strict=True)):
            assert abs(got["actor/grad_norm"] - want["actor/grad_norm"]) <= limits.of_metric("actor/grad_norm", step)
        assert largest_difference(result["weights"], one["weights"]) <= limits.weights


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_two_ranks_becomes_the_weights_that_were_trained(family, runs, models, tmp_path):
    saved = Path(runs[f"{family} saved"][0]["path"])
    found = conversion.MegatronFolder(saved).reader.read_metadata().state_dict_metadata
    a = read_architecture(models[family])
    assert {entry.key for entry in stored_tensors(a)} | set(extra_states(a)) == {
        key for key in found if not key.startswith("optimizer.")
    }
    conversion.to_hf(saved, tmp_path / "hf", models[family])
    conversion.to_megatron(tmp_path / "hf", tmp_path / "megatron")
    conversion.to_hf(tmp_path / "megatron", tmp_path / "again", models[family])
    first, second = (tensors(tmp_path / name) for name in ("hf", "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    start = tensors(models[family])
    moved = [name for name in start if not torch.equal(start[name], first[name])]
    assert any("shared_expert" in name for name in moved), moved
