"""A reference policy on every layout and packing is that of one rank; equal weights give a divergence of exactly 0."""

import numpy as np
import pytest
import torch

from tests.parallel.pool import Jobs
from tests.parallel.programs.learner import assert_same_training, largest_difference
from tests.support.families import save_family
from tests.support.plain_training import float32_limits
from tests.support.rounding import rounded
from tests.support.slow import slow_but
from tests.support.tiny import MODEL, stored_rollouts

STEPS, EPS, LR = 2, 1e-3, 1e-4  # of Adam: see test_learner_layouts.py
LOSS, REWARD = 0.5, 0.02
OBJECTIVE = {
    "advantage": "reinforce",
    "kl_loss": {"coef": LOSS, "type": "k3", "unbiased": True},
    "kl_in_reward": {"coef": REWARD},
}
LAYOUTS = {
    "one sequence each": (1, {}, {"max_tokens_per_microbatch": 1}),
    "fused head": (1, {}, {"fused_head": True}),
    "dp2": (2, {}, {"max_tokens_per_microbatch": 64}),
    "tp2ep2": (2, {"tensor": 2, "expert": 2}, {}),
    "fused head, tp2ep2": (2, {"tensor": 2, "expert": 2}, {"fused_head": True}),
    "cp2": (2, {"context": 2}, {}),
    "cp2tp2ep2": (4, {"context": 2, "tensor": 2, "expert": 2}, {}),
    "pp2": (2, {"pipeline": 2}, {}),
}
NAMES = ("actor/pg_loss", "actor/grad_norm", "actor/regularizer_loss", "reference/kl", "reference/k3_kl")
LORA = {"rank": 4, "alpha": 8.0}


def train(
    parallel: dict | None = None, learner: dict | None = None, num_steps: int = STEPS, **keys
) -> tuple[str, dict]:
    section = {"optimizer": {"lr": LR, "eps": EPS}, "parallel": parallel or {}, **(learner or {})}
    return "train", {"num_steps": num_steps, "learner": section, "reference": {}, "objective": OBJECTIVE, **keys}


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> str:
    """A folder of the tiny model with other weights."""
    folder = tmp_path_factory.mktemp("other")
    with Jobs(
        {1: {"made": ("trained_folder", {"folder": str(folder)})}}, module="tests.parallel.programs.reference"
    ) as jobs:
        assert jobs["made"] == [str(folder)]
    return str(folder)


@pytest.fixture(scope="module")
def runs(other, tmp_path_factory):
    """Result of every job on every rank: ``runs[job][rank]``."""
    folder = str(tmp_path_factory.mktemp("run"))
    delta_nets = str(save_family(tmp_path_factory.mktemp("delta nets"), "qwen3_next", initializer_range=0.06))
    jobs: dict[int, dict] = {
        1: {
            "one": train(),
            "one, minibatches": train(minibatches=4),
            "without": train(reference=None, objective={"advantage": "reinforce"}),
            "measured": train(objective={"advantage": "reinforce"}),
            "other": train(reference={"path": other}, folder=folder),
            "other, resumed": lambda: train(reference={"path": other}, resumed=results["other"][0]["path"]),
            "other as the policy": ("passes_of", {"path": other}),
            "adapters": train(learner={"lora": LORA}),
            "adapters, second copy": train(learner={"lora": LORA}, reference={"path": str(MODEL)}),
            "bf16": train(learner={"dtype": "bf16"}, num_steps=1),
            "fp16": train(learner={"dtype": "fp16"}, num_steps=1),
            "exact": train(rollout={"engine": "exact"}, num_steps=1),
            "own routes": train(routing={"replay": "r2"}, num_steps=1),
            "rounded": train(
                learner={"quantization": "as_rollout"}, rollout={"quantization": {"weights": "int8"}}, num_steps=1
            ),
            "delta nets": train(model={"path": delta_nets}, num_steps=1),
            "delta nets, adapters": train(model={"path": delta_nets}, learner={"lora": LORA}, num_steps=1),
            "recomputed": train(learner={"recompute": "full"}, num_steps=1),
        },
        2: {"cp2, minibatches": train({"context": 2}, minibatches=4), "dp2, minibatches": train(minibatches=4)},
        4: {},
    }
    for name, (ranks, parallel, overrides) in LAYOUTS.items():
        jobs[ranks][name] = train(parallel, overrides)
    with Jobs(jobs, module="tests.parallel.programs.reference") as results:
        yield results


