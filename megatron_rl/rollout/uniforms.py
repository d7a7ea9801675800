"""The random numbers that responses are sampled with: one stream per response, one number per token."""

from __future__ import annotations

import numpy as np

BLOCK = 32  # numbers drawn at a time; the sequence does not depend on it


class UniformStream:
    """Uniform numbers in [0, 1), multiples of 2⁻⁵³, from a Philox counter that is keyed by ``seed`` (64 bits)."""

    def __init__(self, seed: int):
        self._random = np.random.Generator(np.random.Philox(key=seed))
        self._drawn: list[float] = []

    def next(self) -> float:
        if not self._drawn:
            self._drawn = self._random.random(BLOCK)[::-1].tolist()
        return self._drawn.pop()
