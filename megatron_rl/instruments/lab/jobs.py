"""A study read from its file, and its runs: each arm and seed gives one ordinary recipe.

`load_study` reads `recipes/lab/*/study.yaml`; a run's recipe is the base plus `--set` overrides, which `check` accepts
and `train` runs.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ValidationError

from megatron_rl.config import Recipe, load_recipe
from megatron_rl.config.explain import explain
from megatron_rl.config.loader import read_yaml
from megatron_rl.errors import EXIT_DONE, EXIT_ENDED_BY_LIMIT, InputError
from megatron_rl.instruments.lab.study import IDENTITY_KEYS, SEED_KEYS, Arm, Outcome, Study, unknown_names
from megatron_rl.monitor.alarms import CollapseRule, fit_slope
from megatron_rl.monitor.run_directory import RunDirectory, read_metrics
from megatron_rl.run.prepare import check_recipe
from megatron_rl.shipped import existing_or_shipped

# The state of a run on disk, from its folder.


State = Literal["done", "ended", "failed", "interrupted", "missing"]
"""done: all steps. ended: by an alarm or limit, a result like any other. failed: another exit status. interrupted:
stopped before its end, to be continued. missing: never started."""
FINISHED: tuple[State, ...] = ("done", "ended")


def exit_file(run: Path) -> Path:
    """Return the file in which a runner writes the exit status of the last attempt."""
    return run.with_name(f"{run.name}.exit.json")


def _exit_statuses(run: Path) -> list[int]:
    """Return the exit statuses of the last attempt: of the runner's process, or of each rank of a Slurm job."""
    noted = exit_file(run)
    if noted.is_file():
        return [json.loads(noted.read_text())["status"]]
    return [int(file.read_text()) for file in sorted((run / "slurm" / "latest" / "status").glob("*"))]


def state_of(run: Path) -> State:
    """Return the state of a run on disk, from its folder."""
    if RunDirectory(run).done.is_file():
        return "done"
    statuses = _exit_statuses(run)
    if EXIT_ENDED_BY_LIMIT in statuses:
        return "ended"
    if statuses:
        return "interrupted" if all(status <= EXIT_DONE for status in statuses) else "failed"
    return "interrupted" if run.is_dir() else "missing"


# One number per run, by which arms are compared.


COLLAPSED_BELOW = 1.0 - CollapseRule.drop  # share of the best running mean so far


def outcome_of(records: Sequence[Mapping[str, float]], outcome: Outcome) -> float | None:
    """The outcome of one run from its records (metrics.jsonl); None where it is not defined.

    Values that are not finite are no observations; for ``log_slope`` neither are values of 0. A collapse step is the
    time of `collapse_of`, whether the run collapsed then or was only seen until then.
    """
    if outcome.statistic == "collapse_step":
        collapse = collapse_of(records, outcome)
        return collapse and collapse[0]
    steps, values = _seen(records, outcome)
    if not len(values):
        return None
    match outcome.statistic:
        case "last":
            return float(values[-1])
        case "mean":
            return float(values.mean().clip(values.min(), values.max()))  # which rounding alone leaves
        case "max":
            return float(values.max())
        case "log_slope":
            positive = values > 0
            fit = fit_slope(steps[positive], np.log(values[positive]))
            return fit and fit.value
        case "step_pcc":
            if len(values) < 3 or values.std() == 0:
                return None
            return float(np.corrcoef(steps, values)[0, 1])


def _seen(records: Sequence[Mapping[str, float]], outcome: Outcome) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values [N] of the outcome's metric within its steps, finite ones alone."""
    last = math.inf if outcome.last_step is None else outcome.last_step
    seen = [
        (record["step"], float(record[outcome.metric]))
        for record in records
        if outcome.metric in record and outcome.first_step <= record["step"] <= last
    ]
    seen = [(step, value) for step, value in seen if math.isfinite(value)]
    steps, values = np.array(seen, dtype=float).reshape(-1, 2).T
    return steps, values


def collapse_of(records: Sequence[Mapping[str, float]], outcome: Outcome) -> tuple[float, bool] | None:
    """First step whose mean over the last ``window`` values is below half of the best so far, and True; the step after
    the last one and False for a run that never fell. None with fewer values than ``window``.

    Not `monitor.alarms.collapse_step`, which judges alarms and waits until a fall of the running median lasts: here a
    fall that recovers counts as well.
    """
    steps, values = _seen(records, outcome)
    if len(values) < outcome.window:
        return None
    means = np.convolve(values, np.full(outcome.window, 1 / outcome.window), mode="valid")
    best = np.maximum.accumulate(means)
    below = np.flatnonzero(means < COLLAPSED_BELOW * best)
    if len(below):
        return float(steps[outcome.window - 1 + below[0]]), True
    return float(steps[-1] + 1), False


@dataclass(frozen=True)
class Job:
    """One run of a study."""

    arm: str
    seed: int
    name: str  # of the run and its folder
    overrides: tuple[str, ...]  # for `--set`
    waits_for: tuple[str, ...] = ()  # unfinished runs that its values are outcomes of

    def __str__(self) -> str:
        return self.name

    @property
    def settings(self) -> list[str]:
        """Return the options of `train` for its recipe."""
        return [part for override in self.overrides for part in ("--set", override)]


def run_name(arm: str, seed: int) -> str:
    """Return the name of a run and of its folder."""
    return f"{arm}-seed{seed}"


