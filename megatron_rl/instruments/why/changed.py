"""What changed in a run, step by step, from what it has on disk; and in what two runs differ.

A cause that somebody made is written down: a recipe is kept with the step from which it was in force, and each start
writes its versions, machine and variables, and digests of the files that the recipe names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from megatron_rl.instruments.why.departures import Records
from megatron_rl.monitor.run_directory import RunDirectory
from megatron_rl.run.identity import ABSENT, differences, read_recipe, recipe_changes, recipes_of

# Of what may change between starts: what a run cannot learn otherwise from. A file's contents are compared as such.
INERT = ("name", "run_root", "num_steps", "checkpoint.*", "monitor.*", "recorder.*", "validation.*")
INERT += ("learner.max_consecutive_overflows", "rollout.deadline_s", "reward.max_error_frac.*")
LEARNS = ("model.path", "data.train")  # files that another recipe may name: what they hold is another thing
STARTS = ("versions", "patches", "git.commit", "hardware", "variables", "python")  # of environment.json
IDLE = ("SLURM_", "variables.MASTER_")  # another job is no other environment
SERVERS = ("rollout/servers", "rollout/servers/lost")


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
        is_known = (self.old, self.new) != (None, None)
        return f"{self.key}: {_short(self.old)} → {_short(self.new)}" if is_known else self.key


def _short(value: Any) -> str:
    text = "null" if value is None else json.dumps(value) if isinstance(value, list | dict) else str(value)
    return text if len(text) <= 60 else f"{text[:60]} …"


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any], step: int | None) -> list[Event]:
    """The keys in which two recipes differ."""
    allowed, others = recipe_changes(old, new)
    # A section that came or went is one change, not one of each of its keys.
    sections = tuple(f"{change.key}." for change in others if ABSENT in (change.old, change.new))
    events = []
    for decides, changes in ((True, others), (False, allowed)):
        for key in (change.key for change in changes if not change.key.startswith(sections)):
            matches = [any(fnmatchcase(key, pattern) for pattern in patterns) for patterns in (LEARNS, INERT)]
            is_strong = (decides and not key.startswith("validation.")) or matches[0]
            weight = "strong" if is_strong else "none" if matches[1] else "weak"
            events.append(Event(step, "recipe", key, value_at(old, key), value_at(new, key), weight))
    return events


def value_at(recipe: Mapping[str, Any], path: str, missing: Any = ABSENT) -> Any:
    """A key of a recipe; ``missing`` where a section on the way is null or lacks it."""
    value: Any = recipe
    for name in path.split("."):
        value = value.get(name, missing) if isinstance(value, Mapping) else missing
    return value


def history_of(directory: RunDirectory, records: Records = ()) -> tuple[Event, ...]:
    """What changed in the run of ``directory``, in the order of its steps."""
    recipes = [(step, read_recipe(path)) for step, path in recipes_of(directory)]
    events = [e for (_, old), (step, new) in pairwise(recipes) for e in changed_keys(old, new, step)]
    for old, new in pairwise(_starts_of(directory)):
        events.append(Event(new.get("step"), "resume", "resumed", weight="none"))
        events += _environment(old, new, new.get("step"))
    rollbacks = _json(directory.rollbacks)
    for rollback in rollbacks if isinstance(rollbacks, list) else []:
        names = ", ".join(map(str, rollback.get("alarms", ())))
        text = f"taken back from step {rollback.get('at')} ({names})"
        events.append(Event(rollback.get("to"), "rollback", text, weight="weak"))
    for metric in SERVERS:
        rows = [(int(r["step"]), r[metric]) for r in records if metric in r]
        changes = [(step, old, new) for (_, old), (step, new) in pairwise(rows) if old != new]
        events += [Event(step, "servers", metric, old, new, "weak") for step, old, new in changes]
    return tuple(sorted(events, key=lambda e: -1 if e.step is None else e.step))


def _environment(old: Mapping[str, Any], new: Mapping[str, Any], step: int | None) -> list[Event]:
    both = "identity" in old and "identity" in new
    files = differences(old["identity"], new["identity"]) if both else []
    events = [Event(step, "file", c.key, c.old, c.new) for c in files]
    changes = [c for c in differences(_compared(old), _compared(new)) if not any(part in c.key for part in IDLE)]
    events += [Event(step, "environment", c.key, c.old, c.new, "weak") for c in changes]
    return [event for event in events if ABSENT not in (event.old, event.new)]  # that is another key of the recipe


def _starts_of(directory: RunDirectory) -> list[dict[str, Any]]:
    """The environments of a run's starts."""
    first = _json(directory.environment)
    return [first, *first.get("resumed", [])] if isinstance(first, dict) else []


def _compared(start: Mapping[str, Any]) -> dict[str, Any]:
    git = start.get("git") or {}
    return {name: start[name] for name in STARTS if name in start} | ({"git.commit": git["commit"]} if git else {})


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}


def differing(run: RunDirectory, other: RunDirectory, step: int) -> tuple[Event, ...]:
    """The keys (without seeds), files and versions in which a run differs from another one, as changes at ``step``."""
    events = changed_keys(read_recipe(other.recipe), read_recipe(run.recipe), step)
    old, new = (next(iter(_starts_of(directory)[-1:]), {}) for directory in (other, run))
    events += _environment(old, new, step)
    digests = {key: f"identity.{key}" for key in ("data.train", "data.validation")} | {"model.path": "identity.model"}
    for key, digest in digests.items():
        if value_at(old, digest) == value_at(new, digest) != ABSENT:  # the same in another folder, but for weights
            weight = "weak" if key == "model.path" else "none"
            events = [replace(e, weight=weight) if e.key == key and e.kind == "recipe" else e for e in events]
    return tuple(event for event in events if event.weight != "none" and event.key.split(".")[-1] != "seed")
