"""Exact mode: the probability of every sampled token is, bit for bit, the one that the update computes."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.parallel.pool import Jobs
from tests.parallel.programs.exact import prompts
from tests.support.rounding import rounded
from tests.support.slow import slow_but
from tests.support.tiny import MODEL
from tools.dev.exact_runs import with_four_key_heads

MODULE = "tests.parallel.programs.exact"
BOTH = {"tensor": 2, "expert": 2}
SIZES = {1: [1, 3, 33], 2: [1, 3, 24], 4: [1, 6]}  # 1: with two replicas one has nothing to generate
DOSES = {
    "logits 0.001": {"kind": "logits", "std": 1e-3},
    "logits 0.1": {"kind": "logits", "std": 1e-1},
    "frozen": {"kind": "frozen", "std": 1e-1, "context": 3},
    "router": {"kind": "router", "std": 0.5},
    "hidden": {"kind": "hidden", "std": 0.02},
    "one operator": {"kind": "hidden", "std": 0.05, "layers": [1], "operator": "o_proj"},
    "fp8": {"kind": "weights", "bits": "fp8", "block": [32, 32]},
    "int4": {"kind": "weights", "bits": "int4"},
    "stale": {"kind": "stale", "updates": 2},
}
IN_LAYOUTS = ("router", "hidden", "one operator", "int4", "stale")
STAGES = {"pipeline": 2}
ADAPTERS = {"lora": {"rank": 4, "alpha": 64}, "optimizer": {"lr": 1e-2}}
WIDE = {"tensor": 4, "expert": 4}
EXPERTS_CUT = {"tensor": 4, "expert": 2, "expert_tensor": 2}
# Each dtype on every number of ranks, and each layout; which dtype a layout has is arbitrary: none knows the other.
LAYOUTS = {
    1: [({}, "fp32"), ({}, "bf16")],
    2: [(BOTH, "fp32"), (BOTH, "bf16"), ({"expert": 2}, "bf16"), (STAGES, "fp16")],
    4: [(WIDE, "fp16"), (EXPERTS_CUT, "bf16"), ({"tensor": 2, "pipeline": 2}, "fp32")],
}
CUT = {2: [BOTH, {"expert": 2}], 4: [{"tensor": 2, "expert": 4}]}
"""Layouts whose ranks exchange rows in a step: heads, experts, and experts of two replicas."""
TWO_PAGES = 40  # tokens of a response there, where ranks share cores and each of them waits for all others
SHORT = 10  # of most responses on four ranks, for the same reason

DTYPES = ("fp32", "bf16", "fp16")
STEPS = [1, 2, 7, 16, 33, 64]  # responses of each update
HOLDERS = ({"expert": 2}, {"tensor": 2, "expert": 2}, {"pipeline": 2})  # one has two replicas


def jobs_for(world_size: int, model: str = str(MODEL)) -> dict:
    jobs, sizes, sections = {}, SIZES[world_size], {"model": {"path": model}}
    if world_size == 4:
        sections["rollout"] = {"max_response_length": SHORT}
    for parallel, dtype in LAYOUTS[world_size]:
        name = f"{parallel} {dtype}"
        jobs[f"bits {name}"] = ("bits_over_batches", {"dtype": dtype, "parallel": parallel, "sizes": sizes} | sections)
    if world_size < 4:
        adapted = {"dtype": "bf16", "parallel": LAYOUTS[world_size][0][0], "learner": ADAPTERS} | sections
        jobs["gate adapters"] = ("update_with_gate", {"minibatches": 1} | adapted)
    jobs["broken"] = ("broken_layer", {"parallel": LAYOUTS[world_size][-1][0], "layer": 2} | sections)
    short = {"dtype": "bf16", "longest": TWO_PAGES}
    for parallel in CUT.get(world_size, ()):
        given = short | {"parallel": parallel, "names": ["five rows", "module", "graphs"]}
        jobs[f"schedules {parallel}"] = ("schedules", given | sections)
    if world_size == 2:  # twenty rows on each of two replicas, which end one after the other
        given = short | {"parallel": {"expert": 2}, "names": ["module", "graphs"], "number": 20}
        jobs["uneven rows"] = ("schedules", given)
    if world_size > 1:
        jobs["sums"] = ("sums_in_order", {"world_size": world_size})
    if world_size == 1:
        jobs["bits fp16"] = ("bits_over_batches", {"dtype": "fp16", "parallel": {}, "sizes": [1, 16]})
        jobs["gate one update"] = ("update_with_gate", {"dtype": "bf16", "parallel": {}, "minibatches": 1})
        jobs |= {f"sizes {dtype}": ("gate_over_sizes", {"dtype": dtype, "sizes": STEPS}) for dtype in DTYPES}
        jobs["broken step"] = ("broken_step", {"layer": 2})
        jobs["schedules"] = ("schedules", {"dtype": "bf16"})
        jobs["changed"] = ("changed_weights", {})
        jobs["doses"] = ("doses", {"kinds": DOSES})
    elif world_size == 2:
        jobs["doses"] = ("doses", {"kinds": {name: DOSES[name] for name in IN_LAYOUTS}, "parallel": BOTH})
        jobs["broken, two replicas"] = ("broken_layer", {"parallel": {"expert": 2}, "layer": 2})
        jobs |= {f"held {parallel}": ("who_holds_what", {"parallel": parallel}) for parallel in HOLDERS}
    return jobs


@pytest.fixture(scope="module")
def four_key_heads(tmp_path_factory) -> str:
    """The tiny model, the same function: four ranks can share its key heads."""
    return str(with_four_key_heads(MODEL, tmp_path_factory.mktemp("model") / "model"))


@dataclass
class Agreed:
    """Results of jobs by name, which are the same on every rank."""

    jobs: Jobs

    def __getitem__(self, name: str) -> Any:
        first, *others = self.jobs[name]
        assert name.startswith("broken") or all(other == first for other in others), name
        return first


@pytest.fixture(scope="module", params=[1, 2, 4], ids=["1 rank", "2 ranks", "4 ranks"])
def results(request, four_key_heads):
    world_size = request.param
    jobs = jobs_for(world_size, four_key_heads if world_size == 4 else str(MODEL))
    with Jobs({world_size: jobs}, module=MODULE, init_process_group=False) as results:
        yield world_size, Agreed(results)


def jobs_named(start: str) -> list[Any]:
    """(ranks, job) of every job whose name begins so; `make test` runs the first one of one rank and of two."""
    jobs = [(size, name) for size in SIZES for name in jobs_for(size) if name.startswith(start)]
    quick = [next(job for job in jobs if job[0] == size) for size in (1, 2)]
    return slow_but(quick, jobs)


@pytest.mark.parametrize(("results", "name"), jobs_named("bits"), indirect=["results"])
def test_no_token_differs_in_any_batch(results, name):
    _, of_rank = results
    assert max(of_rank[name]["lengths"]) > 2 * min(of_rank[name]["lengths"]), "lengths are mixed"
    assert set(of_rank[name]["differing"].values()) == {0}, of_rank[name]["differing"]


@pytest.mark.parametrize(("results", "name"), jobs_named("gate"), indirect=["results"])
def test_the_gate_is_zero_in_updates(results, name):
    _, of_rank = results
    assert of_rank[name] == [0.0] * 6


@pytest.mark.parametrize(("results", "name"), jobs_named("broken"), indirect=["results"])
def test_the_gate_names_what_differs(results, name):
    _, of_rank = results
    message = of_rank[name]
    assert message.startswith("exact mode, step 0: sequence 'p:"), message
    assert "response token" in message
    assert "output of the layer 2" in message
    assert "MOVED" not in message


@pytest.mark.parametrize("results", slow_but([2], [2, 4]), indirect=True)
def test_ranks_are_added_in_their_order(results):
    _, of_rank = results
    assert of_rank["sums"]
    assert set(of_rank["sums"].values()) == {True}, of_rank["sums"]


@pytest.mark.parametrize("results", [1], indirect=True)
def test_the_gate_names_what_a_step_computes_otherwise(results):
    _, of_rank = results
    first_step = len(prompts(1)[0].tokens)
    assert f"token {first_step} of the sequence, output of the layer 2" in of_rank["broken step"]


@pytest.mark.parametrize("results", [1], indirect=True)
@pytest.mark.parametrize("dtype", slow_but(["bf16"], DTYPES))
def test_the_gate_is_zero_for_any_number_of_responses(results, dtype):
    _, of_rank = results
    assert of_rank[f"sizes {dtype}"] == [0.0] * len(STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("results", [1], indirect=True)
def test_every_schedule_gives_the_same_responses(results):
    _, of_rank = results
    plain, *others = of_rank["schedules"]["found"].items()
    assert len(others) == 6
    for name, responses in others:
        assert responses == plain[1], name
    assert max(of_rank["schedules"]["lengths"]) == 100 > min(of_rank["schedules"]["lengths"])


@pytest.mark.parametrize(
    ("results", "parallel"),
    slow_but([(2, BOTH)], [(size, parallel) for size in CUT for parallel in CUT[size]]),
    indirect=["results"],
)
def test_ranks_that_exchange_rows_give_the_responses_of_the_module(results, parallel):
    _, of_rank = results
    responses, lengths = (of_rank[f"schedules {parallel}"][name] for name in ("found", "lengths"))
    assert len(responses) == 4
    assert max(lengths) == TWO_PAGES > min(lengths)
    for name in ("five rows", "module", "graphs"):
        assert responses[name] == responses["plain"], name


@pytest.mark.slow
@pytest.mark.parametrize("results", [2], indirect=True)
def test_replicas_that_share_experts_take_as_many_rows_as_the_one_that_needs_most(results):
    """More than a tile of rows on one of them, and less on the other: the exchange has one shape."""
    _, of_rank = results
    plain, *others = of_rank["uneven rows"]["found"].values()
    assert len(plain) == 40
    assert others == [plain] * 2


@pytest.mark.parametrize("results", [2], indirect=True)
@pytest.mark.parametrize("parallel", slow_but([HOLDERS[0]], HOLDERS), ids=str)
def test_a_response_is_on_one_rank_and_then_where_it_is_learned_from(results, parallel):
    _, of_rank = results
    held = of_rank[f"held {parallel}"]
    assert set(held["owners"]) == {0, 1}
    assert held["sampled"] == [[owner] for owner in held["owners"]]
    assert held["learned"] == held["homes"]
    one_replica = "expert" not in parallel or "tensor" in parallel
    assert all((ranks == [0, 1]) == one_replica for ranks in held["homes"])


@pytest.mark.parametrize("results", [1], indirect=True)
def test_weights_that_changed_are_told_apart(results):
    _, of_rank = results
    assert "the weights changed between generation and update" in of_rank["changed"]


@pytest.mark.parametrize("results", slow_but([1], [1, 2]), indirect=True)
def test_doses_stand_apart_from_what_is_computed_without_them(results):
    _, of_rank = results
    for name, dose in of_rank["doses"].items():
        assert dose["gate"] == 0.0, name
        assert dose["same in other batches"], name
        assert dose["same weights"], name
        assert dose["bits of mu"] is (True if name in ("fp8", "int4", "stale") else None), name
        assert dose["std"] > 0, name
        assert dose["bits of heads"], name
        assert dose["coefficients"] > 0, name
        for of_metrics, of_stats in zip(dose["metrics"], dose["stats"], strict=True):
            assert of_metrics == rounded(of_stats, scale=of_stats, dtype=torch.float32), name
    assert of_rank["doses"].get("fp8", {"std": 0})["std"] < of_rank["doses"]["int4"]["std"]


@pytest.mark.parametrize("results", [1], indirect=True)
def test_noise_on_logits_has_the_size_that_was_asked_for(results):
    _, of_rank = results
    for std in (1e-3, 1e-1):
        dose = of_rank["doses"][f"logits {std:g}"]
        # log mu moves by the token's own noise minus the policy's mean of it: between 0 and about 1.4 std
        assert 0.2 * std < dose["std"] < 1.5 * std
        assert dose["rho_std"] > 0.2 * std
