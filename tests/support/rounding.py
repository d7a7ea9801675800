"""Bounds on rounding, derived from the computation that a test compares and not from what one machine met.

Each says what it assumes. A result that is not within its bound is wrong, or is computed by other steps than the test
states; a bound is never raised to what a machine shows.

- The same code in the same order: ``==``, no bound.
- A closed form of a known number of steps: `rounded`, `assert_rounded` (worst case, any order).
- The same function by other code, in another order, on another layout: `bound_from_double`, `assert_as_double`.
- A mean of random draws: `standard_errors`.
- A figure of a paper or a standard table: `printed`.

A tolerance that is no rounding is a statement about a method: tests/unit/support/test_tolerances.py lists them.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

CLOSED_FORM = 64
"""Roundings in the longest of the closed forms worked by hand in the tests: sums of a dozen terms, a few functions."""

FEW = 1000
"""Numbers of a result whose largest error is no typical one."""

STANDARD_ERRORS = 5
"""A normal mean is further off than this once in 1.7 million draws of a seed."""


def unit_roundoff(dtype: torch.dtype = torch.float64) -> float:
    """Largest relative error of one rounding to ``dtype``: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def gamma(roundings: float, dtype: torch.dtype = torch.float64) -> float:
    """Largest relative error of a product of ``roundings`` factors 1 + δ: γ_n = n u / (1 - n u).

    Higham, Accuracy and Stability of Numerical Algorithms, Lemma 3.1: the worst case, for any order of a sum of n
    terms. Functions such as exp and log, which libraries give to within 4 units of the last place, count as eight.
    """
    total = roundings * unit_roundoff(dtype)
    assert total < 1, f"{roundings} roundings leave no digit of {dtype}"
    return total / (1 - total)


def rounded(expected: Any, roundings: float = CLOSED_FORM, scale: float = 1.0, dtype: torch.dtype = torch.float64):
    """What ``expected`` may be after ``roundings`` roundings in ``dtype``; for ``found == rounded(expected)``.

    ``expected`` is a number, or a list, dict or array of numbers. ``scale`` is the size of the terms of its sums: where
    they cancel, the error stays that of the terms and not that of the small result.
    """
    error = gamma(roundings, dtype)
    return pytest.approx(expected, rel=error, abs=error * scale)


