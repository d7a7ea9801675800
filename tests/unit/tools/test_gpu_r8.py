"""The word problems of the learning curve: solutions are right unless they slip, and a run has room for them."""

import random

from megatron_rl.rewards.math_task import math_verdict
from tools.gpu.r8 import LONGEST, SLIP, problem


def rewards(slip: float) -> list[float]:
    chance, found = random.Random(0), []
    for _ in range(300):
        text, solution, answer = problem(chance, slip)
        assert len(text) < 128
        assert len(solution) < LONGEST
        found.append(math_verdict(solution, answer))
    return found


def test_solutions_are_right_unless_they_slip():
    assert set(rewards(0.0)) == {1.0}
    assert 0.2 < sum(rewards(SLIP)) / 300 < 0.6
