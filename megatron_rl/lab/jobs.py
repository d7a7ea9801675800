"""A study that was read from its file, and its runs: each arm times each seed is one ordinary recipe.

`load_study` reads `recipes/lab/*/study.yaml`; a run's recipe is the base plus `--set` overrides, which `check` accepts
and `train` runs.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_rl.check import check_recipe
from megatron_rl.config import Recipe, load_recipe
from megatron_rl.config.explain import explain
from megatron_rl.config.loader import read_yaml
from megatron_rl.errors import InputError
from megatron_rl.lab.on_disk import FINISHED, state_of
from megatron_rl.lab.outcomes import outcome_of
from megatron_rl.lab.study import IDENTITY_KEYS, SEED_KEYS, Arm, Study, unknown_names
from megatron_rl.monitor.jsonl import read_metrics
from megatron_rl.monitor.run_directory import RunDirectory
from megatron_rl.shipped import existing_or_shipped


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


def run_name(arm: str, seed: int) -> str:
    """Name of a run and its folder."""
    return f"{arm}-seed{seed}"


@dataclass(frozen=True)
class LoadedStudy:
    """A study that was read from a file, so that its base recipe can be found."""

    study: Study
    path: Path

    @property
    def base(self) -> Path:
        return self.path.parent / self.study.base

    def jobs(
        self,
        root: Path,
        seeds: Sequence[int] | None = None,
        arms: Sequence[str] | None = None,
        yoked_to: Path | None = None,
    ) -> list[Job]:
        """Runs below ``root``, all arms of the first seed first: what is interrupted has whole comparisons.

        ``yoked_to``: the folder of the runs that values of yoked arms are outcomes of; None: ``root``. Raises
        `InputError` where ``seeds`` or ``arms`` names something that the study does not have, and where a finished run
        has no value for the outcome that another is yoked to.
        """
        known_seeds = dict.fromkeys(map(str, self.study.seeds))
        problems = list(unknown_names("--arms", arms or [], self.study.arms))
        problems += list(unknown_names("--seeds", [str(s) for s in seeds or []], known_seeds))
        if problems:
            raise InputError(f"study {self.path}:\n" + "\n".join(f"  {problem}" for problem in problems))
        return [
            self._job(arm, seed, root, root if yoked_to is None else yoked_to)
            for seed in (self.study.seeds if seeds is None else seeds)
            for arm in (self.study.arms if arms is None else arms)
        ]

    def _job(self, arm: str, seed: int, root: Path, yoked_to: Path) -> Job:
        name, setting = run_name(arm, seed), self.study.arms[arm]
        values = {"name": name, "run_root": str(root)} | dict.fromkeys(SEED_KEYS, seed) | setting.set
        waits_for = []
        for key, yoke in setting.yoked.items():
            source = yoked_to / run_name(yoke.arm, seed)
            if state_of(source) in FINISHED:
                values[key] = self._outcome(source, yoke.outcome)
            else:
                waits_for.append(source.name)
        # JSON is YAML, and the recipe loader reads its numbers.
        overrides = tuple(f"{key}={json.dumps(value)}" for key, value in values.items())
        return Job(arm, seed, name, overrides, tuple(waits_for))

    def _outcome(self, run: Path, name: str) -> float:
        found = outcome_of(read_metrics(RunDirectory(run).metrics), self.study.outcomes[name])
        if found is None:
            metric = self.study.outcomes[name].metric
            raise InputError(f"study {self.path}: {run} has no {name!r} ({metric}), to which another run is yoked")
        return found

    def recipe(self, job: Job) -> Recipe:
        """The recipe of one run; a warning about it is an error here, for a study is read as evidence."""
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
    """What contradicts `differs_in` of an arm."""
    keys = differing_keys(recipes[name], recipes[arm.control])
    under = {key: [d for d in arm.differs_in if key == d or key.startswith(d + ".")] for key in keys}
    more = [key for key, declared in under.items() if not declared]
    if more:
        yield f"arms.{name}: differs from {arm.control!r} in {', '.join(more)} too; its control is not matched"
    for declared in arm.differs_in:
        if not any(declared in found for found in under.values()):
            yield f"arms.{name}.differs_in: {declared}: has the same value in {arm.control!r}"


def differing_keys(one: Recipe, other: Recipe, ignored: Sequence[str] = (*IDENTITY_KEYS, *SEED_KEYS)) -> list[str]:
    """Dotted keys whose values differ in two recipes, without the ignored ones, by default names and seeds.

    Absolute paths are compared by their last part: runs outlive the folder of the checkout that made them.
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
    """``value`` with absolute paths cut to their last part."""
    if isinstance(value, dict):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def is_study(path: Path) -> bool:
    """Whether a shipped file holds a study: of this machine's size, or of the papers'."""
    return path.name in ("study.yaml", "scale.yaml")


def load_study(path: str | Path) -> LoadedStudy:
    """Read and validate a study file, or the study.yaml of a folder.

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
