"""Exact generation on GPUs by arithmetic: closed forms, what binds when, and deadlines."""

from __future__ import annotations

import json
import re

import pytest
import torch

from megatron_rl.config import load_recipe
from megatron_rl.exact.doses import make_dose
from megatron_rl.instruments.plan import GPUS, hardware, make_plan, make_workload
from megatron_rl.instruments.plan import generation as model
from megatron_rl.instruments.plan.memory import exact_cache, memory_plan
from megatron_rl.instruments.plan.workload import Workload
from megatron_rl.model.architecture import shape_of
from tests.support.reach import REPOSITORY
from tests.support.rounding import rounded
from tools.dev import check_recipes

RECIPE = REPOSITORY / "recipes/exact/grpo-qwen3-30b-a3b-4n8g-tp2ep8-exact.yaml"
ARMS = sorted((REPOSITORY / "recipes" / "exact").glob("*.yaml"))
BANDWIDTH, RATE = 3.35e12, 989e12


def work(*settings: str) -> Workload:
    recipe = load_recipe(RECIPE, list(settings))
    return make_workload(recipe, shape_of(recipe.model.path)[0], GPUS["h100-80"])


def test_a_step_of_128_sequences_by_hand():
    """Qwen3-30B-A3B, TP2 · EP8: 128 rows are two tiles of 64, and four replicas share their experts."""
    cached, dense = 2304 * 2 * 48 * 2 * 128 * 2, (48 * 2048 * (2560 + 2048) * 2 + 48 * 2048 * 128 + 151936 * 2048) / 2
    seen = 48 * 16 * (1 - (1 - 8 / 128) ** 512) * 3 * 2048 * 768
    products = max(2 * dense / (0.47 * BANDWIDTH), 2 * 128 * dense / (0.3 * RATE))
    experts = max(2 * seen / (0.37 * BANDWIDTH), 2 * 64 * seen / (0.11 * RATE))  # a tile of each expert
    row, link = 128 * 2048 * 2, 0.7 * 450e9
    exchanges = 48 * (4 * 12e-6 + row * (2 + 7 * (1 + 8) / 2) / link)  # sums; to seven ranks of experts and back
    kernels = 48 * (29 + 3 + 5) * 2.5e-6
    expected = products + experts + 128 * cached / (0.5 * BANDWIDTH) + exchanges + kernels
    assert abs(model.exact_step(work(), 128, cached) / expected - 1) < 1e-3, "norms are left out here"
    slower = model.exact_step(work("rollout.enforce_eager=true"), 128, cached) - model.exact_step(work(), 128, cached)
    assert slower == rounded(hardware.EXACT_EAGER_S - kernels, scale=expected)
    for setting in ("learner.lora={rank: 8}", "learner.parallel.expert_tensor=2"):  # `exact.step` does not take them
        assert model._launches(work(setting)) == hardware.EXACT_EAGER_S


def test_shares_are_those_that_an_h200_reached():
    """By the figures of docs/gpu.md; the H200's rates are those of its data sheet."""
    h200, head, matrices = GPUS["h200-141"], 2048 * 151936, 128 * 3 * 2048 * 768
    seen = 1 - (1 - 1 / 128) ** 512  # of the experts, by 512 rows
    few = {"dense": 2 * head / 273e-6, "experts": 2 * matrices * seen / (437e-6 + 228e-6)}
    assert {kind: int(100 * rate / h200.bandwidth) / 100 for kind, rate in few.items()} == hardware.EXACT_BANDWIDTH
    many = {2: {"dense": 295e12, "experts": 107e12}, 4: {"dense": 14e12, "experts": 13e12}}
    assert {
        size: {kind: round(rate / h200.flops(dtype), 2) for kind, rate in many[size].items()}
        for size, dtype in ((2, "bf16"), (4, "fp32"))
    } == hardware.EXACT_FLOPS


