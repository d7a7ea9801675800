"""The gradient of a mismatched batch against a corrected one: plain PyTorch, on one rank and on two."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.parallel.gloo import run_ranks
from tests.support.plain_gradient_bias import FIGURES, LEVELS, expected, figures, gradients
from tests.support.rounding import rounded

PROGRAM = "tests.parallel.programs.gradient_bias"


@pytest.fixture(scope="module")
def one() -> dict:
    return run_ranks(PROGRAM, "measure", 1, parallel={})[0]


@pytest.fixture(scope="module")
def two() -> list[dict]:
    return run_ranks(PROGRAM, "measure", 2, parallel={"tensor": 2, "expert": 2})


def assert_within_limits(case: str, figures: dict[str, float]) -> None:
    """``figures`` is what float64 gives, up to the rounding of a correct evaluation in float32."""
    wanted, limits = expected(case)
    for name in FIGURES:
        assert abs(figures[name] - wanted[name]) <= limits[name], (case, name)


@pytest.mark.parametrize("case", LEVELS)
def test_figures_are_those_of_plain_pytorch_on_every_layout(one, two, case):
    assert_within_limits(case, one[case])
    assert_within_limits(case, two[0][case])
    assert two[0] == two[1]


def test_noise_turns_the_gradient(one):
    measured, (_, limits) = one["noisy"], expected("noisy")
    assert 0 < measured["cosine"] < 1 - limits["cosine"]
    assert measured["bias norm"] > limits["bias norm"]
    assert measured["bias / reference"] == measured["bias norm"] / measured["reference norm"]
    assert measured["LD Eq 13, C"] == measured["variance"] + measured["bias norm"] ** 2
    dot, square = (
        measured["cosine"] * measured["gradient norm"] * measured["reference norm"],
        measured["reference norm"] ** 2,
    )
    assert measured["LD Eq 13, B"] == rounded(dot - square, scale=square)


MUTATIONS = {
    "the first token of each sequence unweighted": lambda weights: [
        torch.cat([torch.ones_like(w[:1]), w[1:]]) for w in weights
    ],
    "one sequence unweighted": lambda weights: [torch.ones_like(weights[0]), *weights[1:]],
    "weights in bf16": lambda weights: [w.bfloat16().to(w.dtype) for w in weights],
    "weights truncated at 1.5": lambda weights: [w.clamp(max=1.5) for w in weights],
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_other_weights_are_not_within_the_limits(mutation):
    changed = figures(gradients("noisy", torch.float64, MUTATIONS[mutation]))
    with pytest.raises(AssertionError, match=r"reference norm|norm ratio|cosine"):
        assert_within_limits("noisy", changed)


def test_a_part_left_out_is_not_within_the_limits():
    computed = gradients("noisy", torch.float64)
    half = type(computed)(computed.mine, np.concatenate([computed.reference[:-1], 0 * computed.reference[-1:]]))
    with pytest.raises(AssertionError, match="reference norm"):
        assert_within_limits("noisy", figures(half))


def test_the_weights_do_not_move(one):
    assert one["moved"] == 0.0
