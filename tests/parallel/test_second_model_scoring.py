"""The policy in another precision: equal precision gives exactly 0, another gives what transformers computes."""

import numpy as np
import pytest
import torch

from tests.parallel.pool import Jobs
from tests.parallel.programs.learner import largest_difference
from tests.support.plain_training import float32_limits, load, logprobs
from tests.support.rounding import rounded
from tests.support.slow import slow_but
from tests.support.tiny import stored_rollouts

STEPS = 2
LAYOUTS = {
    "one": (1, {}, {}),
    "one sequence each": (1, {}, {"max_tokens_per_microbatch": 1}),
    "fused head": (1, {}, {"fused_head": True}),
    "adapters": (1, {}, {"lora": {"rank": 4, "alpha": 8.0}}),
    "dp2": (2, {}, {"max_tokens_per_microbatch": 64}),
    "tp2ep2": (2, {"tensor": 2, "expert": 2}, {}),
    "cp2": (2, {"context": 2}, {}),
    "pp2": (2, {"pipeline": 2}, {}),
}
ALIKE = {
    "fp32": {},
    "bf16": {"learner": {"dtype": "bf16"}, "scoring": "bf16"},
    "fp16": {"learner": {"dtype": "fp16"}, "scoring": "fp16"},
    "fp32 parts": {
        "learner": {"dtype": "bf16"},
        "precision": {"fp32_head": True, "fp32_router": True},
        "scoring": {"dtype": "bf16"},
    },
    "recomputed": {"learner": {"recompute": "full"}},
    "mini-batches": {"minibatches": 4},
    "exact": {"rollout": {"engine": "exact"}},
    "rounded": {"learner": {"quantization": "as_rollout"}, "rollout": {"quantization": {"weights": "int8"}}},
    "their own routes": {"routing": {"replay": "r2"}},
    "others' routes": {"routing": {"replay": "r3"}, "has_routes": True},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Result of every job on every rank: ``runs[job][rank]``."""
    jobs: dict[int, dict] = {1: {}, 2: {}}
    for name, sections in ALIKE.items():
        jobs[1][f"alike: {name}"] = ("scored", {"scoring": "fp32", **sections})
    for name, (ranks, parallel, overrides) in LAYOUTS.items():
        section = {"dtype": "bf16", "optimizer": {"lr": 1e-3}, "parallel": parallel, **overrides}
        folder = str(tmp_path_factory.mktemp("model"))
        jobs[ranks][name] = ("scored", {"folder": folder, "learner": section, "scoring": "fp32"})
    jobs[1]["without"] = ("scored", {"learner": {"dtype": "bf16", "optimizer": {"lr": 1e-3}}})
    head = {"dtype": "bf16", "fp32_head": True}
    jobs[1]["head"] = ("scored", {"learner": {"dtype": "bf16"}, "scoring": head})
    jobs[1]["every other"] = ("scored", {"num_steps": 3, "scoring": {"dtype": "bf16", "every": 2}})
    folders = {name: job[1]["folder"] for its in jobs.values() for name, job in its.items() if "folder" in job[1]}
    with Jobs(jobs, module="tests.parallel.programs.scoring") as results:
        yield results, folders


@pytest.mark.parametrize("case", slow_but(["bf16", "mini-batches", "rounded", "others' routes"], ALIKE))
def test_equal_precision_gives_zero(runs, case):
    """Bit for bit, also after an update: the weights are the newest, as the passes have them."""
    for metrics in runs[0][f"alike: {case}"][0]["metrics"]:
        names = ("learner_mean", "learner_std", "learner_max", "learner_share")
        assert [metrics[f"scoring/{name}"] for name in names] == [0.0] * 4
        assert metrics["scoring/rest_mean"] == -metrics["rollout_corr/kl"]


@pytest.mark.parametrize("layout", slow_but(["one", "adapters", "dp2", "cp2"], LAYOUTS))
def test_logprobs_are_those_of_transformers_in_that_precision(runs, layout):
    """With the weights of before the update; and the metrics are those of these log-probs, the same on every rank."""
    results, folders = runs
    first, *others = results[layout]
    with torch.no_grad():
        plain = logprobs(load(folders[layout], torch.float32), stored_rollouts(STEPS - 1)).double().numpy()
    assert np.abs(first["scoring_logprobs"] - plain).max() <= float32_limits(1).logprobs
    keep = first["mask"]
    po, s, mu = (first[name].astype(float)[keep] for name in ("current_logprobs", "scoring_logprobs", "mu"))
    wanted = {
        "learner_mean": (po - s).mean(),
        "learner_std": (po - s).std(ddof=1),
        "learner_max": np.abs(po - s).max(),
        "rest_mean": (s - mu).mean(),
        "rest_std": (s - mu).std(ddof=1),
        "rest_max": np.abs(s - mu).max(),
        "learner_share": np.cov(po - s, po - mu)[0, 1] / (po - mu).var(ddof=1),
    }
    for name, value in wanted.items():
        got = first["metrics"][-1][f"scoring/{name}"]
        assert got == rounded(value, 1000, scale=1 + abs(value), dtype=torch.float32), name
    assert first["metrics"][-1]["scoring/learner_std"] > 1e-3
    assert [other["metrics"] for other in others] == [first["metrics"]] * len(others)


def test_measuring_changes_nothing_and_keeps_no_weights(runs):
    got, want = (runs[0][name][0] for name in ("one", "without"))
    for one, other in zip(got["metrics"], want["metrics"], strict=True):
        assert {name.partition("/")[0] for name in {*one} - {*other}} == {"scoring"}
        assert one == one | other
    assert largest_difference(got["weights"], want["weights"]) == 0.0
    assert got["held"] == want["held"] == 0


def test_parts_in_fp32_of_their_own(runs):
    """A head in fp32 alone differs less than a whole model in fp32."""
    head, whole = (runs[0][name][0]["metrics"][0]["scoring/learner_std"] for name in ("head", "one"))
    assert 0 < head < whole


def test_every_other_step(runs):
    seen = ["scoring/learner_std" in metrics for metrics in runs[0]["every other"][0]["metrics"]]
    assert seen == [True, False, True]