def test_the_cache_is_what_the_share_of_a_gpu_leaves():
    at_rest = memory_plan(work()).learner.at_rest(work().recipe.learner.offload)
    token = 2 * 48 * 2 * 128 * 2
    assert exact_cache(work()).token_bytes == token
    left = 0.75 * 79.1 * 2**30 - at_rest - model.runtime_bytes(work())
    wanted = 128 * (2048 + 8192) * token
    assert exact_cache(work()).cache == rounded(min(left, wanted), scale=left)
    assert exact_cache(work("rollout.max_num_seqs=4")).cache == 4 * 10240 * token
    assert exact_cache(work("rollout.kv_cache_gib=3")).cache == 3 * 2**30
    assert dict(memory_plan(work("rollout.kv_cache_gib=3")).phases[1].items)["key/value cache"] == 3 * 2**30


def dosed(**noise: object) -> Workload:
    return work(f"exact.noise={json.dumps(noise)}")


@pytest.mark.parametrize(
    ("noise", "twice"),
    [
        ({"kind": "logits", "std": 1.0}, 0),
        ({"kind": "weights", "bits": "int4"}, 1),
        ({"kind": "stale", "updates": 8}, 1),
    ],
)
def test_weights_that_are_not_the_learner_s_lie_beside_its_own(noise, twice):
    plain, with_noise = memory_plan(work()), memory_plan(dosed(**noise))
    items = dict(with_noise.phases[1].items)
    assert items.get("its own weights, while others sample", 0) == twice * plain.learner.weights
    room = "rollout.gpu_memory_utilization=0.5"  # where the cache is what is left, and not all that it can use
    recipe = load_recipe(RECIPE, [room, f"exact.noise={json.dumps(noise)}"])
    less = make_workload(recipe, shape_of(recipe.model.path)[0], GPUS["h100-80"])
    left = exact_cache(work(room)).cache - exact_cache(less).cache
    assert left == rounded(twice * plain.learner.weights, scale=50 * 2**30)


@pytest.mark.parametrize("updates", [1, 4, 5, 8])
def test_a_dose_of_old_weights_keeps_as_many_as_planned(updates):
    """A step of four updates hands the weights over once; what is kept is counted in the code that keeps it."""
    plain, weights = make_plan(work()), memory_plan(work()).learner.weights
    dose = make_dose(work(f"exact.noise={{kind: stale, updates: {updates}}}").recipe.exact, seed=0)
    for step in range(9):
        dose.new_weights(torch.nn.Linear(1, 1), version=4 * step)
    plan = make_plan(dosed(kind="stale", updates=updates))
    assert dict(plan.host.items)["weights of earlier updates"] == 8 * len(dose._kept) * weights
    assert plan.time.offload - plain.time.offload == rounded(
        2 * weights / (hardware.HOST_LINK * GPUS["h100-80"].host_link), scale=plan.time.offload
    )


def test_too_small_a_cache_does_not_fit():
    """A cache that does not hold the longest sequence: train would end with the same key."""
    problems = make_plan(work("rollout.kv_cache_gib=0.25")).problems
    assert any("rollout.kv_cache_gib" in problem for problem in problems), problems


def test_fewer_rows_at_a_time_take_longer():
    times = [make_plan(work(f"rollout.max_num_seqs={n}")).time.generate for n in (4, 16, 64)]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == 3


@pytest.mark.parametrize("path", [p for p in ARMS if p.stem != "base"], ids=lambda path: path.stem)
def test_every_arm_ends_within_its_deadline(path):
    recipe = load_recipe(path)
    gpu = re.search(r"# Plan: .*?(h100-80|a100-80)", path.read_text())[1]
    plan = make_plan(make_workload(recipe, shape_of(recipe.model.path)[0], GPUS[gpu]))
    assert plan.time.generate < recipe.rollout.deadline_s


def test_an_arm_that_is_too_slow_fails_the_check(tmp_path):
    text = RECIPE.read_text().replace("../base/", f"{REPOSITORY}/recipes/base/")
    text = text.replace(" base.yaml", f" {RECIPE.parent}/base.yaml")
    copy = tmp_path / RECIPE.name
    copy.write_text(text)
    assert "checked" in check_recipes.check(copy)
    copy.write_text(text.replace("engine: exact,", "engine: exact, deadline_s: 100,"))
    with pytest.raises(check_recipes.InputError, match=r"s a round, longer than rollout.deadline_s \(100\)"):
        check_recipes.check(copy)
