"""Gradient noise and update size as the learner measures them, against gradients taken part by part on one rank and
against the weights before and after, on several layouts."""

import math

import pytest
import torch

from tests.parallel.pool import Jobs
from tests.support.plain_training import float32_limits, relative_gradient_error, run
from tests.support.rounding import CLOSED_FORM, adam_first_update, gamma, rounded
from tests.support.slow import slow_but

MODULE = "tests.parallel.programs.noise"
OPTIMIZER = {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-3}  # this eps: see test_learner_layouts.py
SMALL = 150  # tokens in a microbatch: several of them in a batch
# ranks, learner section, (data-parallel ranks, only their first microbatch?) behind the noise scale; None: it has none
LAYOUTS = {
    "one": (1, {"max_tokens_per_microbatch": SMALL}, (1, True)),
    "one microbatch": (1, {}, None),
    "dp2": (2, {}, (2, False)),
    "dp2 microbatches": (2, {"max_tokens_per_microbatch": SMALL}, (2, False)),
    "ep2": (2, {"parallel": {"expert": 2}}, (2, False)),
    "tp2": (2, {"parallel": {"tensor": 2}, "max_tokens_per_microbatch": SMALL}, (1, True)),
    "pp2": (2, {"parallel": {"pipeline": 2}, "max_tokens_per_microbatch": SMALL}, None),
    "cp2": (2, {"parallel": {"context": 2}, "max_tokens_per_microbatch": SMALL}, (1, True)),
    "dp2 cp2 ep2": (4, {"parallel": {"context": 2, "expert": 2}}, (2, False)),
    "dp2 tp2 ep2": (4, {"parallel": {"tensor": 2, "expert": 2}}, (2, False)),
    "dp2 pp2": (4, {"parallel": {"pipeline": 2}}, (2, False)),
}
QUICK = ("one", "ep2", "cp2")
WITH_PARTS = [name for name, (_, _, parts) in LAYOUTS.items() if parts is not None]
STEPS = 2
INPUTS = ("noise/sq_small", "noise/sq_big", "noise/batch_small", "noise/batch_big")


def section(layout: str, **changes) -> dict:
    return {"dtype": "fp32", "optimizer": OPTIMIZER, **LAYOUTS[layout][1], **changes}


@pytest.fixture(scope="module")
def runs():
    """``runs[job][rank]``."""
    jobs: dict[int, dict] = {n: {} for n in (1, 2, 4)}
    for name, (ranks, _, parts) in LAYOUTS.items():
        jobs[ranks][name] = ("updates", {"num_steps": STEPS, **section(name)})
        if parts is not None:
            tokens = LAYOUTS[name][1].get("max_tokens_per_microbatch", 16384)
            kwargs = {"num_ranks": parts[0], "max_tokens": tokens, "first_only": parts[1]}
            jobs[1][f"parts, {name}"] = ("part_norms", kwargs)
    fp16 = section("dp2", dtype="fp16", loss_scale={"initial": 64.0})
    jobs[2]["dp2 fp16"] = ("updates", {"num_steps": 1, **fp16})
    jobs[2]["fewer sequences than ranks"] = ("updates", {"num_steps": 1, "num_sequences": 1, **section("dp2")})
    jobs[2]["dp2 minibatches"] = ("updates", {"num_steps": 1, "minibatches": 2, **section("dp2")})
    jobs[1]["one minibatches"] = ("updates", {"num_steps": 1, "minibatches": 2, **section("one microbatch")})
    with Jobs(jobs, module=MODULE) as results:
        yield results


@pytest.mark.parametrize("layout", slow_but(QUICK, WITH_PARTS))
def test_squared_norms_are_those_of_the_parts(runs, layout):
    result = runs[layout][0][0]
    (parts,) = runs[f"parts, {layout}"]
    *sizes, total = parts["sizes"]
    *squares, whole = parts["squares"]
    assert result["noise/batch_big"] == total == 24
    assert result["noise/batch_small"] == rounded(len(sizes) / sum(1 / size for size in sizes))
    # The tokens of a part are among those of the whole: its gradient's error in norm is no larger.
    error = float32_limits(1).gradients[0]

    def square_error(square: float) -> float:
        return 2 * math.sqrt(square) * error + error**2

    assert abs(result["noise/sq_big"] - whole) <= square_error(whole)
    scales = [(total / size) ** 2 for size in sizes]
    mean = sum(square * scale for square, scale in zip(squares, scales, strict=True)) / len(scales)
    small = sum(square_error(square) * scale for square, scale in zip(squares, scales, strict=True)) / len(scales)
    assert abs(result["noise/sq_small"] - mean) <= small < 0.01 * mean


@pytest.mark.parametrize("layout", slow_but(QUICK, LAYOUTS))
def test_update_size_is_what_the_weights_did(runs, layout):
    for metrics in runs[layout][0]:
        # What the weights did is a difference of two weights that are rounded themselves, each by up to u.
        roundings = CLOSED_FORM + 4 / metrics["test/relative_update"]
        for name in ("update_rms", "relative_update"):
            measured = metrics[f"noise/{name}"]
            assert measured == rounded(metrics[f"test/{name}"], roundings, scale=0, dtype=torch.float32), name
        assert gamma(roundings, torch.float32) < 1e-3
    assert all(rank == runs[layout][0] for rank in runs[layout])


@pytest.mark.parametrize("layout", slow_but(QUICK, LAYOUTS))
def test_first_update_is_the_same_on_every_layout(runs, layout):
    plain = run(torch.float64, 0)
    error = adam_first_update(float32_limits(1).gradients[0], OPTIMIZER["lr"], OPTIMIZER["eps"])
    limit = error / math.sqrt(len(plain.weights))  # clipping makes the gradient smaller, and its error
    result, expected = (runs[name][0][0]["noise/update_rms"] for name in (layout, "one"))
    assert abs(result - expected) <= limit < 0.01 * expected


def test_without_parts_there_is_no_noise_scale(runs):
    for name in ("one microbatch", "pp2", "fewer sequences than ranks"):
        for metrics in runs[name][0]:
            assert not any(key in metrics for key in INPUTS), name
            assert metrics["noise/update_rms"] > 0


def test_loss_scale_leaves_no_trace(runs):
    scaled, plain = runs["dp2 fp16"][0][0], runs["dp2"][0][0]
    assert scaled["precision/loss_scale"] > 1
    for key in ("noise/sq_small", "noise/sq_big"):
        # A squared norm, twice as far off as the norm.
        assert abs(scaled[key] / plain[key] - 1) <= 2 * relative_gradient_error(torch.float16) < 0.05


def test_several_updates_of_one_batch_are_averaged(runs):
    (metrics,) = runs["dp2 minibatches"][0]
    assert metrics["noise/batch_big"] == 12
    assert not any(key in runs["one minibatches"][0][0] for key in INPUTS)
