"""A run as the causes see it: its records up to the sign, its recipe, and what departed before what."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from megatron_rl.instruments.why.changed import ABSENT, value_at
from megatron_rl.instruments.why.departures import AFTER, FAILURES, JUMP, Change, Records
from megatron_rl.monitor.alarms import HELD_OUT, REWARD

Recipe = Mapping[str, Any]
FIRST = 10  # records that say what a run was like at its start
UP, DOWN = True, False
HIGHEST = 0.9  # rates above this share of the highest one count as the highest
UPDATE, KL, RHO, AGE = "noise/relative_update", "actor/ppo_kl", "mismatch/rho_std", "rollout/staleness_mean"
GRADIENT, ENTROPY = "actor/grad_norm", "actor/entropy"
LENGTH, CUT = "response_length/mean", "response_length/clip_ratio"
POLICY = (REWARD, HELD_OUT, ENTROPY, LENGTH, CUT)  # what a first policy does

# Of tiny models: above what all healthy runs have, rounded up.
SAFE_UPDATE = 2e-3  # change of the weights in one update, relative to them
SAFE_KL = 0.02  # of a batch


@dataclass(frozen=True)
class Seen:
    """``excess``: a number of a run over the constant that is safe, weighed by what speaks for and against it."""

    excess: float
    text: str
    supports: tuple[str, ...] = ()
    contradicts: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    always: bool = False  # not a constant of the run: something happened at a step
    own: Change | None = None  # what happened


@dataclass
class Case:
    """A run as the causes see it. ``changed``: the keys that were changed before the sign."""

    records: Records
    recipe: Recipe
    sign: int | None = None
    changes: Sequence[Change] = ()
    changed: Sequence[str] = ()

    @property
    def until_sign(self) -> Records:
        """The records up to the sign, and the five after it."""
        num = sum(self.sign is None or record["step"] <= self.sign for record in self.records)
        return self.records[: num + 5]

    def values(self, metric: str, until: int | None = None) -> list[float]:
        """The metric where it is there and finite, of the steps up to ``until``."""
        rows = [r for r in self.records if metric in r and (until is None or r["step"] <= until)]
        return [float(r[metric]) for r in rows if math.isfinite(r[metric])]

    def first(self, metric: str) -> float | None:
        """The median of the first records."""
        return median(values) if (values := self.values(metric)[:FIRST]) else None

    @property
    def first_step(self) -> Change | None:
        """What a policy does otherwise than that of another run before anything was learned."""
        start = int(self.records[0]["step"])
        found = [change for change in self.changes if change.step == start and change.metric in POLICY]
        return min(found, key=lambda change: change.stage, default=None)

    def at_the_highest_rate(self, metric: str) -> float | None:
        """The median of the first records at the highest learning rate up to the sign, or without rates of the first.

        A rate is set from outside, by a schedule or a changed recipe: a rise of it is no symptom.
        """
        highest = max(self.values("actor/lr", self.sign), default=0.0)
        return Case([r for r in self.records if r.get("actor/lr", highest) >= HIGHEST * highest], {}).first(metric)

    @property
    def samples_moved(self) -> bool:
        """Whether what the policy writes or earns is among the first departures."""
        return any(self.departed(metric) for metric in (REWARD, LENGTH, CUT))

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
        onset = min((change.step for change in self.changes if change.step <= self.sign), default=self.sign)
        steps = sorted({int(record["step"]) for record in self.records})
        last = min(self.sign, next((s for s in steps[steps.index(onset) + AFTER :]), self.sign))
        ways = (up,) if up is not None else (UP, DOWN)
        fits = (c for c in self.changes if c.metric == metric and (c.after > c.before) in ways)
        return next((c for c in fits if c.step <= (self.sign if c.is_foreign else last)), None)

    def upstream(self, own: Change) -> Change | None:
        """The departure that comes before ``own``: earlier by more than `AFTER` records or by a jump, else in a step.

        What a policy does by and by comes before nothing that departs together with it.
        """
        steps = sorted({int(record["step"]) for record in self.records})

        def is_earlier(one: Change, other: Change) -> bool:
            between = sum(one.step <= step < other.step for step in steps)
            return between > AFTER or (between > 0 and one.margin >= JUMP and one.at_once)

        def comes_before(change: Change) -> bool:
            if change.metric == own.metric or is_earlier(own, change) or (own.is_foreign and not change.is_foreign):
                return False
            at_once = change.at_once or change.metric in FAILURES
            return is_earlier(change, own) or (change.stage < own.stage and at_once)

        return next(filter(comes_before, self.changes), None)


def two(value: float) -> str:
    """Return two digits of a number: 250, where `.2g` has 2.5e+02."""
    return f"{float(f'{value:.2g}'):g}"
