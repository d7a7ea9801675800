"""Centred scores on every layout and packing are those of one rank. Heads are random tokens of all ranks' columns."""

import pytest

from tests.parallel.pool import Jobs
from tests.parallel.programs.learner import assert_same_training
from tests.support.plain_training import float32_limits
from tests.support.slow import slow_but

STEPS, EPS = 2, 1e-3  # of Adam: see test_learner_layouts.py
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
PPO = {"policy_term": "ppo_clip", "correction": ["tis"]}
CENTRED = {"objective": {**PPO, "score_centering": True}, "rollout": {"sampled_head": 5}}
SETS = {"teacher": {"engine": "learner", "top_k": 5, "tokens": "student"}, "rollout": {"sampled_head": 5}}
METRICS = ("head_mass_mu", "head_mass_pi", "head_mass_min", "tail_ratio", "abs_coeff_sum", "outside_frac")
NAMES = ("actor/pg_loss", "actor/grad_norm", *(f"score_centering/{name}" for name in METRICS))


def train(parallel: dict, overrides: dict, minibatches: int = 1, **objective) -> tuple[str, dict]:
    centred = {"policy_term": "reinforce", "score_centering": True, **objective}
    return "train_on_stored_rollouts", {
        "num_steps": STEPS,
        "minibatches": minibatches,
        "head": 5,
        "learner": {"optimizer": {"lr": 1e-4, "eps": EPS}, "parallel": parallel, **overrides},
        "objective": centred,
        "rollout": {"sampled_head": 5 * centred["score_centering"]},
    }


@pytest.fixture(scope="module")
def runs():
    """Result of every job on every rank: ``runs[job][rank]``."""
    jobs: dict[int, dict] = {
        1: {
            "one": train({}, {}),
            "one, minibatches": train({}, {}, 4),
            "not centred": train({}, {}, score_centering=False),
            "ppo": train({}, {}, 4, **PPO),
            "centred without heads": ("refused", {"minibatches": 4, **CENTRED}),
            "sets without heads": ("refused", {"minibatches": 1, **SETS}),
        },
        2: {
            "cp2, minibatches": train({"context": 2}, {}, 4),
            "ppo, dp2": train({}, {"max_tokens_per_microbatch": 64}, 4, **PPO),
            "ppo, pp2": train({"pipeline": 2}, {}, 4, **PPO),
            "ppo, tp2ep2": train({"tensor": 2, "expert": 2}, {"fused_head": True}, 4, **PPO),
        },
        4: {},
    }
    for name, (ranks, parallel, overrides) in LAYOUTS.items():
        jobs[ranks][name] = train(parallel, overrides)
    with Jobs(jobs, module="tests.parallel.programs.learner") as results:
        yield results


def assert_same(result: dict, reference: dict, minibatches: int = 1) -> None:
    assert_same_training(result, reference, NAMES, float32_limits(STEPS, minibatches=minibatches, eps=EPS))


@pytest.mark.parametrize("layout", slow_but(["one sequence each", "fused head, tp2ep2", "cp2"], LAYOUTS))
def test_layout_equals_one_rank(runs, layout):
    first, *others = runs[layout]
    assert_same(first, runs["one"][0])
    for other in others:
        assert other["metrics"] == first["metrics"]


def test_several_minibatches_on_two_context_ranks(runs):
    assert_same(runs["cp2, minibatches"][0], runs["one, minibatches"][0], 4)


@pytest.mark.parametrize("layout", ["dp2", "pp2", "tp2ep2"])
def test_log_po_of_heads_reaches_the_update_on_every_layout(runs, layout):
    """With two replicas, sequences are updated where they were not in the pass for log po."""
    assert_same(runs[f"ppo, {layout}"][0], runs["ppo"][0], 4)


def test_centring_is_no_rounding(runs):
    """What the other tests compare would show it: gradients and coefficients are far from what they are without."""
    centred, plain = runs["one"][0]["metrics"][0], runs["not centred"][0]["metrics"][0]
    assert abs(centred["actor/grad_norm"] - plain["actor/grad_norm"]) > 0.05 * plain["actor/grad_norm"]
    assert centred["score_centering/abs_coeff_sum"] > 0.1
    assert not any(name.startswith("score_centering") for name in plain)
    assert {name for name in centred if not name.startswith("score_centering")} == plain.keys()


@pytest.mark.parametrize("read_by", ["centred", "sets"])
def test_a_batch_without_heads_is_named(runs, read_by):
    """As one that a run without them has stored, under a recipe that reads them."""
    assert "rollout.sampled_head: 5, but the batch has no heads" in runs[f"{read_by} without heads"][0]
