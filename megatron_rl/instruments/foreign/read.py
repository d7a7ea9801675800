"""Reads a run of this or another project as the rows of a metrics.jsonl, and says what its log lacks."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_rl.config.monitor import AlarmRule
from megatron_rl.errors import InputError
from megatron_rl.instruments.foreign.files import Log, find_logs
from megatron_rl.instruments.foreign.names import Project, project_of
from megatron_rl.monitor.run_directory import read_metrics

Records = list[dict[str, float]]


@dataclass(frozen=True)
class Run:
    """The rows of a run. ``project``: whose log they come from; None for a run of ours."""

    path: Path
    records: Records
    project: Project | None = None
    kind: str = ""
    sources: Mapping[str, Sequence[str]] = field(default_factory=dict)  # our metric → theirs that it was read from
    notes: tuple[str, ...] = ()

    @property
    def is_own(self) -> bool:
        return not self.kind

    def told(self) -> list[str]:
        """What the rows were read from, a line each; nothing for a run of ours."""
        if self.is_own:
            return []
        steps = f"steps {self.records[0]['step']} to {self.records[-1]['step']}"
        whose = (
            f"a log of {self.project.name}, by the names of {self.project.version} ({self.project.commit})"
            if self.project
            else "a log with names of megatron-rl"
        )
        return [f"{self.path}: {self.kind}, {whose}; {steps}", *self.notes]


def read_run(path: Path) -> Run:
    """The run at ``path``: a run directory or metrics.jsonl of ours, or a log of another project.

    Steps are those of the log. Raises `InputError` where there is no log, where there are several runs, and where no
    metric of the log is known.
    """
    path = Path(path)
    if _is_own(path):
        return Run(path, read_metrics(path))
    logs = _one_run(path, find_logs(path))
    points = [point for log in logs for point in log.points]
    if not points:
        raise InputError(f"{path}: the log has no number yet")
    project = project_of({name for name, _, _ in points})
    notes: list[str] = []
    rows = _rows(points, project, notes)
    sources = _sources({name for row in rows.values() for name in row}, project)
    records = [{"step": step, **_translated(rows[step], project, sources)} for step in sorted(rows)]
    known = {name for record in records for name in record if name.split("/")[0] in _AREAS}
    if project is None and not known:
        some = ", ".join(sorted({name for name, _, _ in points})[:8])
        raise InputError(
            f"{path}: none of its metrics is known ({some} …); "
            "docs/coming-from.md has the names that are read, and a CSV with those of megatron-rl is read too"
        )
    return Run(path, records, project, logs[0].kind, sources, tuple(notes))


_AREAS = {"critic", "actor", "response_length", "mismatch", "rollout_corr", "groups", "val"}


def _is_own(path: Path) -> bool:
    """Whether ``path`` is a run of ours. A broken line is left to `read_metrics`, which says what is wrong."""
    if path.is_dir() and (path / "recipe.resolved.yaml").is_file():
        return True
    file = path / "metrics.jsonl" if path.is_dir() else path
    if file.name != "metrics.jsonl" or not file.is_file():
        return False
    names: set[str] = set()
    with file.open(encoding="utf-8", errors="replace") as lines:
        for _, line in zip(range(20), lines, strict=False):  # prime-rl writes the parts of a step in several lines
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                return True
            if not isinstance(row, dict) or isinstance(row.get("data"), dict):
                return not isinstance(row, dict)
            names |= row.keys()
    project = project_of(names)
    return project is None or project.name == "verl"  # ours are named as verl's are


def _one_run(path: Path, logs: Sequence[Log]) -> list[Log]:
    """``logs`` if they are one run: stretches of it, or parts that share no metric, as prime-rl's processes write."""
    seen: dict[str, Log] = {}
    for log in logs:
        names = {name for name, _, _ in log.points}
        project = project_of(names)
        ours = {our for name in names for our in (project.ours(name) if project else [name])}
        for name in sorted(ours - {"perf/time/step"}):
            earlier = seen.setdefault(name, log)
            if earlier is not log and not (log.group and log.group == earlier.group):
                listed = ", ".join(str(log.path) for log in logs[:10])
                raise InputError(f"{path}: {len(logs)} logs of several runs (each has {name}); give one of {listed}")
    return list(logs)


