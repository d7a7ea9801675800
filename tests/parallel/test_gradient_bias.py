"""The gradient of a mismatched batch against a corrected one: closed forms, and the same on another layout."""

from __future__ import annotations

import pytest

from tests.parallel.gloo import run_ranks

PROGRAM = "tests.parallel.programs.gradient_bias"
UNIT = 2.0**-24  # rounding of one float32 operation
# Both gradients are sums of the same terms in the same order. The weights round each term twice more: rho and product.
SAME_TERMS = 4 * UNIT


@pytest.fixture(scope="module")
def one() -> dict:
    return run_ranks(PROGRAM, "measure", 1, parallel={})[0]


def test_without_mismatch_nothing_is_biased(one):
    found = one["same"]
    assert found["norm ratio"] == pytest.approx(1.0, abs=SAME_TERMS)
    assert found["cosine"] == pytest.approx(1.0, abs=SAME_TERMS)
    # |g - g*| from three dot products: the square root of their cancellation.
    assert found["bias / reference"] <= (4 * SAME_TERMS) ** 0.5
    assert found["variance"] == pytest.approx(found["reference variance"], rel=1e-3)


def test_a_mu_that_is_half_of_po_halves_the_gradient(one):
    """rho = 2 at every token: token-level importance sampling doubles the gradient and turns nothing."""
    found = one["half"]
    tolerance = 64 * UNIT  # the stored log-probs are float32: log rho is off by a rounding of numbers up to 16
    assert found["norm ratio"] == pytest.approx(0.5, abs=tolerance)
    assert found["cosine"] == pytest.approx(1.0, abs=tolerance)
    assert found["bias / reference"] == pytest.approx(0.5, abs=tolerance)
    assert found["reference variance"] == pytest.approx(4 * found["variance"], rel=1e-4)


def test_noise_turns_the_gradient(one):
    found = one["noisy"]
    assert 0.5 < found["cosine"] < 0.9999
    assert found["bias / reference"] > 0.01
    assert found["LD Eq 13, C"] == pytest.approx(found["variance"] + found["bias norm"] ** 2)
    assert found["LD Eq 13, B"] == pytest.approx(
        found["cosine"] * found["gradient norm"] * found["reference norm"] - found["reference norm"] ** 2
    )


def test_the_weights_do_not_move(one):
    assert one["moved"] == 0.0


def test_another_layout_finds_the_same(one):
    two = run_ranks(PROGRAM, "measure", 2, parallel={"tensor": 2, "expert": 2})
    assert two[0] == two[1]
    for case in ("half", "noisy"):
        for name in ("gradient norm", "reference norm", "cosine", "variance"):
            assert two[0][case][name] == pytest.approx(one[case][name], rel=1e-4), (case, name)