def assert_rounded(
    computed: torch.Tensor,
    expected: torch.Tensor,
    roundings: float = CLOSED_FORM,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> None:
    """`rounded` for tensors: every element within γ_n of ``dtype``, relative, or of ``scale``."""
    error = gamma(roundings, dtype)
    torch.testing.assert_close(computed.double(), expected.double(), rtol=error, atol=error * scale)


def bound_from_double(single: np.ndarray, double: np.ndarray, longest_sum: int) -> float:
    """Largest rounding error of another correct evaluation of the same function in the precision of ``single``.

    ``single`` and ``double`` are one implementation's results, in the tested precision and in float64. Their largest
    difference is the error of that implementation, with the conditioning of the function (temperature, depth, softmax)
    in it. Implementations differ in the order of their sums: the error of a sum of n terms grows like sqrt(n) if it is
    added one by one, and stays near one rounding if it is added pairwise (Higham, Accuracy and Stability of Numerical
    Algorithms, ch. 4; Higham and Mary 2019, Thm 2.4: sqrt(n) u holds with a probability near 1). So another order
    enlarges the error by sqrt(n) at most, with n = ``longest_sum``. Two evaluations, neither of them the one in
    float64, differ by twice the bound at most.
    """
    error = float(np.abs(np.asarray(single, np.float64) - np.asarray(double, np.float64)).max())
    return math.sqrt(longest_sum) * error


def norm_from_double(single: np.ndarray, double: np.ndarray, longest_sum: int) -> float:
    """`bound_from_double` of a whole array: the norm of the difference of another evaluation, for sums in any order."""
    return math.sqrt(longest_sum) * float(
        np.linalg.norm(np.asarray(single, np.float64) - np.asarray(double, np.float64))
    )


def adam_first_update(gradient_error: float, lr: float, eps: float) -> float:
    """By how much Adam's first update may move, in norm, where its gradient moves by ``gradient_error``.

    The update is lr g / (|g| + eps), element by element, whose slope lr eps / (|g| + eps)² is lr / eps at most: Adam
    makes any gradient, if it is all rounding and far below eps = 1e-8, an update of size lr.
    """
    return lr / eps * gradient_error


def adam_largest_update(number: int, lr: float, beta1: float, beta2: float) -> float:
    """How far update ``number`` (from 1 on) of Adam moves a weight at most, whatever its gradients were.

    It is lr m / sqrt(v) with m = Σ a_i g_i and v = Σ b_i g_i² and the weights of corrected means, each of sum 1; by
    Cauchy and Schwarz |m| <= sqrt(Σ a_i² / b_i) sqrt(v).
    """
    a, b = ([(1 - beta) * beta**i / (1 - beta**number) for i in range(number)] for beta in (beta1, beta2))
    return lr * math.sqrt(sum(x * x / y for x, y in zip(a, b, strict=True)))


def assert_as_double(
    computed: Sequence[torch.Tensor],
    function: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    longest_sum: int,
    roundings: float = 1,
) -> None:
    """``computed`` is ``function(*inputs)`` as correct code in the inputs' types gives it.

    ``function`` is the same steps in plain operations of torch; it is run in the inputs' types and in float64, and
    `bound_from_double` of the two bounds each result, together with ``roundings`` roundings of its largest value to the
    type of ``found``: one, of the result as it is stored, or more where ``found`` stores what the composition does not.
    Of `FEW` numbers all may happen to be rounded well on one processor and not on another: the error of the composition
    is then the largest for ``inputs`` and others near them.
    """
    doubles = [x.detach().double().cpu().numpy() for x in function(*_widened(inputs))]
    errors = _errors(function, inputs)
    if min(x.size for x in doubles) <= FEW:
        largest = np.max([errors, *(_errors(function, x) for x in _near(inputs))], axis=0)
        errors = [few if x.size <= FEW else error for x, few, error in zip(doubles, largest, errors, strict=True)]
    for number, (found, double, error) in enumerate(zip(computed, doubles, errors, strict=True)):
        stored = gamma(roundings, found.dtype) * float(np.abs(double).max())
        bound = bound_from_double(error, 0, longest_sum) + stored
        off = float(np.abs(found.detach().double().cpu().numpy() - double).max())
        assert off <= bound, f"result {number}: {off:.2e} from float64's, bound {bound:.2e}"


def _widened(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]


def _errors(function: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]) -> list[float]:
    """By how much each result of ``function`` in the inputs' types differs from that in float64."""
    pairs = zip(function(*inputs), function(*_widened(inputs)), strict=True)
    return [float((single.detach().double() - double.detach()).abs().max()) for single, double in pairs]


def _near(inputs: Sequence[torch.Tensor], number: int = 7) -> Iterator[list[torch.Tensor]]:
    """Inputs whose elements lie within some percent of those of ``inputs``; zeros and infinities stay."""
    random = torch.Generator().manual_seed(0)
    for _ in range(number):
        yield [
            (x.detach().cpu().double() * (1 + torch.randn(x.shape, generator=random, dtype=torch.float64) / 64))
            .to(x)
            .requires_grad_(x.requires_grad)
            for x in inputs
        ]


def standard_errors(std: float, draws: int) -> float:
    """How far the mean of ``draws`` independent values of standard deviation ``std`` may lie from its expectation."""
    return STANDARD_ERRORS * std / math.sqrt(draws)


def printed(expected: float, decimals: int):
    """``expected`` as a paper or a table prints it, with that many decimals: half a unit of the last one."""
    return pytest.approx(expected, rel=0, abs=0.5 * 10.0**-decimals)
