"""When each metric of a run left what it was in the run's own healthy stretch.

A metric departs at the first step from which three records in a row are outside of everything before: further from the
trend of the records before than any but the furthest of these was. A trend may excuse a value and never accuses one:
entropy that falls as the policy learns has not departed, and neither has entropy that stops falling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from statistics import median
from typing import Literal

Records = Sequence[Mapping[str, float]]

BEFORE = 4  # records that a metric needs before a departure
AFTER = 3  # and from it on; two where the log ends
BASELINE = 12  # newest records before a departure that it is held against
SLOW = 6  # records before a departure that are left out where a metric moves slowly
LITTLE = 10.0  # a value this many times below the first ones is as good as any below it
OUTSIDE = 1.5  # times the distance from the trend that the records before had
JUMP = 2.0  # margin of a departure that no small update makes
FOREIGN = 1  # last stage of a step that is not the policy's
TOGETHER = 6  # records for which a metric differs from that of another run


@dataclass(frozen=True)
class Change:
    """A metric's level is another from ``step`` on. ``before``, ``after``: medians on both sides.

    ``margin``: how far it went, over the distance from which it counts. ``at_once``: half of the way in one record.
    """

    metric: str
    step: int
    before: float
    after: float
    margin: float = 1.0
    at_once: bool = True

    @property
    def stage(self) -> int:
        return WATCHED[self.metric].stage

    @property
    def is_foreign(self) -> bool:
        """Whether no policy makes it: what is set, or engine and learner, by a jump."""
        return self.stage <= FOREIGN and self.margin >= JUMP

    @property
    def is_jump(self) -> bool:
        """Whether no small update makes it."""
        return self.at_once and self.margin >= JUMP


@dataclass(frozen=True)
class Watched:
    """How a metric tells of trouble. ``direction``: 1 up, -1 down, 0 either way.

    ``least``: the smallest departure: a factor (scale "factor"), a difference ("share"), or a part of the largest
    value ("level"). ``drifts``: learning moves it. ``stage``: its place in a step; what comes earlier in it moves what
    comes later.
    """

    direction: int
    scale: Literal["factor", "share", "level"] = "factor"
    least: float = 1.5
    drifts: bool = False
    stage: int = 0


FAILURES = ("reward/errors", "reward/timeouts", "reward/unscored_frac")

# The stages of a step, each with what is measured of it.
STAGES: tuple[dict[str, Watched], ...] = (
    {"actor/lr": Watched(0, drifts=True), "rollout/staleness_mean": Watched(1, "level", 0.5)},  # set from outside
    {"mismatch/rho_std": Watched(1, least=4.0), "router/agree_frac": Watched(-1, "share", 0.05)},  # engine, learner
    {  # what the policy makes of the prompts
        "actor/entropy": Watched(0, drifts=True),
        "response_length/mean": Watched(0, drifts=True),
        "response_length/clip_ratio": Watched(1, "share", 0.1),
        "response/repetition_frac": Watched(1, "share", 0.1),
    },
    dict.fromkeys(FAILURES, Watched(1, "level", 0.25)),
    dict.fromkeys(("critic/rewards/mean", "val/reward/mean"), Watched(-1, "level", 0.25)),
    {"groups/no_signal_frac": Watched(1, "share", 0.3, drifts=True)},
    {  # the update
        "actor/ppo_kl": Watched(1, least=2.0),
        "actor/pg_clipfrac": Watched(1, "share", 0.1),
        "actor/grad_norm": Watched(0, least=2.0, drifts=True),
        "noise/relative_update": Watched(1),
        "actor/update_skipped": Watched(1, "share", 0.2),
    },
)
WATCHED = {name: replace(watched, stage=n) for n, stage in enumerate(STAGES) for name, watched in stage.items()}


def trend(values: Sequence[float]) -> float:
    """The median of the slopes between all pairs of ``values`` (Theil and Sen); 0 for fewer than three."""
    pairs = combinations(range(len(values)), 2)
    return median((values[j] - values[i]) / (j - i) for i, j in pairs) if len(values) > 2 else 0.0


def departure(
    metric: str, steps: Sequence[int], values: Sequence[float], first: int, last: int, only_jumps: bool = False
) -> Change | None:
    """The earliest departure of a series from step ``first`` to ``last``; None where there is none.

    Values that are not finite count as larger than every other.
    """
    watched = WATCHED[metric]
    x, y, least = _scaled(values, watched)
    for at in range(BEFORE, len(y) - 1):
        if not (first <= steps[at] <= last and least > 0):
            continue
        margin = _margin(y, at, least, watched)
        if not margin and not watched.drifts and at >= BEFORE + SLOW:  # its newest records are part of a slow fall
            margin = _margin([*y[: at - SLOW], *y[at:]], at - SLOW, least, watched)
        if margin:
            before, after = median(x[max(0, at - BASELINE) : at]), median(x[at : at + 2 * AFTER])
            start, end = median(y[max(0, at - BASELINE) : at]), median(y[at : at + 2 * AFTER])
            if abs(end - start) < least:  # now and then
                after, end = x[at], y[at]
            at_once = abs(y[at] - median(y[at - AFTER : at])) >= abs(end - start) / 2
            change = Change(metric, int(steps[at]), before, after, margin, at_once)
            if change.is_jump or not only_jumps:
                return change
    return None


def _scaled(values: Sequence[float], watched: Watched) -> tuple[list[float], list[float], float]:
    """Finite values, these on the metric's scale, and the least departure on it: 0 where nothing can depart."""
    known = [value for value in values if math.isfinite(value)]
    top = max(known, default=0.0)
    x = [value if math.isfinite(value) else top + abs(top) + 1.0 for value in map(float, values)]
    if watched.scale != "factor":
        return x, x, watched.least * (max(map(abs, known), default=0.0) if watched.scale == "level" else 1.0)
    positive = [value for value in x if value > 0]
    floor = max(min(positive, default=1.0) / watched.least**3, median(x[:BEFORE]) / LITTLE if x else 0.0)
    return x, [math.log(max(value, floor)) for value in x], math.log(watched.least) if positive else 0.0