@dataclass(frozen=True)
class LoadedStudy:
    """A study with the path of its file, from which its base recipe is found."""

    study: Study
    path: Path
    begin: int = 0  # the first step of its runs

    @property
    def base(self) -> Path:
        return self.path.parent / self.study.base

    def jobs(
        self,
        root: Path,
        seeds: Sequence[int] | None = None,
        arms: Sequence[str] | None = None,
    ) -> list[Job]:
        """Return the runs below ``root``, all arms of the first seed first, so that interruption leaves full pairs.

        Raises `InputError` if the study lacks one of ``seeds`` or ``arms``, or a finished run has no value for the
        outcome that another run is yoked to.
        """
        known_seeds = dict.fromkeys(map(str, self.study.seeds))
        problems = list(unknown_names("--arms", arms or [], self.study.arms))
        problems += list(unknown_names("--seeds", [str(s) for s in seeds or []], known_seeds))
        if problems:
            raise InputError(f"study {self.path}:\n" + "\n".join(f"  {problem}" for problem in problems))
        return [
            self._job(arm, seed, root)
            for seed in (self.study.seeds if seeds is None else seeds)
            for arm in (self.study.arms if arms is None else arms)
        ]

    def _job(self, arm: str, seed: int, root: Path) -> Job:
        name, setting = run_name(arm, seed), self.study.arms[arm]
        values = {"name": name, "run_root": str(root)} | self.seed_values(arm, seed) | setting.set
        waits_for = []
        for key, yoke in setting.yoked.items():
            source = root / run_name(yoke.arm, seed)
            if state_of(source) in FINISHED:
                values[key] = self._outcome(source, yoke.outcome)
            else:
                waits_for.append(source.name)
        # JSON is valid YAML, so the recipe loader reads its numbers.
        overrides = tuple(f"{key}={json.dumps(value)}" for key, value in values.items())
        return Job(arm, seed, name, overrides, tuple(waits_for))

    def seed_values(self, arm: str, seed: int) -> dict[str, Any]:
        """Return what ``seed`` sets in a run of ``arm``: key → value. All randomness has the same number here."""
        return dict.fromkeys(SEED_KEYS, seed)

    def _outcome(self, run: Path, name: str) -> float:
        value = outcome_of(read_metrics(RunDirectory(run).metrics), self.study.outcomes[name])
        if value is None:
            metric = self.study.outcomes[name].metric
            raise InputError(f"study {self.path}: {run} has no {name!r} ({metric}), to which another run is yoked")
        return value

    def recipe(self, job: Job) -> Recipe:
        """Return the recipe of one run. Warnings are errors here, because a study is used as evidence."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                return load_recipe(self.base, job.overrides)
        except (InputError, UserWarning) as error:
            raise InputError(f"study {self.path}, arm {job.arm}: {error}") from error

    def check(self, offline: bool = False) -> None:
        """Check every arm as `megatron_rl check` does, and that it differs from its control as declared."""
        problems, recipes = [], {}
        for job in self.jobs(Path("runs"), seeds=self.study.seeds[:1]):
            try:
                recipes[job.arm] = self.recipe(job)
                check_recipe(recipes[job.arm], offline=offline)
            except InputError as error:
                problems.append(str(error))
        if not problems:
            for name, arm in self.study.arms.items():
                if arm.control is not None:
                    problems += _not_as_declared(name, arm, recipes)
        if problems:
            raise InputError(f"study {self.path}:\n" + "\n".join(f"  {problem}" for problem in problems))


def _not_as_declared(name: str, arm: Arm, recipes: Mapping[str, Recipe]) -> Iterator[str]:
    """Yield the contradictions to `differs_in` of an arm."""
    keys = differing_keys(recipes[name], recipes[arm.control])
    under = {key: [d for d in arm.differs_in if key == d or key.startswith(d + ".")] for key in keys}
    more = [key for key, declared in under.items() if not declared]
    if more:
        yield f"arms.{name}: differs from {arm.control!r} in {', '.join(more)} too; its control is not matched"
    for declared in arm.differs_in:
        if not any(declared in differing for differing in under.values()):
            yield f"arms.{name}.differs_in: {declared}: has the same value in {arm.control!r}"


def differing_keys(one: Recipe, other: Recipe, ignored: Sequence[str] = (*IDENTITY_KEYS, *SEED_KEYS)) -> list[str]:
    """Return dotted keys whose values differ in two recipes, without ignored keys (default: names and seeds).

    Absolute paths are compared by their last part, because a checkout's folder may move.
    """
    a, b = (_flatten(recipe.model_dump(mode="json")) for recipe in (one, other))
    return sorted(key for key in a.keys() | b.keys() if key not in ignored and a.get(key) != b.get(key))


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = without_folders(value)
    return flat


def without_folders(value: Any) -> Any:
    """Return ``value`` with absolute paths cut to their last part."""
    if isinstance(value, dict):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def is_study(path: Path) -> bool:
    """Return whether a shipped file is a study, of laptop size or of paper size."""
    return path.name in ("study.yaml", "scale.yaml")


def load_study(path: str | Path) -> LoadedStudy:
    """Read, validate and return a study file, or the study.yaml of a folder.

    Raises:
        InputError: naming file, key path, value found and values allowed. The arms' recipes are checked by
            `LoadedStudy.check`.
    """
    path = existing_or_shipped(path)
    path = path / "study.yaml" if path.is_dir() else path
    values = read_yaml(path, "study")
    try:
        study = Study.model_validate(values)
    except ValidationError as error:
        raise InputError(f"study {path}:\n" + explain(error, Study)) from error
    loaded = LoadedStudy(study, path)
    if not loaded.base.is_file():
        raise InputError(f"study {path}:\n  base: {study.base}: no such file beside the study")
    return loaded