def assert_same(result: dict, wanted: dict, minibatches: int = 1) -> None:
    assert_same_training(result, wanted, NAMES, float32_limits(STEPS, minibatches=minibatches, eps=EPS))


@pytest.mark.parametrize("layout", slow_but(["one sequence each", "fused head, tp2ep2", "cp2", "pp2"], LAYOUTS))
def test_layout_equals_one_rank(runs, layout):
    first, *others = runs[layout]
    assert_same(first, runs["one"][0])
    for rank in others:
        assert rank["metrics"] == first["metrics"]
        assert rank["penalties"] == first["penalties"]


@pytest.mark.parametrize("layout", ["cp2, minibatches", "dp2, minibatches"])
def test_several_minibatches(runs, layout):
    assert_same(runs[layout][0], runs["one, minibatches"][0], 4)


STARTS = ["one", "one sequence each", "fused head", "adapters", "bf16", "fp16", "exact", "own routes", "rounded"]


@pytest.mark.parametrize("run", [*STARTS, "delta nets", "delta nets, adapters", "recomputed"])
def test_the_policy_starts_at_the_reference(runs, run):
    first = runs[run][0]["metrics"][0]
    assert [first[f"reference/{name}"] for name in ("kl", "k3_kl", "kl_in_reward")] == [0.0, 0.0, 0.0]


def test_of_several_minibatches_the_reward_starts_at_zero(runs):
    first, second = runs["one, minibatches"][0]["metrics"]
    assert first["reference/kl_in_reward"] == 0.0 != second["reference/kl_in_reward"]


def test_another_model_has_its_own_logprobs(runs):
    """And the divergence is made of them, over tokens that the policy sampled, also of a response without a loss."""
    [other], [wanted] = runs["other"], runs["other as the policy"]
    batch = stored_rollouts(STEPS - 1)
    for got, of_policy in zip(other["reference_logprobs"], wanted, strict=True):
        assert np.abs(got - of_policy).max() <= float32_limits(1, eps=EPS).logprobs
    sums = [
        REWARD * float((old.astype(float) - reference)[slice(None) if s.sampled is None else s.sampled].sum())
        for s, old, reference in zip(batch.sequences, other["old_logprobs"], other["reference_logprobs"], strict=True)
    ]
    assert other["penalties"] == [rounded(x, 100, scale=1, dtype=torch.float32) for x in sums]
    mean = rounded(np.mean(sums) / REWARD, 100, scale=1 / REWARD, dtype=torch.float32)
    assert other["metrics"][-1]["reference/kl_in_reward"] == mean


def test_measuring_changes_nothing(runs):
    """Without weights in the objective a reference policy adds its metrics, and every other number is as it was."""
    for got, want in zip(runs["measured"][0]["metrics"], runs["without"][0]["metrics"], strict=True):
        assert {"reference/kl", "reference/k3_kl"} == {*got} - {*want}
        assert got == got | want


def test_adapters_need_no_second_copy(runs):
    one, two = runs["adapters"][0], runs["adapters, second copy"][0]
    assert one["metrics"] == two["metrics"]
    assert largest_difference(one["weights"], two["weights"]) == 0.0
    assert one["metrics"][1]["reference/k3_kl"] > 0


def test_a_resumed_run_goes_on_alike(runs):
    whole, rest = runs["other"][0], runs["other, resumed"][0]
    assert rest["metrics"] == whole["metrics"][-1:]
    assert largest_difference(whole["weights"], rest["weights"]) == 0.0
