"""Why a run became unstable: what changed, what departed from the run's own healthy stretch, and what fits both.

What somebody changed comes first (`changed`), then the causes whose own measure departed in time (`causes`). The list
of causes is open: "no suspect fits" is a result, with the earliest departures and what was not measured. A suspect is
no verdict: an experiment that undoes it decides.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from megatron_rl.config.monitor import RISKS
from megatron_rl.instruments.why.case import Case, Suspect, two
from megatron_rl.instruments.why.causes import by_rank, suspects, together
from megatron_rl.instruments.why.changed import Event
from megatron_rl.instruments.why.departures import AFTER, BEFORE, WATCHED, Change, Records, departures, differences
from megatron_rl.monitor.alarms import (
    HELD_OUT,
    REWARD,
    Alarms,
    CollapseRule,
    completed,
    first_collapse,
    learned_by_heart,
)
from megatron_rl.monitor.run_directory import RunDirectory

AHEAD = 20  # records before the first sign in which a departure counts as the onset
AFTERWARDS = 20  # records beyond it that are looked at: what comes later is a consequence
LEVEL = 6  # records whose mean is a level of the reward
AT_ONCE = 10.0  # weight of a change that the first departure follows within `AFTER` records


@dataclass(frozen=True)
class Sign:
    """A rule that would go off, or a collapse, with the first step of it."""

    name: str
    step: int
    text: str


@dataclass(frozen=True)
class Finding:
    """All that is said of a run. Without a sign there are no changes and no suspects.

    ``changes``: departures. ``history``: what somebody changed. ``unmeasured``: watched metrics that the records lack.
    ``rises``: whether the reward ended above where it began; None where that is not known. ``since``: the step of the
    first record in which a departure counts, `AHEAD` records before the sign. ``is_compared``: departures are those
    from the curves of another run.
    """

    run: str
    steps: int
    collapse: int | None
    signs: tuple[Sign, ...]
    changes: tuple[Change, ...]
    suspects: tuple[Suspect, ...]
    history: tuple[Event, ...] = ()
    unmeasured: tuple[str, ...] = ()
    rises: bool | None = None
    since: int | None = None
    is_compared: bool = False

    @property
    def is_healthy(self) -> bool:
        return not self.signs

    @property
    def first_sign(self) -> int | None:
        """The step of the first sign of harm, or where there is none of a risk; None for a healthy run."""
        harm = [sign.step for sign in self.signs if sign.name not in RISKS]
        return min(harm or [sign.step for sign in self.signs], default=None)

    @property
    def changed_at(self) -> int | None:
        """The newest step up to the first sign from which something was in force that changes what is learned."""
        return max((e.step for e in self.made("strong") if e.step is not None), default=None)

    def made(self, weight: str) -> list[Event]:
        """What somebody changed up to the first sign."""
        return [e for e in self.history if e.weight == weight and (e.step or 0) <= (self.first_sign or 0)]

    @property
    def onset(self) -> int | None:
        """The step of the first departure up to the first sign, and not before what was changed last; without one the
        sign; None for a healthy run.
        """
        if (sign := self.first_sign) is None:
            return None
        least = max(self.changed_at or 0, sign - AHEAD if self.since is None else self.since)
        return min((change.step for change in self.changes if least <= change.step <= sign), default=sign)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"healthy": self.is_healthy, "onset": self.onset}


def find(
    name: str,
    records: Sequence[Mapping[str, float]],
    recipe: Mapping[str, Any],
    history: Sequence[Event] = (),
    good: Records | None = None,
) -> Finding:
    """What happened to a run, from its ``records``, its ``recipe`` as plain values, and what ``changed`` has of it.
    ``good``: the records of a run that it is held against, instead of its own healthy stretch.
    """
    records = completed(records)
    compared = () if good is None else differences(records, completed(good))
    collapse = first_collapse(records, CollapseRule())
    steps = sorted({int(record["step"]) for record in records if len(record) > 1})
    unmeasured = tuple(metric for metric in WATCHED if not any(metric in record for record in records))
    signs = _signs(records, recipe, collapse)
    if lower := [c for c in compared if c.metric in (REWARD, HELD_OUT)]:
        text = f"{lower[0].metric} is {two(lower[0].after)}, and {two(lower[0].before)} in the other run"
        signs = tuple(sorted((*signs, Sign("below-the-other", lower[0].step, text)), key=lambda sign: sign.step))
    seen = Finding(name, _num_steps(records), collapse, signs, compared, (), tuple(history), unmeasured)
    seen = replace(seen, is_compared=good is not None and bool(compared or not signs))
    if (sign := seen.first_sign) is None:
        return replace(seen, rises=_rises(records))
    at = max((i for i, step in enumerate(steps) if step <= sign), default=0)
    first, last = steps[max(0, at - AHEAD)], steps[min(len(steps) - 1, at + AFTERWARDS)]
    seen = replace(seen, since=first if seen.changed_at is None else min(first, seen.changed_at))
    if not seen.is_compared:
        changes = departures(records, seen.since, last)
        fell = None if any(c.metric == REWARD for c in changes) else _lasting_fall(records)
        seen = replace(seen, changes=tuple(sorted((*changes, *filter(None, [fell])), key=lambda change: change.step)))
    made, later = _made(seen, steps), [c for c in seen.changes if c.step >= (seen.changed_at or 0) or c.is_foreign]
    leading = [suspect for suspect in made if seen.changed_at is not None and not suspect.contradicts]
    is_late = not seen.is_compared and bool(leading) and leading[0].excess < AT_ONCE
    changed = [event.key for event in seen.made("strong")]
    others = suspects(Case(records, recipe, sign, later, changed, bool(leading) and not is_late))
    return replace(seen, suspects=_ranked(made, leading, others, is_late))


def _ranked(made: list[Suspect], first: list[Suspect], others: list[Suspect], is_late: bool) -> tuple[Suspect, ...]:
    """What somebody changed in what is learned comes ``first``, unless a departure was there before; where that was
    ``is_late``, together with what departed.
    """
    rest = [suspect for suspect in (*made, *others) if suspect not in first]
    if is_late and (own := next((suspect for suspect in others if suspect.own and not suspect.is_last), None)):
        first, rest = [together(first[0], own), *first[1:]], [suspect for suspect in rest if suspect is not own]
    return (*first, *by_rank(rest))


def _num_steps(records: Sequence[Mapping[str, float]]) -> int:
    """The steps that were made: a last validation has a record of its own."""
    return sum(REWARD in record or not any(name.startswith("val/") for name in record) for record in records)


def _rises(records: Sequence[Mapping[str, float]]) -> bool | None:
    """Whether the reward of the last tenth is above that of the first one by more than it moves between two steps."""
    values = [float(record[REWARD]) for record in records if REWARD in record]
    part = max(BEFORE, len(values) // 10)
    if len(values) < 2 * part:
        return None
    noise = median(abs(b - a) for a, b in pairwise(values)) / part**0.5
    return sum(values[-part:]) / part - sum(values[:part]) / part > 2 * noise


def _signs(records: Sequence[Mapping[str, float]], recipe: Mapping[str, Any], collapse: int | None) -> tuple[Sign, ...]:
    alarms = Alarms.of(recipe)
    first: dict[str, Sign] = {}
    for record in records:
        for event in alarms.observe(int(record["step"]), record):
            text = event.message.partition(": ")[2].partition("; then")[0]
            first.setdefault(event.name, Sign(event.name, event.step, text))
        for metric, value in record.items():
            name = metric.removeprefix("alarm/")
            if metric.startswith("alarm/") and value > 0 and name not in first:
                first[name] = Sign(name, int(record["step"]), "went off in the run")
    if collapse is not None:
        first["collapse"] = Sign("collapse", collapse, "the reward lost half of its range and stayed there")
    elif (step := learned_by_heart(records)) is not None:
        text = "the held-out reward fell while the training reward stayed near its best"
        first.setdefault("learned-by-heart", Sign("learned-by-heart", step, text))
    if first.keys() <= RISKS and (fell := _lasting_fall(records)) is not None:
        first["reward-fell"] = Sign("reward-fell", fell.step, "the reward lost a fifth, and did not come back")
    return tuple(sorted(first.values(), key=lambda sign: sign.step))


def _lasting_fall(records: Sequence[Mapping[str, float]]) -> Change | None:
    """Where the reward (mean of six) falls by a fifth of its range and seven standard errors, and stays below."""
    rows = [(int(r["step"]), float(r[REWARD])) for r in records if math.isfinite(r.get(REWARD, math.nan))]
    values = [value for _, value in rows]
    means = [sum(values[i : i + LEVEL]) / LEVEL for i in range(len(values) - LEVEL + 1)]
    for at in range(LEVEL, len(values) - 2 * LEVEL + 1):
        before, noise = means[at - LEVEL], median(abs(b - a) for a, b in pairwise(values[:at]))
        size = before - min(0.0, *values[: at + LEVEL])
        least = max(size / 5, 7 * noise * (2 / LEVEL) ** 0.5)
        if before - means[at] > least and before - max(means[at : at + AFTERWARDS - LEVEL + 1]) > size / 10:
            return Change(REWARD, rows[at][0], before, means[at], (before - means[at]) / least)
    return None


def _made(finding: Finding, steps: Sequence[int]) -> list[Suspect]:
    """What somebody changed before the sign, as suspects: the last first, all changes of a step together."""
    found: list[Suspect] = []
    for weight in ("strong", "weak"):
        known = [event for event in finding.made(weight) if event.step is not None]
        for step in sorted({event.step for event in known}, reverse=True):
            after = [change for change in finding.changes if change.step >= step]
            before = [change for change in finding.changes if change.step < step]
            begins = min((change.step for change in after), default=finding.first_sign)
            distance, is_strong = sum(step <= s < begins for s in steps), weight == "strong"
            if not is_strong and (found or (distance > AFTER and step > steps[0])):
                continue
            near = AFTER if is_strong else 1 if step > steps[0] else -1  # two runs always differ a little
            excess = AT_ONCE if distance <= near else AT_ONCE / 2 if distance <= AHEAD and is_strong else 1 + near / 4
            supports = [f"{c.metric}: {two(c.before)} → {two(c.after)} at step {c.step}" for c in after[:3]]
            against = [f"{c.metric} had departed at step {c.step}" for c in before[:1]]
            if distance > AFTER and (jump := next((c for c in after if c.step == begins and c.is_jump), None)):
                against.append(f"{jump.metric} jumped {distance} records after it, and was as before until then")
                excess = 1.0
            events = [event for event in known if event.step == step]
            name = f"{'/'.join(dict.fromkeys(event.kind for event in events))} change"
            text = f"from step {step} on: {'; '.join(map(str, events))}; the first departure is at step {begins}"
            test = tuple(f"{e.key}={json.dumps(e.old)}" for e in events if e.kind == "recipe")
            told, keys = (tuple(supports), tuple(against), test), tuple(event.key for event in events)
            found.append(Suspect(excess, text, *told, name=name, keys=keys, causes=(name,)))
    return found


def page(finding: Finding, run: Path | None, from_start: bool = False) -> str:
    """The finding as text. ``run``: its directory; None for a log of another project, which has no recipe.
    ``from_start``: no checkpoint is early enough for `run branch`, which then begins where the run began."""
    left = "the other run's curves (there → here)" if finding.is_compared else "the run's own healthy stretch"
    departed = [f"  step {c.step:>5}  {c.metric:<28}{two(c.before)} → {two(c.after)}" for c in finding.changes]
    departed = ["", f"What left {left}, in order:", *(departed or ["  nothing"] * finding.is_compared)]
    if finding.is_healthy:
        return "\n".join([*_well(finding), *(departed if finding.is_compared else [])])
    lines = [f"{finding.run}: {finding.steps} steps", *_changed(finding), "", "Suspects, the likeliest first:"]
    for rank, suspect in enumerate(finding.suspects, start=1):
        lines += _told(rank, suspect, run)
    if not finding.suspects:
        lines.append(f"  no suspect fits; the earliest departure is {_earliest(finding)}")
    if finding.unmeasured:
        lines.append(f"  not measured, so that nothing is said of it: {', '.join(finding.unmeasured)}")
    lines += ["", "What was seen, in order:"]
    lines += [f"  step {sign.step:>5}  {sign.name:<18}  {sign.text}" for sign in finding.signs]
    lines += departed
    if not (finding.changes or finding.is_compared):
        lines += [f"  nothing: {BEFORE} records before and {AFTER} after are needed, or it was there from the first on"]
    decides = "A run that undoes one of them, over several seeds, decides."
    if run is not None:
        start = " --from 0` (no checkpoint is as early as the onset)" if from_start else "`"
        decides = f"`megatron-rl run branch {run}{start} undoes each of them over several seeds, and decides."
    return "\n".join([*lines, "", f"These are suspects. {decides}"])


def _well(finding: Finding) -> list[str]:
    if REWARD in finding.unmeasured and HELD_OUT in finding.unmeasured:
        return [f"{finding.run}: {finding.steps} steps; cannot tell: the log has no reward, and no other rule went off"]
    lines = [f"{finding.run}: {finding.steps} steps, no rule went off and no reward collapsed: nothing to explain"]
    if finding.rises is False:
        text = "The reward did not rise, either: that is no sign of harm, and none of learning (rate, signal, data)."
        lines.append(text)
    return lines + _changed(finding) * any(event.weight != "none" for event in finding.history)


def _changed(finding: Finding) -> list[str]:
    """What somebody changed, beside the step of the first departure."""
    told = [event for event in finding.history if event.weight != "none" or event.kind == "resume"]
    lines = ["", "What differs from the other run, and changed:" if finding.is_compared else "What changed, and when:"]
    lines += [f"  step {'?' if e.step is None else e.step:>5}  {e.kind:<12}{e}" for e in told]
    lines += [] if told else ["  nothing that is on disk"]
    if not finding.is_healthy:
        lines.append(f"  the first departure: {_earliest(finding)}; the first sign: step {finding.first_sign}")
    return lines


def _earliest(finding: Finding) -> str:
    """The first departures, those of one step as a tie, and what followed."""
    steps = [change.step for change in finding.changes]
    ties = [change.metric for change in finding.changes if change.step == steps[0]]
    later = [f"{change.metric} ({change.step})" for change in finding.changes[len(ties) :]][:3]
    followed = f", followed by {', '.join(later)}" if later else ""
    return f"{' and '.join(ties)} at step {steps[0]}{followed}" if steps else "not found"


def begins_at_start(finding: Finding, run: Path) -> bool:
    """Return whether no complete checkpoint of the run is at or before the onset: `run branch` starts at step 0."""
    from megatron_rl.checkpoint.manifest import newest_checkpoint

    onset = finding.onset
    return onset is not None and newest_checkpoint(RunDirectory(run).checkpoints, onset) is None


def _told(rank: int, suspect: Suspect, run: Path | None) -> list[str]:
    lines = [f"  {rank}. {suspect.name}: {suspect.observation}"]
    lines += [f"       for: {text}" for text in suspect.supports]
    lines += [f"       against: {text}" for text in suspect.contradicts]
    lines.append(f"       keys: {', '.join(suspect.keys)}")
    lines += [f"       to tell: {suspect.apart.replace('RUN', str(run or 'RUN'))}"] if suspect.apart else []
    if suspect.test and run is None:
        lines.append(f"       test: the same run with {', '.join(suspect.test)} (docs/coming-from.json has your names)")
    elif suspect.test:
        name = f"{run.name}-{suspect.causes[0].replace(' ', '-').replace('/', '-')}"
        sets = " ".join(f"--set {shlex.quote(change)}" for change in suspect.test)
        lines.append(f"       test: megatron-rl train {run / 'recipe.resolved.yaml'} --set name={name} {sets}")
    return lines
