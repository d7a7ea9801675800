"""Timing of sides that are compared: in turns, within one process.

On a CPU processor time counts, in which waiting for other programs is not. Where torch has used a GPU it is wall-clock
time, after the GPU has done all that it was given.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

Clock = Callable[[], float]


def wall() -> float:
    """Seconds, once the GPU has done what it was given, where torch has used one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def counted() -> tuple[str, Clock]:
    """The clock that counts here, and its name."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return "wall clock", wall
    return "processor time", time.process_time


def alternate(
    num_rounds: int, sides: Mapping[str, Callable[[], object]], clock: Clock | None = None
) -> dict[str, list[float]]:
    """Name → seconds per round. A round runs every side once, every second round the last side first; one round before
    the first does not count.

    ``clock``: the one of `counted` by default; on an idle machine and where a side has processes of its own, `wall`.
    """
    return by_clock(num_rounds, sides, {"": clock or counted()[1]})[""]


def by_clock(
    num_rounds: int, sides: Mapping[str, Callable[[], object]], clocks: Mapping[str, Clock]
) -> dict[str, dict[str, list[float]]]:
    """As `alternate`, by each of ``clocks`` in the same rounds."""

    def seconds(side: Callable[[], object]) -> dict[str, float]:
        start = {name: clock() for name, clock in clocks.items()}
        side()
        return {name: clock() - start[name] for name, clock in clocks.items()}

    rounds = []
    for number in range(num_rounds + 1):
        order = list(sides) if number % 2 == 0 else list(sides)[::-1]
        rounds.append({name: seconds(sides[name]) for name in order})
    return {clock: {name: [times[name][clock] for times in rounds[1:]] for name in sides} for clock in clocks}


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
