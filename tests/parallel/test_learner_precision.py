"""Loss scaling, overflows, fp32 parts and the master copy on the learner's side, on one rank and on two.

Rollouts are stored; gradients are made to overflow by a hook on one parameter. Ranks are started once per number.
"""

import math
from functools import partial

import pytest
import torch

from megatron_rl.model.architecture import read_architecture
from tests.parallel.pool import Jobs
from tests.parallel.programs.precision import ATTENTION, EXPERT
from tests.support.plain_training import relative_gradient_error
from tests.support.rounding import gamma, unit_roundoff
from tests.support.slow import slow_but
from tests.support.tiny import MODEL

# Small enough that the tiny model's own gradients do not overflow, so that injected overflows are the only ones.
MODULE = "tests.parallel.programs.precision"
QUIET = {"dtype": "fp16", "loss_scale": {"initial": 256.0, "growth_interval": 1000}}
HIGH = {"dtype": "fp16", "loss_scale": {"initial": 2.0**24}}
HUGE = {"parameter": ATTENTION, "factor": 1e30, "at": (12,)}
NAN = {"parameter": ATTENTION, "factor": float("nan"), "at": range(1, 100)}
IN_EXPERTS = {"parameter": EXPERT, "factor": 1e30, "at": (0,)}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    jobs = {
        "clean": ("train", {"num_steps": 18, "learner": HIGH}),
        "huge": ("train", {"num_steps": 18, "learner": HIGH, "inject": HUGE, "save_after": 13, "folder": folder}),
        "grows": (
            "train",
            {"num_steps": 5, "learner": QUIET | {"loss_scale": {"initial": 256.0, "growth_interval": 2}}},
        ),
        "quiet": ("train", {"num_steps": 3, "learner": QUIET}),
        "half": ("train", {"num_steps": 3, "learner": QUIET | {"loss_scale": {"initial": 128.0}}}),
        "experts": ("train", {"num_steps": 4, "learner": QUIET, "inject": IN_EXPERTS}),
        "without": ("train", {"num_steps": 3, "learner": QUIET | {"loss_scale": {"initial": 128.0}}, "first_batch": 1}),
        "fp32": ("train", {"num_steps": 3, "learner": {"dtype": "fp32"}}),
        "head": ("fp32_parts", {"dtype": "bf16"}),
    }
    for dtype in ("fp16", "bf16", "fp32"):
        section = QUIET | {"dtype": dtype, "max_consecutive_overflows": 3}
        jobs[f"nan {dtype}"] = ("train", {"num_steps": 5, "learner": section, "inject": NAN})
    for learner, rollout in (("bf16", "fp16"), ("bf16", "fp32"), ("fp16", "fp16"), ("fp32", "fp16")):
        jobs[f"export {learner}/{rollout}"] = (
            "exported",
            {
                "num_steps": 2,
                "learner": {"dtype": learner},
                "rollout": {"dtype": rollout},
                "precision": {"export_from": "master"},
            },
        )
    never = {"inject": NAN | {"at": range(100)}, "save_after": 1, "folder": folder + "/never"}
    jobs["never"] = ("train", {"num_steps": 2, "learner": QUIET} | never)

    def resume(saved: str, num_steps: int, learner: dict) -> tuple[str, dict]:
        return "resume", {"path": results[saved][0]["path"], "num_steps": num_steps, "learner": learner}

    jobs["resumed"] = partial(resume, "huge", 4, HIGH)
    jobs["first update"] = partial(resume, "never", 1, QUIET)
    with Jobs({1: jobs}, module=MODULE) as results:
        yield results.of_rank(0)


@pytest.fixture(scope="module")
def two():
    layouts = {"dp2": {}, "ep2": {"expert": 2}}
    jobs = {name: ("train", {"num_steps": 3, "learner": QUIET | {"parallel": p}}) for name, p in layouts.items()}
    inject = {"parameter": ATTENTION, "factor": 1e30, "at": (1,), "rank": 1}
    jobs["one rank overflows"] = ("train", {"num_steps": 3, "learner": QUIET, "inject": inject})
    section = {"learner": {"dtype": "bf16"}, "rollout": {"dtype": "fp32"}, "precision": {"export_from": "master"}}
    jobs["export"] = ("exported", {"num_steps": 2} | section)
    jobs["export ep2"] = (
        "exported",
        {"num_steps": 2} | section | {"learner": {"dtype": "bf16", "parallel": {"expert": 2}}},
    )
    jobs["head tp2"] = ("fp32_parts", {"dtype": "bf16", "tensor": 2})
    with Jobs({2: jobs}, module=MODULE) as results:
        yield [results.of_rank(rank) for rank in (0, 1)]


