"""Groups of one call as they become complete: filled by the event loop's thread, emptied by the main thread.

There is one event a group, whatever the number of its tokens.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any


class Arrivals:
    """Answers of one call by group. ``places``: the group of each request. ``news`` is notified of complete groups."""

    def __init__(self, places: Sequence[int], news: threading.Condition) -> None:
        self._news, self._places = news, places
        self._first: dict[int, int] = {}  # group → number of its first request
        self._missing: dict[int, int] = {}
        for number, place in enumerate(places):
            self._first.setdefault(place, number)
            self._missing[place] = self._missing.get(place, 0) + 1
        self._size = dict(self._missing)
        self._answers: dict[int, Any] = {}  # by number of the request
        self._complete: deque[tuple[int, float]] = deque()  # group, clock

    def answered(self, number: int, answer: Any) -> None:
        """Request ``number`` has been answered; the samples of a group are next to each other."""
        place = self._places[number]
        with self._news:
            self._answers[number] = answer
            self._missing[place] -= 1
            if not self._missing[place]:
                self._complete.append((place, time.perf_counter()))
                self._news.notify_all()

    def __bool__(self) -> bool:
        """Whether a complete group waits to be taken."""
        return bool(self._complete)

    def take(self) -> list[tuple[int, list[Any], float]]:
        """Place, answers and age in seconds of the groups that are complete and were not taken, in that order."""
        with self._news:
            complete, self._complete, now = self._complete, deque(), time.perf_counter()
            taken = []
            for place, at in complete:
                numbers = range(self._first[place], self._first[place] + self._size[place])
                taken.append((place, [self._answers.pop(number) for number in numbers], now - at))
            return taken

    def left(self) -> list[Any]:
        """Answers that were not taken: those of incomplete groups too."""
        with self._news:
            return list(self._answers.values())