def _margin(y: Sequence[float], at: int, least: float, watched: Watched) -> float:
    """How far outside the records from ``at`` on are, over the least distance that counts; 0 where they are not."""
    base, later = y[max(0, at - BASELINE) : at], y[at : at + AFTER]
    slope = trend(base) if watched.drifts else 0.0
    middle, center = (len(base) - 1) / 2, median(base)
    distances = sorted(abs(value - center - slope * (place - middle)) for place, value in enumerate(base))
    least = max(least, OUTSIDE * (distances[-2] if len(base) > BEFORE + 1 else distances[-1]))
    level = median(base[-BEFORE - 2 :])
    expected = sorted((level, level + slope * (BEFORE + AFTER) / 1.5))

    def outside(values: Sequence[float]) -> float:
        up, down = min(values) - expected[1], expected[0] - max(values)
        return (up if watched.direction > 0 else down if watched.direction < 0 else max(up, down)) / least

    # Now and then: the first and two of the next eight records, if they are far out.
    rest = sorted(y[at + 1 : at + 3 * AFTER])
    far = max((outside([y[at], *some]) for some in (rest[:2], rest[-2:]) if len(some) == 2), default=0.0)
    margin = max(outside(later), far if far >= JUMP else 0.0)
    return margin if margin > 1 else 0.0


def departures(records: Records, first: int, last: int) -> tuple[Change, ...]:
    """The departures of all watched metrics from step ``first`` to ``last``, the earliest first.

    A metric that departs by and by may jump later. Where engine and learner part, it counts however early it was.
    """
    found: list[Change | None] = []
    for metric, watched in WATCHED.items():
        rows = [(int(record["step"]), float(record[metric])) for record in records if metric in record]
        if not rows:
            continue
        series = metric, *zip(*rows, strict=True)
        found.append(change := departure(*series, first, last))
        if change and not change.is_jump:
            later = [step for step, _ in rows if step > change.step][AFTER:]  # what goes on falling is no jump
            found += [departure(*series, later[0], last, True)] if later else []
        found += [departure(*series, 0, first - 1, True)] if watched.stage == FOREIGN else []
    return tuple(sorted(filter(None, found), key=lambda change: change.step))


def differences(records: Records, good: Records) -> tuple[Change, ...]:
    """Where each watched metric left that of the same steps of another run, the earliest first.

    It differs from the first step on from which `TOGETHER` records do, in the median by more than counts, and than the
    other run moves from one record to the next; one of six may differ by less than half of that. ``before``: the level
    of the other run.
    """
    found = []
    for metric, watched in WATCHED.items():
        there = {int(r["step"]): r[metric] for r in good if metric in r}
        both = [record for record in records if metric in record and record["step"] in there]
        if len(both) < AFTER:
            continue
        x, y, least = _scaled([there[int(r["step"])] for r in both] + [r[metric] for r in both], watched)
        others, ours, num = y[: len(both)], y[len(both) :], min(TOGETHER, len(both) // 2 + 1)
        least = max(least * (1 + watched.drifts), 2 * median(abs(b - a) for a, b in pairwise(others)))
        signs = (watched.direction,) if watched.direction else (1, -1)
        for at, sign in product(range(len(both) - num + 1), signs if least else ()):
            gaps = [sign * (a - b) for a, b in zip(ours[: at + num], others[: at + num], strict=True)]
            apart, far = gaps[at:], median(gaps[at:])
            if min(apart[0], sorted(apart)[num // TOGETHER]) > least / 2 and far > least:
                levels = (median(x[first + at : first + at + num]) for first in (0, len(both)))
                at_once = apart[0] - median(gaps[max(0, at - AFTER) : at] or [0.0]) >= far / 2
                found.append(Change(metric, int(both[at]["step"]), *levels, far / least, at_once))
                break
    return tuple(sorted(found, key=lambda change: change.step))
