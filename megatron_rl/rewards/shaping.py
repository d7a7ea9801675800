"""Soft penalty for responses near the length limit."""

from __future__ import annotations


def overlong_penalty(length: int, max_response_length: int, buffer: int, penalty: float) -> float:
    """Return the addition to the reward of a response of ``length`` tokens [DAPO, soft overlong punishment].

    min(-(T - (L - buffer)) / buffer · penalty, 0) with T = ``length`` and L = ``max_response_length``.
    """
    return min(-(length - (max_response_length - buffer)) / buffer * penalty, 0.0)
