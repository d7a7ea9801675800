"""Layouts, marks of experts, and verdicts on gradient norms and checkpoints, in both outcomes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_rl.doctor import learner
from megatron_rl.doctor.checks import Setting
from megatron_rl.learner.model import mark_expert_parameters


def test_without_transformer_engine_nothing_is_chosen():
    outcome = learner.attention(Setting("cpu", 2, "/tmp"))
    assert (outcome.status, "TransformerEngine is not installed" in outcome.reason) == ("not run", True)


@pytest.mark.parametrize(
    ("ranks", "wanted"), [(1, (1, 1)), (2, (2, 2)), (3, (1, 1)), (4, (2, 4)), (6, (2, 2)), (8, (2, 8)), (16, (2, 8))]
)
def test_layouts_divide_ranks_and_model(ranks, wanted):
    layout = learner.layout(ranks)
    assert (layout["tensor"], layout["expert"]) == wanted
    assert ranks % layout["tensor"] == ranks % layout["expert"] == 0


def test_batches_are_the_same_on_every_rank():
    first, again, other = learner.made_up_batch(3), learner.made_up_batch(3), learner.made_up_batch(4)
    assert all((a.tokens == b.tokens).all() for a, b in zip(first.sequences, again.sequences, strict=True))
    assert any(len(a.tokens) != len(b.tokens) for a, b in zip(first.sequences, other.sequences, strict=True))


# -- experts


def model_with_experts() -> torch.nn.Module:
    model = torch.nn.Module()
    model.experts = torch.nn.ModuleDict({"linear_fc1": torch.nn.Linear(2, 2, bias=False)})
    outer = torch.nn.Module()
    outer.mlp, outer.router = model, torch.nn.Linear(2, 2, bias=False)
    return outer


def test_marks_of_expert_weights():
    model = model_with_experts()
    name = "mlp.experts.linear_fc1.weight"
    assert learner.without_mark(model.named_parameters()) == [name]
    mark_expert_parameters(model)
    assert learner.without_mark(model.named_parameters()) == []
    del model.mlp.experts.linear_fc1.weight.tensor_model_parallel
    assert learner.without_mark(model.named_parameters()) == [name]
    model.mlp.experts.linear_fc1.weight.tensor_model_parallel = True
    assert learner.without_mark(model.named_parameters()) == []
    model.mlp.experts.linear_fc1.weight.allreduce = True
    assert learner.without_mark(model.named_parameters()) == [name]


@pytest.mark.parametrize(
    ("norm", "dtype", "status"),
    [
        (41.48169, "fp32", "pass"),
        (41.48170, "fp32", "pass"),
        (40.93799, "fp32", "fail"),  # of TransformerEngine's unmarked experts on two ranks
        (41.48300, "fp32", "fail"),
        (41.48300, "bf16", "pass"),
        (42.48169, "bf16", "fail"),
        (float("nan"), "bf16", "fail"),
    ],
)
def test_a_norm_is_held_to_the_types_rounding(norm, dtype, status):
    outcome = learner.judge_norms({"DP2": 41.48169, "TP2·EP2·DP1": norm}, dtype, "do")
    assert (outcome.status, outcome.fix) == (status, "do" if status == "fail" else "")


def test_ranks_that_have_no_other_layout():
    assert "one rank" in learner.judge_norms({"TP1·EP1·DP1": 1.0}, "fp32", "do").reason
    outcome = learner.context(SimpleNamespace(ranks=3))
    assert (outcome.status, "even number" in outcome.reason) == ("not run", True)


# -- checkpoints

SAME = {"uninterrupted": "a", "saved on the way": "a", "loaded": "a"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_bits_that_are_the_same(device):
    assert learner.judge_checkpoint(True, [], 5, SAME, device).status == "pass"


@pytest.mark.parametrize(
    ("state", "changed", "digests", "told"),
    [
        (False, [], SAME, "the loop's state did not come back"),
        (True, ["x.distcp"], SAME, "1 of 5 files differ, first x.distcp"),
        (True, [], SAME | {"loaded": "b"}, "loading a checkpoint changes"),
        (True, [], SAME | {"saved on the way": "b"}, "saving a checkpoint changes"),
    ],
)
def test_bits_that_are_not(state, changed, digests, told):
    outcome = learner.judge_checkpoint(state, changed, 5, digests, "cpu")
    assert (outcome.status, told in outcome.reason) == ("fail", True)


def test_a_gpu_whose_kernels_do_not_repeat_is_not_held_to_bits():
    differ = {"uninterrupted": "a", "saved on the way": "b", "loaded": "c"}
    outcome = learner.judge_checkpoint(True, [], 5, differ, "cuda")
    assert (outcome.status, "is not compared" in outcome.reason) == ("pass", True)
    assert learner.judge_checkpoint(True, ["x"], 5, differ, "cuda").status == "fail"
    assert learner.judge_checkpoint(True, [], 5, SAME | {"loaded": "c"}, "cuda").status == "fail"
