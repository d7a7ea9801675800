"""The gradient of a mismatched batch against a corrected one: plain PyTorch, on one rank and on two."""

import pytest

from tests.parallel.gloo import run_ranks
from tests.support.plain_gradient_bias import FIGURES, LEVELS, expected
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


def test_the_weights_do_not_move(one):
    assert one["moved"] == 0.0
