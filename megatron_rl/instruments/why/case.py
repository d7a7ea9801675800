"""A run as the causes see it: its records up to the sign, its recipe, and what departed before what."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from megatron_rl.instruments.why.changed import ABSENT, value_at
from megatron_rl.instruments.why.departures import AFTER, FAILURES, JUMP, Change, Records
from megatron_rl.monitor.alarms import HELD_OUT, REWARD

Recipe = Mapping[str, Any]
FIRST = 10  # records that say what a run was like at its start
UP, DOWN = True, False
HIGHEST = 0.9  # rates above this share of the highest one count as the highest
UPDATE, KL, RHO, RATE = "noise/relative_update", "actor/ppo_kl", "mismatch/rho_std", "actor/lr"
ENTROPY, LENGTH, CUT = "actor/entropy", "response_length/mean", "response_length/clip_ratio"
POLICY = (REWARD, HELD_OUT, ENTROPY, LENGTH, CUT)  # what a first policy does

# Of tiny models: above what all healthy runs have, rounded up.
SAFE_UPDATE = 2e-3  # change of the weights in one update, relative to them
SAFE_KL = 0.02  # of a batch


@dataclass(frozen=True)
class Suspect:
    """One possible cause. ``excess``: a number over what is safe, weighed by what speaks for and against it; no
    probability. ``always``: something happened, it is no constant of the run. ``own``: the departure that it is
    suspected for; ``is_last``: another one comes before it. ``causes``: rows of the table (`causes.Cause`), of which
    ``name`` is made where metrics do not tell them apart; ``keys``, ``test`` and ``apart`` are theirs.
    """

    excess: float
    observation: str
    supports: tuple[str, ...] = ()
    contradicts: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    always: bool = False
    own: Change | None = None
    name: str = ""
    keys: tuple[str, ...] = ()
    apart: str = ""
    is_last: bool = False
    causes: tuple[str, ...] = ()


@dataclass
class Case:
    """A run as the causes see it. ``changed``: the keys that were changed before the sign.
    ``is_explained``: whether the first departure follows such a change at once.
    """

    records: Records
    recipe: Recipe
    sign: int | None = None
    changes: Sequence[Change] = ()
    changed: Sequence[str] = ()
    is_explained: bool = False

    @property
    def until_sign(self) -> Records:
        """The records up to the sign, and the five after it."""
        return self.records[: len(self.up_to(self.sign)) + 5]

    def up_to(self, step: int | None) -> Records:
        return [record for record in self.records if step is None or record["step"] <= step]

    def values(self, metric: str, until: int | None = None) -> list[float]:
        """The metric where it is there and finite, of the steps up to ``until``."""
        return [float(r[metric]) for r in self.up_to(until) if math.isfinite(r.get(metric, math.nan))]

    def first(self, metric: str) -> float | None:
        """The median of the first records."""
        return median(values) if (values := self.values(metric)[:FIRST]) else None

    @property
    def first_step(self) -> Change | None:
        """What a policy does otherwise than that of another run before anything was learned, and nobody changed."""
        start = int(self.records[0]["step"])
        found = [c for c in self.changes if c.step == start and c.metric in POLICY and not self.is_explained]
        return min(found, key=lambda change: change.stage, default=None)

    def at_the_highest_rate(self, metric: str) -> float | None:
        """The median of the first records at the highest learning rate up to the sign, or without rates of the first.

        A rate is set from outside, by a schedule or a changed recipe: a rise of it is no symptom.
        """
        highest = max(self.values(RATE, self.sign), default=0.0)
        return Case([r for r in self.records if r.get(RATE, highest) >= HIGHEST * highest], {}).first(metric)

    @property
    def is_sparse(self) -> bool:
        """Whether records are so far apart that what happens by and by seems to happen at once."""
        return median(b["step"] - a["step"] for a, b in pairwise(self.records)) > AFTER if self.records[1:] else False

    @property
    def updates_are_large(self) -> bool:
        """Whether updates may move the policy at once."""
        size, kl = self.at_the_highest_rate(UPDATE) or 0.0, self.at_the_highest_rate(KL) or 0.0
        return size > SAFE_UPDATE or kl > SAFE_KL

    def setting(self, path: str, default: Any = None) -> Any:
        """A key of the recipe."""
        value = value_at(self.recipe, path)
        return default if value in (None, ABSENT) else value

    def departed(self, metric: str, up: bool | None = None) -> Change | None:
        """The departure of ``metric`` (in this direction), if it is up to the sign and among the first of all."""
        if self.sign is None:
            return None
        steps = sorted({int(record["step"]) for record in self.records if record["step"] > self.sign})
        ends = (self.sign, *steps[AFTER - 1 : AFTER])  # a slow departure may be seen a little later than its sign
        early = next(filter(None, ([c for c in self.changes if c.step <= end] for end in ends)), [])
        # What departs first of all, and what jumps first of all that a policy can make.
        onsets = (*early[:1], *[c for c in early if c.is_jump and not c.is_foreign][:1])
        fits = [c for c in early if c.metric == metric and up in (None, c.after > c.before)]
        return sharpest([c for c in fits if c.is_foreign or any(0 <= self.between(o, c) <= AFTER for o in onsets)])

    def between(self, one: Change, other: Change) -> int:
        """How many records the first one is ahead of the other; below 0 where it is behind."""
        first, last = sorted((one.step, other.step))
        num = len({record["step"] for record in self.records if first <= record["step"] < last})
        return num if one.step <= other.step else -num

    def upstream(self, own: Change) -> Change | None:
        """The departure that comes before ``own``: earlier by more than `AFTER` records or by a jump, else in a step.

        What a policy does by and by comes before nothing that departs together with it.
        """

        def comes_before(change: Change) -> bool:
            earlier = self.between(change, own)
            if change.metric == own.metric or (own.is_foreign and not change.is_foreign):
                return False
            if -earlier > AFTER * (not self.is_sparse) or (earlier < 0 and own.is_jump):
                return False
            is_weak = change.margin < JUMP and own.is_jump  # chance, or too little for what came
            at_once = change.at_once or change.metric in FAILURES
            is_earlier = earlier > 0 and (change.is_jump or (earlier > AFTER and not is_weak))
            return is_earlier or (change.stage < own.stage and at_once)

        return next(filter(comes_before, self.changes), None)


def two(value: float) -> str:
    """Return two digits of a number: 250, where `.2g` has 2.5e+02."""
    return f"{float(f'{value:.2g}'):g}"


def sharpest(changes: Sequence[Change]) -> Change | None:
    """The first jump, or else the first."""
    return next((change for change in changes if change.is_jump), next(iter(changes), None))


def largest_fall(means: Sequence[float]) -> tuple[float, int]:
    """The largest fall between two neighbouring stretches of three, as a share of the range so far; its place.

    The range is from 0, or from the lowest value where that is less, to the best stretch. A fall within the noise of
    single steps is none.
    """
    best, largest, place = -math.inf, 0.0, 0
    for at in range(3, len(means) - 2):
        before, after = sum(means[at - 3 : at]) / 3, sum(means[at : at + 3]) / 3
        best = max(best, before)
        size = best - min(0.0, *means[: at + 3])
        noise = median(abs(b - a) for a, b in pairwise(means[:at]))
        if size > 0 and before - after > 2 * noise and (before - after) / size > largest:
            largest, place = (before - after) / size, at
    return largest, place


def highest(values: Sequence[float]) -> float:
    """The highest median of five neighbours."""
    return max((median(values[i : i + 5]) for i in range(len(values) - 4)), default=0.0)
