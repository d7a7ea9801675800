"""The digit-sum task: a problem that a one-million-parameter model can learn, and can learn to think about.

A problem is ``^2413=``: some digits in a small base between a caret and an equals sign. Its answer is the sum of the
digits modulo the base, one digit. A response is free text; what follows its last ``#`` is the answer. Two ways of
answering exist, and the length of a response is therefore the policy's own choice:

* at once: ``#0``. A tiny model is hardly better than chance at that.
* step by step: every digit followed by the running sum so far, then the answer: ``22411230`` + ``#0`` is the
  response to ``^2413=``, to be read in pairs. Long, but each step is easy.

Demonstrations mix the two and slip on purpose with a given probability, so that a model trained on them is
imperfect in two ways that reinforcement learning can mend: by choosing to think, and by not slipping.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

ANSWER_MARK = "#"


@dataclass(frozen=True)
class ModsumProblem:
    """One problem. Example: ``ModsumProblem(digits=(2, 4, 1, 3), base=5)`` reads ``^2413=`` and its answer is ``0``."""

    digits: tuple[int, ...]
    base: int = 5

    @property
    def text(self) -> str:
        return "^" + "".join(str(digit) for digit in self.digits) + "="

    @property
    def answer(self) -> str:
        return str(sum(self.digits) % self.base)


def make_problem(rng: random.Random, *, min_digits: int = 3, max_digits: int = 7, base: int = 5) -> ModsumProblem:
    """Draw a problem: its number of digits uniformly from ``min_digits … max_digits``, then each digit uniformly."""
    num_digits = rng.randint(min_digits, max_digits)
    return ModsumProblem(digits=tuple(rng.randrange(base) for _ in range(num_digits)), base=base)


def make_demonstration(rng: random.Random, problem: ModsumProblem, *, think_prob: float, slip_prob: float) -> str:
    """Write a response to imitate, not always a right one.

    With probability ``think_prob`` it works step by step, and then each running sum after the first is replaced with
    probability ``slip_prob`` by another digit, from which the later sums go on, as after a real mistake. Otherwise it
    answers at once, correctly.
    """
    if rng.random() >= think_prob:
        return ANSWER_MARK + problem.answer
    running, steps = 0, []
    for position, digit in enumerate(problem.digits):
        running = (running + digit) % problem.base
        if position > 0 and rng.random() < slip_prob:
            running = (running + rng.randrange(1, problem.base)) % problem.base
        steps.append(f"{digit}{running}")
    return "".join(steps) + ANSWER_MARK + str(running)


def modsum_reward(response: str, answer: str) -> float:
    """1.0 where the text after the last ``#`` of ``response`` is exactly ``answer``, else 0.0.

    ``response`` is decoded without special tokens. A response without a mark, or with anything after the digit, is
    wrong. Pure and total: it never raises on any two strings.
    """
    _, mark, final = response.rpartition(ANSWER_MARK)
    return float(bool(mark) and final == answer)
