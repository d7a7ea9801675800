"""What changed in a run, step by step, from what it has on disk; and in what two runs differ.

A cause that somebody made is written down: a recipe is kept with the step from which it was in force, and each start
writes its versions, machine and variables, and digests of the files that the recipe names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

from megatron_rl.instruments.departures import AFTER, BEFORE, Records
from megatron_rl.monitor.run_directory import RunDirectory
from megatron_rl.run.identity import ABSENT, Change, differences, read_recipe, recipe_changes, recipes_of

# Of what may change between starts: what a run cannot learn otherwise from. A file's contents are compared as such.
INERT = ("name", "run_root", "num_steps", "data.cache", "checkpoint.*", "monitor.*", "recorder.*", "validation.*")
INERT += ("learner.max_consecutive_overflows", "rollout.deadline_s", "reward.max_error_frac.*")
LEARNS = ("model.path", "data.train")  # files that another recipe may name: what they hold is another thing
STARTS = ("versions", "patches", "git.commit", "hardware", "variables", "python")  # of environment.json
IDLE = ("SLURM_", "variables.MASTER_")  # another job is no other environment
SERVERS = ("rollout/servers", "rollout/servers/lost")
CURVES = 12  # curves that a comparison of two runs names


@dataclass(frozen=True)
class Event:
    """Something that became another at ``step`` (None: nobody wrote when). ``weight``: "strong" where it changes what
    is learned, "weak" where it may, "none" where it cannot.
    """

    step: int | None
    kind: Literal["recipe", "file", "environment", "resume", "rollback", "servers"]
    key: str
    old: Any = None
    new: Any = None
    weight: Literal["strong", "weak", "none"] = "strong"

    def __str__(self) -> str:
        return (
            f"{self.key}: {_short(self.old)} → {_short(self.new)}" if (self.old, self.new) != (None, None) else self.key
        )


def _short(value: Any) -> str:
    text = "null" if value is None else json.dumps(value) if isinstance(value, list | dict) else str(value)
    return text if len(text) <= 60 else f"{text[:60]} …"


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any], step: int | None) -> list[Event]:
    """The keys in which two recipes differ."""
    allowed, others = recipe_changes(old, new)
    decided = {change.key for change in others}
    events = []
    # A section that came or went is one change, not one of each of its keys.
    sections = {change.key for change in others if ABSENT in (change.old, change.new)}
    for change in (*others, *allowed):
        if any(change.key.startswith(f"{section}.") for section in sections):
            continue
        if change.key in sections:
            change = Change(change.key, _at(old, change.key), _at(new, change.key))
        is_strong = (change.key in decided and not _matches(change.key, ("validation.*",))) or _matches(
            change.key, LEARNS
        )
        weight = "strong" if is_strong else "none" if _matches(change.key, INERT) else "weak"
        events.append(Event(step, "recipe", change.key, change.old, change.new, weight))
    return events


def _at(recipe: Mapping[str, Any], path: str) -> Any:
    value: Any = recipe
    for name in path.split("."):
        value = value.get(name, ABSENT) if isinstance(value, Mapping) else ABSENT
    return value


def history_of(directory: RunDirectory, records: Records = ()) -> tuple[Event, ...]:
    """What changed in the run of ``directory``, in the order of its steps."""
    recipes = [(step, read_recipe(path)) for step, path in recipes_of(directory)]
    events = [e for (_, old), (step, new) in pairwise(recipes) for e in changed_keys(old, new, step)]
    begins = [step for step, _ in recipes]
    starts = _json(directory.environment)
    starts = [starts, *starts.get("resumed", [])] if isinstance(starts, dict) else []
    # Starts of an earlier version have no step: where there are as many recipes as starts, these say it.
    for number, (old, new) in enumerate(pairwise(starts), start=1):
        step = new.get("step", begins[number] if len(begins) == len(starts) else None)
        events.append(Event(step, "resume", "resumed", weight="none"))
        events += _environment(old, new, step)
    rollbacks = _json(directory.rollbacks)
    for rollback in rollbacks if isinstance(rollbacks, list) else []:
        names = ", ".join(map(str, rollback.get("alarms", ())))
        events.append(
            Event(rollback.get("to"), "rollback", f"taken back from step {rollback.get('at')} ({names})", weight="weak")
        )
    for metric in SERVERS:
        rows = [(int(r["step"]), r[metric]) for r in records if metric in r]
        changes = [(step, old, new) for (_, old), (step, new) in pairwise(rows) if old != new]
        events += [Event(step, "servers", metric, old, new, "weak") for step, old, new in changes]
    return tuple(sorted(events, key=lambda e: -1 if e.step is None else e.step))


def _environment(old: Mapping[str, Any], new: Mapping[str, Any], step: int | None) -> list[Event]:
    events = []
    if "identity" in old and "identity" in new:
        files = differences(old["identity"], new["identity"])  # a file that is absent is another key of the recipe
        events = [Event(step, "file", c.key, c.old, c.new) for c in files if ABSENT not in (c.old, c.new)]
    for change in differences(_starts(old), _starts(new)):
        if not any(part in change.key for part in IDLE) and ABSENT not in (change.old, change.new):
            events.append(Event(step, "environment", change.key, change.old, change.new, "weak"))
    return events


def _starts(start: Mapping[str, Any]) -> dict[str, Any]:
    git = start.get("git") or {}
    return {name: start[name] for name in STARTS if name in start} | ({"git.commit": git["commit"]} if git else {})


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}


@dataclass(frozen=True)
class Apart:
    """A curve that is another in two runs from ``step`` on."""

    metric: str
    step: int
    here: float
    there: float


def differences_of(run: RunDirectory, other: RunDirectory) -> list[Event]:
    """The keys, files and versions in which two runs differ in the end; inert keys are left out."""
    events = [e for e in changed_keys(read_recipe(other.recipe), read_recipe(run.recipe), None) if e.weight != "none"]
    ends = []
    for directory in (other, run):
        start = _json(directory.environment)
        ends.append([start, *start.get("resumed", [])][-1] if isinstance(start, dict) else {})
    return events + _environment(*ends, None) if all(ends) else events


def curves_apart(records: Records, others: Records) -> list[Apart]:
    """The curves of two runs that part, by the step from which they stay apart for three records, the first one first.

    They are apart where their difference is more than three times what either moves from one record to the next.
    """
    theirs = {int(r["step"]): r for r in others}
    pairs = [(r, theirs[int(r["step"])]) for r in records if int(r["step"]) in theirs]
    names = dict.fromkeys(name for ours, their in pairs for name in ours if name in their)
    found = []
    for name in names:
        if name in ("step", "time") or name.startswith(("perf/", "alarm/")):
            continue
        rows = [(int(a["step"]), float(a[name]), float(b[name])) for a, b in pairs if name in a and name in b]
        if len(rows) < BEFORE + AFTER:
            continue
        noise = max(median(abs(b[side] - a[side]) for a, b in pairwise(rows)) for side in (1, 2))
        apart = [abs(a - b) > 3 * noise and abs(a - b) > 1e-3 * max(abs(a), abs(b)) for _, a, b in rows]
        at = next((i for i in range(len(rows) - AFTER + 1) if all(apart[i : i + AFTER])), None)
        if at is not None:
            found.append(Apart(name, *rows[at]))
    return sorted(found, key=lambda item: item.step)


def comparison(run: RunDirectory, other: RunDirectory, records: Records, others: Records) -> list[str]:
    """The page of `run why RUN --against GOOD`."""
    events, curves = differences_of(run, other), curves_apart(records, others)
    lines = [f"{run.root} against {other.root}:", "", "Keys, files and versions that differ (there → here):"]
    lines += [f"  {event.kind:<12}{event}" for event in events] or ["  none that is on disk"]
    lines += ["", "Curves that part, in order (here, there):"]
    lines += [f"  step {c.step:>5}  {c.metric:<28}{c.here:.3g}, {c.there:.3g}" for c in curves[:CURVES]]
    lines += [f"  and {len(curves) - CURVES} later ones"] if len(curves) > CURVES else []
    return lines if curves else [*lines, "  none stays apart for three records"]
