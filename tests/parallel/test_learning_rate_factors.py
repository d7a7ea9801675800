"""The rate by effective sample size, and by the age of the data: what it is, what the weights do with it."""

import pytest
import torch

from tests.parallel.pool import Jobs
from tests.support.rounding import CLOSED_FORM, rounded

MODULE = "tests.parallel.programs.noise"
LR = 1e-3
STEPS = 2


def updates(**changes) -> tuple[str, dict]:
    return "updates", {"num_steps": STEPS, "optimizer": {"lr": LR}, **changes}


@pytest.fixture(scope="module")
def runs():
    jobs = {
        1: {
            "plain": updates(),
            "sqrt": updates(schedule={"effective_sample": "sqrt"}),
            "linear": updates(schedule={"effective_sample": {"rule": "linear", "reference": 0.5}}),
        },
        2: {
            "ep2": updates(schedule={"effective_sample": "sqrt"}, parallel={"expert": 2}),
            "bound": updates(minibatches=2, schedule={"staleness_bound": 1.5 * LR}, parallel={"expert": 2}),
        },
    }
    with Jobs(jobs, module=MODULE) as results:
        yield results


@pytest.mark.parametrize("name", ["sqrt", "linear", "ep2"])
def test_the_rate_follows_the_minibatch_and_the_weights_the_rate(runs, name):
    for metrics in runs[name][0]:
        share = metrics["rollout_corr/eff_sample_size_seq"]
        assert 0 < share < 0.5, "made-up responses: few of them carry the weight"
        assert metrics["actor/lr"] == LR * (share / 0.5 if name == "linear" else share**0.5)
        # What the weights did is a difference of two weights that are rounded themselves, each by up to u.
        roundings = CLOSED_FORM + 4 / metrics["test/relative_update"]
        assert metrics["noise/update_rms"] == rounded(metrics["test/update_rms"], roundings, 0, torch.float32)
    assert all(rank == runs[name][0] for rank in runs[name])


def test_the_first_update_is_the_plain_one_times_the_factor(runs):
    """Adam's step is lr times a number that does not know lr."""
    plain, scaled = runs["plain"][0][0], runs["sqrt"][0][0]
    assert plain["actor/lr"] == LR
    assert plain["actor/grad_norm"] == scaled["actor/grad_norm"]
    factor = scaled["actor/lr"] / LR
    assert scaled["noise/update_rms"] == rounded(factor * plain["noise/update_rms"], dtype=torch.float32)


def test_the_rate_falls_with_the_age_of_the_oldest_token(runs):
    """All tokens are of version 0: the updates of the two steps are 0, 1 and 2, 3 optimizer steps away."""
    for metrics, ages in zip(runs["bound"][0], [(0, 1), (2, 3)], strict=True):
        assert metrics["lr_sched/staleness"] == sum(ages) / 2
        assert metrics["actor/lr"] == rounded(sum(min(LR, 1.5 * LR / max(age, 1)) for age in ages) / 2, 8)
    assert runs["bound"][0] == runs["bound"][1]
    assert "lr_sched/staleness" not in runs["plain"][0][0]
