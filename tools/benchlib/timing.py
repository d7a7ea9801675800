"""Timing of sides that are compared: in turns, within one process, by processor time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence


def processor_seconds(function: Callable[[], object]) -> float:
    """Processor time of this process while ``function`` runs: waiting for other programs is not in it."""
    start = time.process_time()
    function()
    return time.process_time() - start


def alternate(num_rounds: int, sides: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Name → processor seconds per round. A round runs every side once; one round before the first does not count."""
    rounds = [{name: processor_seconds(side) for name, side in sides.items()} for _ in range(num_rounds + 1)][1:]
    return {name: [times[name] for times in rounds] for name in sides}


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(column) for name, column in times.items()}


def median_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Median of the ratios within a round, in which what slows a whole round down cancels."""
    return statistics.median(time / other for time, other in zip(times, others, strict=True))