def applied(run: dict) -> list[float]:
    return [step["lr"] for step in run["steps"] if not step["update_skipped"]]


def test_an_overflow_skips_holds_and_goes_on(one):
    clean, huge = one["clean"]["steps"], one["huge"]["steps"]
    assert huge[:12] == clean[:12]  # 2^24 is too large for this model: both find their scale first
    assert huge[12]["update_skipped"] == 1.0
    assert huge[12]["moved"] == 0.0
    assert huge[12]["grad_norm"] is None
    assert huge[12]["num_updates"] == huge[11]["num_updates"]
    assert huge[12]["scale"] == huge[11]["scale"] / 2
    assert huge[12]["tensor"] == "model.layers.2.self_attn.o_proj.weight"
    assert huge[13]["update_skipped"] == 0.0
    assert huge[13]["moved"] > 0.0
    assert huge[-1]["overflows"] == sum(step["update_skipped"] for step in huge)


def test_the_learning_rate_is_shifted_by_the_skipped_updates(one):
    with_it, without = applied(one["huge"]), applied(one["clean"])
    assert len(with_it) == len(without) - 1
    assert with_it == without[:-1]
    assert len(set(with_it)) > 3  # it does move


def test_the_scale_grows_after_clean_updates(one):
    assert [step["scale"] for step in one["grows"]["steps"]] == [256.0, 512.0, 512.0, 1024.0, 1024.0]


def test_scale_and_counters_survive_a_resume(one):
    expected = [{name: step[name] for name in one["resumed"][0]} for step in one["huge"]["steps"][14:]]
    assert len(expected) == 4
    assert one["resumed"] == expected


def test_a_checkpoint_before_the_first_applied_update(one):
    (step,) = one["first update"]
    assert (step["update_skipped"], step["num_updates"], step["overflows"], step["scale"]) == (0.0, 1, 2.0, 64.0)
    assert step["lr"] == one["quiet"]["steps"][0]["lr"]


def test_gradients_do_not_depend_on_the_scale(one):
    for quiet, half, fp32 in zip(one["quiet"]["steps"], one["half"]["steps"], one["fp32"]["steps"]):
        assert abs(quiet["grad_norm"] / half["grad_norm"] - 1) <= relative_gradient_error(torch.float16) < 0.01
        assert abs(quiet["grad_norm"] / fp32["grad_norm"] - 1) <= relative_gradient_error(torch.float16)


def test_an_overflow_in_the_experts_alone_leaves_one_scale(one):
    """Megatron's own scalers would halve the experts' scale only, and double their gradients from then on."""
    after, reference = one["experts"]["steps"], one["without"]["steps"]
    assert after[0]["update_skipped"] == 1.0
    assert after[0]["scale"] == 128.0
    assert after[0]["tensor"] == "model.layers.1.mlp.experts.0.down_proj.weight"
    for got, want in zip(after[1:], reference, strict=True):
        assert [got[name] for name in ("lr", "grad_norm", "moved", "scale")] == [
            want[name] for name in ("lr", "grad_norm", "moved", "scale")
        ]
    assert one["experts"]["weights"].keys() == one["without"]["weights"].keys()
    for name, tensor in one["experts"]["weights"].items():
        assert torch.equal(tensor, one["without"]["weights"][name]), name


@pytest.mark.parametrize("dtype", slow_but(["fp16"], ["fp16", "bf16", "fp32"]))
def test_nan_that_does_not_clear_ends_the_run(one, dtype):
    run = one[f"nan {dtype}"]
    assert run["finite"]
    assert [step["update_skipped"] for step in run["steps"]] == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert [step["reason"] is not None for step in run["steps"]] == [False, False, False, True, True]
    reason = run["steps"][3]["reason"]
    assert "3 updates in a row" in reason
    assert "learner.max_consecutive_overflows: 3" in reason
    assert "model.layers.2.self_attn.o_proj.weight" in reason


