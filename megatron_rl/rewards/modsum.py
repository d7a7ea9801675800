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

ANSWER_MARK = "#"


def modsum_reward(response: str, answer: str) -> float:
    """Return 1.0 if the text after the last ``#`` of ``response`` is exactly ``answer``, else 0.0.

    ``response`` is decoded without special tokens. A response without a mark, or with anything after the digit, is
    wrong. It never raises for two strings.
    """
    _, mark, final = response.rpartition(ANSWER_MARK)
    return float(bool(mark) and final == answer)
