"""Adapters on a dense model and on experts: the gradient in closed form, merged weights on both ends, layouts and
checkpoints."""

from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from megatron_rl.errors import InputError
from megatron_rl.run.prepare import check_recipe
from tests.parallel.pool import Jobs
from tests.parallel.programs.lora import LORA, OPTIMIZER
from tests.support.plain_training import Limits, adapters, float32_limits, run
from tests.support.rounding import bound_from_double
from tests.support.slow import slow_but
from tests.support.tiny import MODEL, stored_rollouts, tiny_recipe

MODULE = "tests.parallel.programs.lora"
STEPS = 3
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LONGEST_SUM = sum(s.whole_length for s in stored_rollouts(0).sequences)
SCALE = LORA["alpha"] / LORA["rank"]
EXPERTS = str(MODEL)
PRECISION = 1e-5  # relative, of a gradient or a movement: what is asked for of every layout


@pytest.fixture(scope="module")
def one(dense, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("run"))
    jobs = {
        "run": ("train", {"model": dense, "num_steps": STEPS, "folder": folder}),
        "recompute": ("train", {"model": dense, "num_steps": STEPS, "recompute": "full"}),
        "fp16": ("train", {"model": dense, "num_steps": STEPS, "dtype": "fp16"}),
        "experts": ("train", {"model": EXPERTS, "num_steps": STEPS, "folder": str(tmp_path_factory.mktemp("run"))}),
        "experts, recomputed": ("train", {"model": EXPERTS, "num_steps": STEPS, "recompute": "selective"}),
        "adapters' gradient": ("first_gradient", {"model": dense, "lora": True}),
        "whole gradient": ("first_gradient", {"model": dense, "lora": False}),
    }
    jobs["resumed"] = lambda: ("resume", {"model": dense, "path": results["run"][0]["path"]})
    with Jobs({1: jobs}, module=MODULE) as results:
        yield results.of_rank(0)


@pytest.fixture(scope="module")
def whole_limits(dense) -> Limits:
    """How far rounding may take gradients of the whole weights apart."""
    return float32_limits(1, path=dense)


def test_the_policy_starts_as_it_was(one, dense):
    checkpoint = load_file(f"{dense}/model.safetensors")
    for name, tensor in one["run"]["exported before"].items():
        assert torch.equal(tensor, checkpoint[name]), name


def test_the_gradient_is_the_chain_rule(one, whole_limits):
    """With B = 0: dL/dB = scale · G Aᵀ and dL/dA = 0, where G is the gradient of the whole weight."""
    whole, adapters = one["whole gradient"], one["adapters' gradient"]
    num_compared = 0
    for name, gradient in whole.items():
        a = adapters.get(f"start {name.removesuffix('weight')}lora_A")
        if a is not None:
            got = adapters[f"{name.removesuffix('weight')}lora_B"]
            error = whole_limits.tensor_gradients * float(gradient.norm() * torch.linalg.matrix_norm(a, 2))
            assert (got - SCALE * gradient @ a.t()).norm() <= SCALE * error
            assert (got - 1.01 * SCALE * gradient @ a.t()).norm() > SCALE * error, "no proof"
            assert not adapters[f"{name.removesuffix('weight')}lora_A"].any()
            num_compared += 1
    assert num_compared == 2 * 4
    assert all("lora_" in name for name in adapters)


@pytest.mark.parametrize("job", ["run", "fp16"])
def test_only_adapters_move_and_are_merged_once(one, job):
    run = one[job]
    for name, after in run["exported"].items():
        before = run["exported before"][name]
        assert torch.equal(after, before) != any(target in name for target in TARGETS), name
    prefix = "decoder.layers.1.mlp.linear_fc2."
    a, b = (run["adapters"][f"{prefix}lora_{letter}"].float() for letter in "AB")
    frozen = run["frozen"][f"{prefix}weight"]
    merged = (frozen.float() + SCALE * b @ a).to(frozen.dtype)
    assert torch.equal(run["exported"]["model.layers.1.mlp.down_proj.weight"], merged)


def test_exported_weights_are_those_of_the_forward_pass(one):
    """transformers, on the exported checkpoint, gives the learner's log-probs."""
    folder = Path(one["run"]["path"]).parent / "hf"
    single, double = (run(dtype, 0, path=str(folder)).before for dtype in (torch.float32, torch.float64))
    bound = bound_from_double(single, double, LONGEST_SUM)
    assert np.abs(one["run"]["after"] - double).max() <= bound
    assert np.abs(one["run"]["after"] - one["run"]["before"]).max() > 100 * bound


@pytest.mark.slow
def test_recomputation_changes_nothing(one):
    assert (one["recompute"]["after"] == one["run"]["after"]).all()


def test_a_checkpoint_continues_the_run(one):
    assert one["resumed"]["metrics"]["actor/grad_norm"] == one["run"]["metrics"][-1]["actor/grad_norm"]
    for name, tensor in one["resumed"]["exported"].items():
        assert torch.equal(tensor, one["run"]["exported"][name]), name


