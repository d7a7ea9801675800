"""Timing of sides that are compared: in turns, within one process, by processor time unless another clock is given."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence


def alternate(
    num_rounds: int, sides: Mapping[str, Callable[[], object]], clock: Callable[[], float] = time.process_time
) -> dict[str, list[float]]:
    """Name → seconds per round. A round runs every side once; one round before the first does not count.

    ``clock``: processor time of this process by default, in which waiting for other programs is not; on an idle machine
    and where a side has processes of its own, `time.perf_counter`.
    """

    def seconds(side: Callable[[], object]) -> float:
        start = clock()
        side()
        return clock() - start

    rounds = [{name: seconds(side) for name, side in sides.items()} for _ in range(num_rounds + 1)][1:]
    return {name: [times[name] for times in rounds] for name in sides}


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(column) for name, column in times.items()}


def median_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Median of the ratios within a round, in which what slows a whole round down cancels."""
    return statistics.median(time / other for time, other in zip(times, others, strict=True))
