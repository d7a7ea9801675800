"""What `check` refuses, or says: keys that cannot act, and models that a recipe cannot train."""

from __future__ import annotations

import re

import pytest

from megatron_rl.config import load_recipe
from megatron_rl.errors import InputError
from megatron_rl.run.prepare import check_recipe
from tests.support.routes import save_random_model
from tests.support.tiny import REPOSITORY, tiny_recipe


def test_check_names_what_cannot_act():
    """This arm's corrections have nothing to correct, as its paper wants; the same arm on vLLM has."""
    name = "recipes/exact/grpo-qwen3-30b-a3b-4n8g-tp2ep8-{}-corrected.yaml"
    reports = [
        dict(check_recipe(load_recipe(REPOSITORY / name.format(arm)), offline=True).report)
        for arm in ("exact", "recompute")
    ]
    assert re.fullmatch(
        "objective.correction.0: tis: .* every ratio is 1; objective.correction.1: reject: .* every ratio is 1",
        reports[0]["no effect"],
    )
    assert "no effect" not in reports[1]


def test_dense_models_are_refused_before_anything_starts(tmp_path):
    dense = save_random_model(tmp_path, family="qwen3")
    with pytest.raises(InputError, match=r"routing.replay: r3, but the model \(qwen3\) has no experts"):
        check_recipe(tiny_recipe(model={"path": str(dense)}, routing={"replay": "r3"}))


FP8 = ["rollout.quantization={weights: fp8, block: [128, 128]}", "rollout.tensor_parallel=4"]


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        (FP8, "does not divide"),
        (["rollout.quantization={weights: int4}"], "int4 on CUDA"),
        (["rollout.quantization={weights: fp8}", "rollout.dtype=fp32", "learner.dtype=fp32"], "rollout.dtype: fp32"),
    ],
)
def test_rules_of_cuda_are_told_where_there_is_no_gpu(changes, rule, monkeypatch):
    """A login node has none; the job would end after its engines have started."""
    path = "recipes/router_replay/grpo-qwen3-30b-a3b-4n8g-tp4ep8-r3.yaml"
    recipe = load_recipe(REPOSITORY / path, changes)
    monkeypatch.setattr("megatron_rl.run.prepare.default_device", lambda: "cpu")
    told = dict(check_recipe(recipe, offline=True).report)["on CUDA"]
    assert told.startswith("this recipe cannot run: ")
    assert rule in told
    monkeypatch.setattr("megatron_rl.run.prepare.default_device", lambda: "cuda")
    with pytest.raises(InputError, match=rule):
        check_recipe(recipe, offline=True)
