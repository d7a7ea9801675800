"""Exact generation on GPUs by arithmetic: closed forms, what binds when, and deadlines."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch

from megatron_rl.config import load_recipe
from megatron_rl.exact import invariant
from megatron_rl.exact.decode import CUDA_ROWS, CUDA_STEPS
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
    step = model.exact_step(work(), 128, 2304, 5120)
    memory = 0.47 * BANDWIDTH  # of the dense products; those of experts have 0.37

    def product(inner, columns):
        used = min(1, 2 * -(-columns // 64) / 132)
        return max(2 * inner * columns / memory, 2 * 128 * inner * columns / (0.3 * RATE)) / used

    layer = product(2048, 2560) + product(2048, 2048) + product(2048, 128)
    assert step.dense == rounded(48 * layer + product(2048, 151936 // 2), scale=48 * layer)
    seen = 1 - (1 - 8 / 128) ** 512
    weights = 16 * seen * 3 * 2048 * 768
    rows = 64  # a tile of each expert
    experts = max(2 * weights / (0.37 * BANDWIDTH), 2 * rows * weights / (0.11 * RATE))
    assert step.experts == rounded(48 * experts, scale=step.experts)
    traffic = (
        128 * 2 * 2304 * 2 * 128 * 2 + 128 * 5 * 16 * 128 * 2 * 4
    )  # keys and values; five splits' sums of 16 heads
    assert traffic / (0.5 * BANDWIDTH) > 4 * 128 * 2 * 2304 * 64 * 128 / (0.5 * RATE), "traffic binds"
    assert step.attention == rounded(48 * traffic / (0.5 * BANDWIDTH), scale=step.attention)
    assert step.kernels == rounded(1.5e-3 / 16 + 48 * (29 + 3 + 5) * 2.5e-6, scale=step.kernels)
    row, link, latency = 128 * 2048 * 2, 0.7 * 450e9, 12e-6
    of_layer = 4 * latency + row * (1 + 0.5 + 7 * (1 + 8) / 2) / link  # sums, rows again; to seven ranks and back
    rest = 3 * latency + row * 1.5 / link + 128 * 151936 / link  # embedding, before the logits, logits
    assert step.exchanges == rounded(48 * of_layer + rest, scale=step.exchanges)


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


def test_steps_without_graphs_are_launched_one_by_one():
    assert model.exact_step(work("rollout.enforce_eager=true"), 128, 2304, 5120).kernels == hardware.EXACT_EAGER_S
    of_module = model.exact_step(work("learner.parallel.expert_tensor=2"), 128, 2304, 5120)
    assert of_module.kernels == hardware.EXACT_EAGER_S, "a layout that `exact.step` does not take"
    adapted = model.exact_step(work("learner.lora={rank: 8}"), 128, 2304, 5120)
    assert adapted.kernels == hardware.EXACT_EAGER_S


def test_a_lone_sequence_has_a_processor_for_each_split():
    w = work()
    slow = replace(w, gpu=replace(w.gpu, bandwidth=BANDWIDTH / 100))
    traffic = 2 * 10240 * 2 * 128 * 2 + 20 * 16 * 128 * 2 * 4
    expected = 48 * traffic / (0.5 * BANDWIDTH / 100) * 132 / (2 * 20)
    assert model.exact_step(slow, 1, 10240, 10240).attention == rounded(expected, scale=expected)
    chain = 48 * (16 + 20) * 1e-6
    assert model.exact_step(w, 1, 10240, 10240).attention == rounded(chain, scale=chain), "blocks, and splits to join"


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


def test_what_is_assumed_is_what_the_code_does():
    assert (model.TILE, model.KEY_BLOCK, hardware.EXACT_STEPS) == (CUDA_ROWS, invariant.KEY_BLOCK, CUDA_STEPS)
    kernels = REPOSITORY / "megatron_rl" / "exact" / "kernels"
    products = (kernels / "gemm.py").read_text()
    assert f"\nSMALL = Tile({model.TILE}, {model.TILE}, " in products
    sizes = dict(re.findall(r"^(\w+) = (\d+)$", (kernels / "attention.py").read_text(), re.MULTILINE))
    assert sizes["ROWS"] == str(model.TILE)
    assert (sizes["KEY_BLOCK"], sizes["SPLIT"]) == (str(model.KEY_BLOCK), str(model.SPLIT))


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