@pytest.fixture(scope="module")
def two(one, dense, tmp_path_factory):
    """Every layout of two ranks, and checkpoints of one rank read by them."""

    def train(model: str, folder: str = "", **parallel: int) -> tuple[str, dict]:
        return "train", {"model": model, "num_steps": STEPS, "parallel": parallel, "folder": folder}

    folders = {name: str(tmp_path_factory.mktemp("layout")) for name in ("tp2", "experts tp2 ep2")}
    jobs = {
        "dp2": train(dense),
        "pp2": train(dense, pipeline=2),
        "tp2": train(dense, folders["tp2"], tensor=2),
        "experts ep2": train(EXPERTS, expert=2),
        "experts tp2 ep2": train(EXPERTS, folders["experts tp2 ep2"], tensor=2, expert=2),
        "experts tp2": train(EXPERTS, tensor=2),
        "resumed tp2": lambda: ("resume", {"model": dense, "path": one["run"]["path"], "parallel": {"tensor": 2}}),
        "resumed tp2 ep2": lambda: (
            "resume",
            {"model": EXPERTS, "path": one["experts"]["path"], "parallel": {"tensor": 2, "expert": 2}},
        ),
    }
    with Jobs({2: jobs}, module=MODULE) as results:
        yield [results.of_rank(rank) for rank in (0, 1)]


@pytest.mark.parametrize("layout", slow_but(["tp2"], ["dp2", "pp2", "tp2"]))
def test_two_ranks_equal_one(one, two, dense, layout):
    limits = float32_limits(STEPS, **OPTIMIZER, path=dense, mutate=adapters(LORA["rank"], SCALE))
    for rank in two:
        for step, (got, want) in enumerate(zip(rank[layout]["metrics"], one["run"]["metrics"], strict=True)):
            difference = abs(got["actor/grad_norm"] - want["actor/grad_norm"])
            assert difference <= limits.of_metric("actor/grad_norm", step)
        assert np.abs(rank[layout]["after"] - one["run"]["after"]).max() <= limits.logprobs


def moved(run: dict, name: str) -> torch.Tensor:
    return run["exported"][name].double() - run["exported before"][name].double()


@pytest.mark.parametrize("layout", slow_but(["experts tp2 ep2"], ["experts ep2", "experts tp2 ep2", "experts tp2"]))
def test_adapters_of_experts_equal_those_of_one_rank(one, two, layout):
    """Gradient norms of three updates, and how far each kind of weight moved in them."""
    expected = one["experts"]
    for rank in two:
        result = rank[layout]
        assert all(torch.equal(result["exported before"][name], t) for name, t in expected["exported before"].items())
        for got, want in zip(result["metrics"], expected["metrics"], strict=True):
            assert abs(got["actor/grad_norm"] - want["actor/grad_norm"]) <= PRECISION * want["actor/grad_norm"]
        for target in TARGETS:
            names = [name for name in expected["exported"] if target in name]
            differences = [moved(result, name) - moved(expected, name) for name in names]
            whole = sum(float(moved(expected, name).square().sum()) for name in names) ** 0.5
            assert whole > 0, f"{target} did not move"
            assert sum(float(part.square().sum()) for part in differences) ** 0.5 <= PRECISION * whole, target


def test_every_expert_has_an_adapter_of_its_own(one):
    names = [name for name in one["experts"]["adapters"] if "mlp.experts" in name and name.endswith("fc1.lora_A")]
    starts = [one["experts"]["adapters"][name] for name in names]
    assert len(names) == sum("experts" in name and "gate_proj" in name for name in one["experts"]["exported"]) > 0
    assert not any(torch.equal(a, b) for i, a in enumerate(starts) for b in starts[:i])
    for name, after in one["experts"]["exported"].items():
        before = one["experts"]["exported before"][name]
        assert torch.equal(after, before) or any(target in name for target in TARGETS), name


def test_recomputed_experts_are_merged_again(one):
    for got, want in zip(one["experts, recomputed"]["metrics"], one["experts"]["metrics"], strict=True):
        assert abs(got["actor/grad_norm"] - want["actor/grad_norm"]) <= PRECISION * want["actor/grad_norm"]


@pytest.fixture(scope="module")
def back(two, dense):
    """Checkpoints of two ranks, read by one."""
    jobs = {
        "tp2": lambda: ("resume", {"model": dense, "path": two[0]["tp2"]["path"]}),
        "experts tp2 ep2": lambda: ("resume", {"model": EXPERTS, "path": two[0]["experts tp2 ep2"]["path"]}),
    }
    with Jobs({1: jobs}, module=MODULE) as results:
        yield results.of_rank(0)


@pytest.mark.slow
def test_a_checkpoint_goes_on_under_another_layout(one, two, back):
    pairs = [(rank["resumed tp2"], one["run"]) for rank in two]
    pairs += [(rank["resumed tp2 ep2"], one["experts"]) for rank in two]
    pairs += [(back[layout], two[0][layout]) for layout in back]
    for got, want in pairs:
        norm = want["metrics"][-1]["actor/grad_norm"]
        assert abs(got["metrics"]["actor/grad_norm"] - norm) <= PRECISION * norm


def test_what_adapters_cannot_do_is_refused(dense):
    with pytest.raises(InputError, match="adapters of one expert are not cut, use expert_tensor: 1"):
        check_recipe(tiny_recipe(learner={"lora": LORA, "parallel": {"tensor": 2, "expert_tensor": 2}}))
    with pytest.raises(ValidationError, match=r"precision\.export_from: master needs master weights"):
        tiny_recipe(model={"path": dense}, learner={"lora": LORA}, precision={"export_from": "master"})
