"""Bounds on rounding, derived from the computation that a test compares and not from what one machine met."""

from __future__ import annotations

import math

import numpy as np


def bound_from_double(single: np.ndarray, double: np.ndarray, longest_sum: int) -> float:
    """Largest rounding error of another correct evaluation of the same function in the precision of ``single``.

    ``single`` and ``double`` are one implementation's results, in the tested precision and in float64. Their largest
    difference is the error of that implementation, with the conditioning of the function (temperature, depth, softmax)
    in it. Implementations differ in the order of their sums: the error of a sum of n terms grows like sqrt(n) if it is
    added one by one, and stays near one rounding if it is added pairwise (Higham, Accuracy and Stability of Numerical
    Algorithms, ch. 4). So another order enlarges the error by sqrt(n) at most, with n = ``longest_sum``.
    """
    error = float(np.abs(np.asarray(single, np.float64) - np.asarray(double, np.float64)).max())
    return math.sqrt(longest_sum) * error