def _rows(points: Sequence[tuple[str, int, float]], project: Project | None, notes: list[str]) -> dict[int, dict]:
    """Values by step and name. The newest value of a step counts; of several updates in a step, their mean."""
    newest = {(name, step): value for name, step, value in points}
    prefix = project.updates if project else ""
    is_update = {name: bool(prefix) and name.startswith(prefix) for name, _ in newest}
    batches = sorted({step for name, step in newest if not is_update[name] and name.startswith("rollout/")})
    updates = sorted({step for name, step in newest if is_update[name]})
    place = _places(updates, batches)
    if (each := max((list(place.values()).count(batch) for batch in set(place.values())), default=1)) > 1:
        notes.append(f"{each} updates a step: {prefix}… are means over them")
    rows: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (name, step), value in newest.items():
        rows[place[step] if is_update[name] else step][name].append(value)
    return {step: {name: sum(values) / len(values) for name, values in row.items()} for step, row in rows.items()}


def _places(updates: Sequence[int], batches: Sequence[int]) -> dict[int, int]:
    """The batch of each update.

    Both may be counted in updates (slime with --wandb-always-use-train-step): then batches are some steps apart, and an
    update belongs to the last batch before it. Otherwise a batch has the same number of updates, and the last batch may
    have less.
    """
    if not updates or not batches:
        return {step: step for step in updates}
    gaps = [later - earlier for earlier, later in pairwise(batches)]
    if gaps and min(gaps) > 1 and updates[-1] < batches[-1] + min(gaps) and len(updates) > len(batches):
        return {step: batches[max(bisect_right(batches, step) - 1, 0)] for step in updates}
    each = max(1, -(-(updates[-1] + 1) // (batches[-1] + 1)))
    return {step: step // each for step in updates}


def _sources(names: set[str], project: Project | None) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        for our in project.ours(name) if project else []:
            found[our].append(name)
    return dict(found)


def _translated(row: Mapping[str, float], project: Project | None, sources: Mapping[str, Sequence[str]]) -> dict:
    """``row`` under our names; what is not in the table keeps its own."""
    taken = {name for names in sources.values() for name in names}
    values = {name: value for name, value in row.items() if name not in taken}
    for our, names in sources.items():
        if present := [row[name] for name in names if name in row]:
            values[our] = sum(present) / len(present)
    for our, derive in project.derived.items() if project else ():
        if our not in values and (value := derive(row)) is not None:
            values[our] = value
    return values


_MOVED = "actor/ppo_kl"
# What a suspect of `why` is judged by: metrics, else keys of the recipe that --set can name.
NEEDS = {
    "learning rate": (("noise/relative_update", _MOVED), ()),
    "updates a batch": ((), ("batch.minibatches",)),
    "clip range": ((), ("objective.policy_term",)),
    "staleness": (("rollout/staleness_mean",), ("rollout.max_staleness",)),
    "rounding": (("mismatch/rho_std",), ()),
    "overflow": (("actor/update_skipped",), ()),
    "reward": (("groups/no_signal_frac", "critic/rewards/mean"), ()),
    "data": (("val/reward/mean",), ()),
    "length": (("response_length/mean",), ()),
    "temperature": ((), ("rollout.temperature",)),
    "routing": (("router/agree_frac",), ()),
}


def blind_rules(records: Sequence[Mapping[str, float]], rules: Sequence[AlarmRule]) -> dict[str, str]:
    """The rules that never see their metric in ``records``, each with the metric."""
    present = {name for record in records for name in record}
    return {rule.name: rule.metric for rule in rules if rule.metric not in present}


def blind_suspects(records: Sequence[Mapping[str, float]], recipe: Mapping[str, Any]) -> dict[str, str]:
    """The suspects of `why` that cannot be judged, each with what would be needed."""
    present = {name for record in records for name in record}
    if not any(record.get(_MOVED) for record in records):
        present -= {_MOVED}  # with one update a batch it is always 0
    blind = {}
    for suspect, (metrics, keys) in NEEDS.items():
        if not present & set(metrics) and not any(_has(recipe, key) for key in keys):
            shown = (f"{metric} above 0" if metric == _MOVED else metric for metric in metrics)
            blind[suspect] = " or ".join([*shown, *(f"--set {key}=…" for key in keys)])
    return blind


def _has(recipe: Mapping[str, Any], path: str) -> bool:
    value: Any = recipe
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return False
        value = value[key]
    return True