def test_fp32_head_and_router(one):
    result = one["head"]["found"]
    assert len(result["head"]) >= 1
    assert len(result["router"]) == 4 * len(result["head"])
    assert {dtype for kind in result.values() for dtype, _ in kind} == {torch.float32}
    width = read_architecture(MODEL).hidden_size
    assert max(error for kind in result.values() for _, error in kind) <= gamma(width, torch.float32)
    assert unit_roundoff(torch.bfloat16) > 100 * gamma(width, torch.float32), "an output in bf16 would pass"
    assert one["head"]["description"]["head"] == one["head"]["description"]["router"] == "fp32"


def test_fp32_head_and_router_on_two_tensor_ranks(one, two):
    for rank in two:
        assert {dtype for kind in rank["head tp2"]["found"].values() for dtype, _ in kind} == {torch.float32}
        for name in ("actor/grad_norm", "actor/entropy", "mismatch/rho_std"):
            ratio = rank["head tp2"]["metrics"][name] / one["head"]["metrics"][name]
            assert abs(ratio - 1) <= relative_gradient_error(torch.bfloat16) < 1 - math.sqrt(0.5), (
                name
            )  # of one rank's half


def is_bf16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() == tensor.bfloat16().float()


@pytest.mark.parametrize("pair", slow_but(["fp16/fp16"], ["fp16/fp16", "fp32/fp16"]))
def test_no_bf16_on_an_fp16_path(one, pair):
    """Every bit of fp16's longer significand is in use in what is sent, and it is the master rounded once."""
    export = one[f"export {pair}"]
    for name, tensor in export["sent"].items():
        sent = tensor.half()
        assert torch.equal(sent.view(torch.int16), export["master"][name].half().view(torch.int16)), name
        if tensor.ndim > 1:
            assert is_bf16(sent).float().mean() < 0.25, name  # 1 in 8 by chance


@pytest.mark.parametrize("pair", slow_but(["bf16/fp16"], ["bf16/fp16", "bf16/fp32"]))
def test_master_weights_are_rounded_once(one, pair):
    export, dtype = one[f"export {pair}"], {"fp16": torch.float16, "fp32": torch.float32}[pair[5:]]
    differ = 0
    for name, tensor in export["sent"].items():
        assert tensor.dtype == dtype
        assert export["master"][name].dtype == torch.float32
        assert torch.equal(tensor, export["master"][name].to(dtype)), name
        # The learner's own weights are the same master rounded to bf16.
        assert torch.equal(export["own"][name], export["master"][name].bfloat16()), name
        differ += int((tensor.float() != export["own"][name].float()).sum())
    assert differ > 0


def test_master_weights_gathered_from_two_ranks(two):
    for job in ("export", "export ep2"):
        first, second = (rank[job] for rank in two)
        for name, tensor in first["sent"].items():
            assert torch.equal(tensor, second["sent"][name]), name
            assert torch.equal(first["own"][name], tensor.bfloat16()), name


@pytest.mark.parametrize("layout", slow_but(["ep2"], ["dp2", "ep2"]))
def test_fp16_on_two_ranks_equals_one(one, two, layout):
    for rank in two:
        for got, want in zip(rank[layout]["steps"], one["quiet"]["steps"], strict=True):
            assert abs(got["grad_norm"] / want["grad_norm"] - 1) <= relative_gradient_error(torch.float16)
            assert (got["scale"], got["lr"]) == (want["scale"], want["lr"])


def test_an_overflow_on_one_rank_is_the_overflow_of_all(two):
    runs = [rank["one rank overflows"]["steps"] for rank in two]
    for steps in runs:
        assert [step["update_skipped"] for step in steps] == [0.0, 1.0, 0.0]
        assert steps[1]["tensor"] == "model.layers.2.self_attn.o_proj.weight"
        assert steps[1]["scale"] == 128.0
