"""The weights of the baseline of least variance in the learner, against gradients of one response after the other in
transformers' model and float64, on several layouts."""

import numpy as np
import pytest
import torch

from tests.parallel.pool import Jobs
from tests.parallel.programs.score_norms import SIZE, groups_of_four, log_ratio
from tests.support.plain_training import load, logprobs, minibatch
from tests.support.rounding import bound_from_double, rounded
from tests.support.slow import slow_but
from tests.support.tiny import MODEL
from tests.unit.objective.reference import optimal_baseline

LAYOUTS = {
    "one": (1, {}),
    "ep2": (2, {"parallel": {"expert": 2}}),
    "tp2": (2, {"parallel": {"tensor": 2}}),
    "pp2": (2, {"parallel": {"pipeline": 2}}),
    "cp2": (2, {"parallel": {"context": 2}}),
}
QUICK = ("one", "ep2")


@pytest.fixture(scope="module")
def runs():
    jobs: dict[int, dict] = {1: {}, 2: {}}
    for name, (ranks, learner) in LAYOUTS.items():
        jobs[ranks][name] = ("advantages", {"learner": learner})
    jobs[1]["two updates"] = ("advantages", {"batch": {"minibatches": 2}})
    with Jobs(jobs, module="tests.parallel.programs.score_norms") as results:
        yield results


@pytest.fixture(scope="module")
def plain() -> tuple[np.ndarray, float]:
    """log (w² |∇ log pi|²) of every response with trained tokens, over all weights but the experts', in float64; and
    how far a correct float32 one may be from it."""
    batch, norms = groups_of_four(), {}
    trained = [i for i, sequence in enumerate(batch.sequences) if sequence.num_trained]
    for dtype in (torch.float32, torch.float64):
        model, scores, squares = load(MODEL, dtype), [], []
        dense = [p for name, p in model.named_parameters() if ".experts." not in name]
        for i in trained:
            score = logprobs(model, minibatch(batch, [i])).sum()
            scores.append(score.item())
            squares.append(sum(float(g.double().square().sum()) for g in torch.autograd.grad(score, dense)))
        norms[dtype] = np.array(scores), np.log(squares)
    # The error of log w is that of one score: mu is a number.
    bounds = [bound_from_double(*pair, longest_sum=32) for pair in zip(norms[torch.float32], norms[torch.float64])]
    log_w = np.array([log_ratio(i) * batch.sequences[i].length for i in trained])
    return 2 * log_w + norms[torch.float64][1], 4 * bounds[0] + bounds[1]


@pytest.mark.parametrize("layout", slow_but(QUICK, LAYOUTS))
def test_weights_are_squares_of_the_ratio_times_the_gradients_norm(runs, plain, layout):
    trained = np.array([sequence.num_trained > 0 for sequence in groups_of_four().sequences])
    expected, bound = plain
    assert 100 * bound < np.ptp(expected)
    for rank in runs[layout]:
        weights = np.array(rank["weights"])
        assert (weights[~trained] == 0).all()
        assert np.abs(np.log(weights[trained]) - expected).max() <= bound


@pytest.mark.parametrize("name", slow_but(("one",), [*LAYOUTS, "two updates"]))
def test_advantages_are_rewards_less_the_groups_weighted_mean(runs, name):
    batch = groups_of_four()
    for rank in runs[name]:
        for start in range(0, len(batch.sequences), SIZE):
            members = range(start, start + SIZE)
            rewards = [batch.sequences[i].reward for i in members]
            b = optimal_baseline(rewards, [rank["weights"][i] for i in members])
            want = [r - b if batch.sequences[i].num_trained else 0.0 for i, r in zip(members, rewards)]
            assert [rank["advantages"][i] for i in members] == rounded(want, roundings=4 * SIZE, scale=4.0)
        assert rank["final"] == [sequence.advantage for sequence in batch.sequences]
    assert all(rank["advantages"] == runs[name][0]["advantages"] for rank in runs[name])
