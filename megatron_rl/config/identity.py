"""Which keys of a recipe a run may change when it is resumed, once, and what differs between two recipes.

A key that stands here changes how fast a run is, where it is or what is written of it, never what is learned. Every
other change makes another run of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

MAY_CHANGE = (
    # The folder of the run, and where its inputs are. What the files hold is compared by itself (`run.identity`).
    "name",
    "run_root",
    "model.path",
    "data.train",
    "data.validation",
    "data.cache",
    # How long the run is. `_moves_the_schedule` has the exception.
    "num_steps",
    # Layout, memory and speed. Checkpoints load under every layout.
    "runtime.device",
    "learner.parallel.*",
    "learner.max_tokens_per_microbatch",
    "learner.recompute",
    "learner.fused_head",
    "learner.compile",
    "learner.offload.*",
    "rollout.tensor_parallel",
    "rollout.max_num_seqs",
    "rollout.kv_cache_gib",
    "rollout.gpu_memory_utilization",
    "rollout.enforce_eager",
    "rollout.enable_prefix_caching",
    "rollout.verify_refit",
    "rollout.servers.*",
    "reward.num_workers",
    # Limits that end a run.
    "rollout.deadline_s",
    "reward.max_error_frac.*",
    "learner.max_consecutive_overflows",
    # What is measured, written and kept. `_decays_the_rate` has the exception.
    "routing.telemetry",
    "validation.every",
    "checkpoint.*",
    "monitor.*",
    "recorder.*",
)
SHOWN_CHARACTERS = 100  # of a value in a message
ABSENT = "absent"


@dataclass(frozen=True)
class Change:
    """A key whose value is another. ``why``: what the change does, where the key alone does not say it."""

    key: str
    old: Any
    new: Any
    why: str = ""

    def __str__(self) -> str:
        why = f" ({self.why})" if self.why else ""
        return f"{self.key}: {_short(self.old)} → {_short(self.new)}{why}"


def recipe_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[Change], list[Change]]:
    """Changes that a run may make, and changes that make another run of it.

    ``old`` and ``new``: recipes as `Recipe.model_dump(mode="json")` gives them. Lists are compared whole.
    """
    allowed, others = [], []
    for change in differences(old, new):
        why = _moves_the_schedule(change.key, new) or _decays_the_rate(change)
        if why:
            others.append(Change(change.key, change.old, change.new, why))
        elif any(fnmatchcase(change.key, pattern) for pattern in MAY_CHANGE):
            allowed.append(change)
        else:
            others.append(change)
    return allowed, others


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Dotted keys whose values differ, in the order of ``new``. A key that one side lacks has the value `ABSENT`."""
    a, b = _flatten(old), _flatten(new)
    keys = list(dict.fromkeys([*b, *a]))
    found = [Change(key, a.get(key, ABSENT), b.get(key, ABSENT)) for key in keys]
    return [change for change in found if change.old != change.new]


def _moves_the_schedule(key: str, recipe: Mapping[str, Any]) -> str:
    """Why another number of steps is another schedule; "" where it is not."""
    schedule = recipe.get("schedule") or {}
    if key != "num_steps":
        return ""
    if schedule.get("style") in ("linear", "cosine") and schedule.get("decay_steps") is None:
        return f"schedule.style {schedule['style']} ends at the last step, as schedule.decay_steps is null"
    if schedule.get("weight_decay_end") is not None:
        return "schedule.weight_decay_end is reached at the last step"
    return ""


def _decays_the_rate(change: Change) -> str:
    """Why other alarms are another schedule; "" where they are not."""
    if change.key != "monitor.alarms":
        return ""
    both = [rules if isinstance(rules, list) else [] for rules in (change.old, change.new)]
    acting = [[rule for rule in rules if "decay_lr" in rule["then"]] for rules in both]
    return "alarms with decay_lr set the learning rate" if acting[0] != acting[1] else ""


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _short(value: Any) -> str:
    shown = "null" if value is None else str(value)
    return shown if len(shown) <= SHOWN_CHARACTERS else shown[:SHOWN_CHARACTERS] + " …"
