"""Response lengths of a benchmark, drawn once and the same for every program that is compared."""

from __future__ import annotations

import random

FIXED = 64


def response_lengths(kind: str, count: int, longest: int, step: int) -> list[int]:
    """``fixed``: all 64, or ``longest`` where that is less. ``tail``: log-normal with median ``longest``/16 and σ = 1,
    cut to [1, longest]: mean ≈ 0.10·longest, one in 360 at the limit, as of a model that has begun to reason."""
    if kind == "fixed":
        return [min(longest, FIXED)] * count
    rng = random.Random(step)
    return [min(longest, max(1, round(longest / 16 * rng.lognormvariate(0.0, 1.0)))) for _ in range(count)]
