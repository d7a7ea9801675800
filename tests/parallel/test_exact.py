"""Exact mode: the probability of every sampled token is, bit for bit, the one that the update computes."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.gloo import run_ranks
from tests.parallel.programs.exact import prompts
from tests.support.rounding import rounded

MODULE = "tests.parallel.programs.exact"
BOTH = {"tensor": 2, "expert": 2}
SIZES = {1: [1, 3, 64], 2: [1, 3, 24]}  # 1: with two replicas one has nothing to generate
DOSES = {
    "logits 0.001": {"kind": "logits", "std": 1e-3},
    "logits 0.1": {"kind": "logits", "std": 1e-1},
    "frozen": {"kind": "frozen", "std": 1e-1, "context": 3},
    "router": {"kind": "router", "std": 0.5},
    "hidden": {"kind": "hidden", "std": 0.02},
    "fp8": {"kind": "weights", "bits": "fp8", "block": [32, 32]},
    "int4": {"kind": "weights", "bits": "int4"},
    "stale": {"kind": "stale", "updates": 2},
}
IN_LAYOUTS = ("router", "hidden", "int4", "stale")
LAYOUTS = {1: [({}, "fp32"), ({}, "bf16")], 2: [(BOTH, "fp32"), (BOTH, "bf16"), ({"expert": 2}, "bf16")]}

DTYPES = ("fp32", "bf16", "fp16")
STEPS = [1, 2, 7, 16, 33, 64]  # responses of each update


def jobs_for(world_size: int) -> dict:
    jobs, sizes = {}, SIZES[world_size]
    for parallel, dtype in LAYOUTS[world_size]:
        name = f"{parallel} {dtype}"
        jobs[f"bits {name}"] = ("bits_over_batches", {"dtype": dtype, "parallel": parallel, "sizes": sizes})
        jobs[f"gate {name}"] = ("update_with_gate", {"dtype": dtype, "parallel": parallel, "minibatches": 2})
    jobs["broken"] = ("broken_layer", {"parallel": LAYOUTS[world_size][0][0], "layer": 2})
    if world_size == 1:
        jobs["bits fp16"] = ("bits_over_batches", {"dtype": "fp16", "parallel": {}, "sizes": [1, 16]})
        jobs["gate one update"] = ("update_with_gate", {"dtype": "bf16", "parallel": {}, "minibatches": 1})
        jobs |= {f"sizes {dtype}": ("gate_over_sizes", {"dtype": dtype, "sizes": STEPS}) for dtype in DTYPES}
        jobs["broken step"] = ("broken_step", {"layer": 2})
        jobs["schedules"] = ("schedules", {"dtype": "bf16"})
        jobs["changed"] = ("changed_weights", {})
        jobs["doses"] = ("doses", {"kinds": DOSES})
    else:
        jobs["doses"] = ("doses", {"kinds": {name: DOSES[name] for name in IN_LAYOUTS}, "parallel": BOTH})
    return jobs


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def results(request):
    world_size = request.param
    ranks = run_ranks(
        "tests.parallel.jobs",
        "run_jobs",
        world_size,
        init_process_group=False,
        timeout_s=500,
        module=MODULE,
        jobs=jobs_for(world_size),
    )
    for rank in ranks[1:]:
        for name in ranks[0]:
            assert name.startswith("broken") or rank[name] == ranks[0][name], name
    return world_size, ranks[0]


def test_no_token_differs_in_any_batch(results):
    _, found = results
    for name in [name for name in found if name.startswith("bits")]:
        assert max(found[name]["lengths"]) > 2 * min(found[name]["lengths"]), "lengths are mixed"
        assert set(found[name]["differing"].values()) == {0}, (name, found[name]["differing"])


def test_the_gate_is_zero_in_updates(results):
    _, found = results
    for name in [name for name in found if name.startswith("gate")]:
        assert found[name] == [0.0] * 6, name


def test_the_gate_names_what_differs(results):
    _, found = results
    for name in [name for name in found if name.startswith("broken")]:
        message = found[name]
        assert message.startswith("exact mode, step 0: sequence 'p:"), message
        assert "response token" in message
        assert "output of the layer 2" in message
        assert "MOVED" not in message


@pytest.mark.parametrize("results", [1], indirect=True)
def test_the_gate_names_what_a_step_computes_otherwise(results):
    _, found = results
    first_step = len(prompts(1)[0].tokens)
    assert f"token {first_step} of the sequence, output of the layer 2" in found["broken step"]


@pytest.mark.parametrize("results", [1], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_is_zero_for_any_number_of_responses(results, dtype):
    _, found = results
    assert found[f"sizes {dtype}"] == [0.0] * len(STEPS)


@pytest.mark.parametrize("results", [1], indirect=True)
def test_every_schedule_gives_the_same_responses(results):
    _, found = results
    plain, *others = found["schedules"]["found"].items()
    assert len(others) == 6
    for name, responses in others:
        assert responses == plain[1], name
    assert found["schedules"]["preempted"] > 0
    assert max(found["schedules"]["lengths"]) == 100 > min(found["schedules"]["lengths"])


@pytest.mark.parametrize("results", [1], indirect=True)
def test_weights_that_changed_are_told_apart(results):
    _, found = results
    assert "the weights changed between generation and update" in found["changed"]


def test_doses_stand_apart_from_what_is_computed_without_them(results):
    _, found = results
    for name, dose in found["doses"].items():
        assert dose["gate"] == 0.0, name
        assert dose["same in other batches"], name
        assert dose["same weights"], name
        assert dose["bits of mu"] is (True if name in ("fp8", "int4", "stale") else None), name
        assert dose["std"] > 0, name
        for of_metrics, of_stats in zip(dose["metrics"], dose["stats"], strict=True):
            assert of_metrics == rounded(of_stats, scale=of_stats, dtype=torch.float32), name
    assert found["doses"].get("fp8", {"std": 0})["std"] < found["doses"]["int4"]["std"]


@pytest.mark.parametrize("results", [1], indirect=True)
def test_noise_on_logits_has_the_size_that_was_asked_for(results):
    _, found = results
    for std in (1e-3, 1e-1):
        dose = found["doses"][f"logits {std:g}"]
        # log mu moves by the token's own noise minus the policy's mean of it: between 0 and about 1.4 std
        assert 0.2 * std < dose["std"] < 1.5 * std
        assert dose["rho_std"] > 0.2 * std
