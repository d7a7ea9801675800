"""Timing of sides that are compared: in turns, within one process, by processor time unless another clock is given."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence


def alternate(
    num_rounds: int, sides: Mapping[str, Callable[[], object]], clock: Callable[[], float] = time.process_time
) -> dict[str, list[float]]:
    """Name → seconds per round. A round runs every side once, every second round the last side first; one round before
    the first does not count.

    ``clock``: processor time of this process by default, in which waiting for other programs is not; on an idle machine
    and where a side has processes of its own, `time.perf_counter`.
    """

    def seconds(side: Callable[[], object]) -> float:
        start = clock()
        side()
        return clock() - start

    rounds = []
    for number in range(num_rounds + 1):
        order = list(sides) if number % 2 == 0 else list(sides)[::-1]
        rounds.append({name: seconds(sides[name]) for name in order})
    return {name: [times[name] for times in rounds[1:]] for name in sides}


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(column) for name, column in times.items()}


def median_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Median of the ratios within a round, in which what slows a whole round down cancels."""
    return statistics.median(_ratios(times, others))


def spread(times: Sequence[float], others: Sequence[float]) -> str:
    """`median_ratio` and the middle half of the ratios, to print: ``1.05 (0.98 to 1.30)``."""
    ratios = _ratios(times, others)
    quarter = len(ratios) // 4
    return f"{statistics.median(ratios):.2f} ({ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f})"


def _ratios(times: Sequence[float], others: Sequence[float]) -> list[float]:
    return sorted(time / other for time, other in zip(times, others, strict=True))
