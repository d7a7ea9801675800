"""How far the routers of a token have moved, as the learner has it in the updates after the first, against the routers'
logits at both times and the paper's equations."""

import numpy as np
import pytest
import torch

from tests.parallel.pool import Jobs
from tests.support.rounding import gamma, rounded
from tests.support.slow import slow_but

TOPK = 2
SUMS = 128
"""Terms of the sum behind a logit: the width of the tiny model."""
JOBS = {
    "off": (1, {}),
    "r2": (1, {"replay": "r2"}),
    "recompute": (1, {"recompute": "full", "max_tokens_per_microbatch": 128}),
    "ep2": (2, {"parallel": {"expert": 2}}),
}


@pytest.fixture(scope="module")
def runs():
    jobs: dict[int, dict] = {1: {}, 2: {}}
    for name, (ranks, arguments) in JOBS.items():
        jobs[ranks][name] = ("shifts", arguments)
    with Jobs(jobs, module="tests.parallel.programs.router_shift") as results:
        yield results


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.parametrize("name", slow_but(("off", "ep2"), JOBS))
def test_the_shift_is_the_mean_change_of_the_old_experts_log_scores(runs, name):
    seen: set[int] = set()
    for rank in runs[name]:
        for i, (shift, now) in rank["found"].items():
            old = rank["before"][i]
            experts = np.argsort(-old, axis=-1)[..., :TOPK]
            change = np.take_along_axis(log_softmax(now) - log_softmax(old), experts, -1)
            expected = np.abs(change).mean((1, 2))
            # Passes pack the same tokens in other rows, so that the old logits differ by the rounding of their sums.
            bound = gamma(SUMS, torch.float32) * np.abs(old).max()
            assert np.abs(shift - expected).max() <= bound
            if i not in rank["first"]:
                assert expected.min() > 100 * bound, "the first update has moved every router"
            seen.add(i)
        metrics = rank["metrics"]
        assert 0.9 <= metrics["actor/router_weight"] < 1
        assert 0 <= metrics["actor/router_floor_frac"] <= 1
        assert metrics["actor/router_weight"] == rounded(runs[name][0]["metrics"]["actor/router_weight"])
        assert any(key.startswith("router/") for key in metrics) == (name == "r2")
    assert seen == set(range(24))
