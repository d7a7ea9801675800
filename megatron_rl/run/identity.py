"""A run directory holds one run: what its recipe, model, data and reward code were, and whether they still are.

The recipe in force is `recipe.resolved.yaml`. Each one that was ever in force is `recipe.resolved.<n>.yaml`; its first
line says from which step on. The contents of the files that a recipe names are in `environment.json`, under `identity`.

The keys listed here may change when a run is resumed: they change how fast a run is, where it is or what is written of
it, never what is learned. Every other change makes it another run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megatron_rl.checkpoint.hf_folder import HFFolder
from megatron_rl.checkpoint.manifest import TRAINER_FILE, checkpoint_step, list_checkpoints
from megatron_rl.config import Recipe
from megatron_rl.config.objective import user_functions
from megatron_rl.config.yaml12 import parse
from megatron_rl.data import prompts_digest
from megatron_rl.errors import InputError
from megatron_rl.monitor import RunDirectory
from megatron_rl.process.host import write_whole
from megatron_rl.process.run_files import read_json, settled
from megatron_rl.types import Prompt

MAY_CHANGE = (
    # The folder of the run, and where its inputs are. What the files hold is compared by itself (`run.identity`).
    "name",
    "run_root",
    "model.path",
    "reference.path",
    "teacher.addresses",
    "teacher.by_source.*.addresses",
    "data.train*",
    "data.validation*",
    # How long the run is. `_moves_the_schedule` has the exception.
    "num_steps",
    # Layout, memory and speed. Checkpoints load under every layout.
    "runtime.device",
    "learner.parallel.*",
    "learner.max_tokens_per_microbatch",
    "learner.recompute",
    "learner.fused_head",
    "learner.offload.*",
    "rollout.tensor_parallel",
    "rollout.max_num_seqs",
    "rollout.max_num_batched_tokens",
    "rollout.kv_cache_gib",
    "rollout.gpu_memory_utilization",
    "rollout.enforce_eager",
    "rollout.verify_refit",
    "rollout.servers.*",
    "reward.num_workers",
    "reward.concurrency",
    "reward.wait_s",
    "reward.retries",
    "reward.retry_wait_s",
    # Limits that end a run.
    "rollout.deadline_s",
    "reward.max_error_frac.*",
    "learner.max_consecutive_overflows",
    # What is measured, written and kept. `_decays_the_rate` has the exception.
    "scoring*",
    "routing.telemetry",
    "validation.every",
    "validation.at_start",
    "checkpoint.*",
    "monitor.*",
    "recorder.*",
)
SHOWN_CHARACTERS = 100  # of a value in a message
ABSENT = "absent"
WEIGHTS_READ = 2**20  # bytes of a file of weights


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

    ``old`` and ``new``: recipes as `Recipe.model_dump(mode="json")` gives them.
    """
    allowed, others = [], []
    for change in differences(old, new):
        why = _moves_the_schedule(change.key, new) or _decays_the_rate(change.key, old, new)
        if why:
            others.append(Change(change.key, change.old, change.new, why))
        elif any(fnmatchcase(change.key, pattern) for pattern in MAY_CHANGE):
            allowed.append(change)
        else:
            others.append(change)
    return allowed, others


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Dotted keys whose values differ, in the order of ``new``. A key that one side lacks has the value `ABSENT`. Lists
    of as many sections are compared key by key, other lists whole."""
    a, b = _flatten(old), _flatten(new)
    keys = list(dict.fromkeys([*b, *a]))
    changes = [Change(key, a.get(key, ABSENT), b.get(key, ABSENT)) for key in keys]
    return [one for change in changes if change.old != change.new for one in _in_items(change)]


def _in_items(change: Change) -> list[Change]:
    lists = [x for x in (change.old, change.new) if isinstance(x, list) and all(isinstance(y, Mapping) for y in x)]
    if len(lists) < 2 or len(lists[0]) != len(lists[1]):
        return [change]
    return differences(*({change.key: dict(enumerate(x))} for x in lists))


def _moves_the_schedule(key: str, recipe: Mapping[str, Any]) -> str:
    """Why another number of steps is another schedule; "" where it is not."""
    schedule = recipe.get("schedule") or {}
    if key != "num_steps":
        return ""
    if schedule.get("style") in ("linear", "cosine") and schedule.get("decay_steps") is None:
        return f"schedule.style {schedule['style']} ends at the last step, as schedule.decay_steps is null"
    return ""


def _decays_the_rate(key: str, *recipes: Mapping[str, Any]) -> str:
    """Why other alarms are another schedule; "" where they are not."""
    if not key.startswith("monitor.alarms"):
        return ""
    both = [(recipe.get("monitor") or {}).get("alarms") for recipe in recipes]
    both = [rules if isinstance(rules, list) else [] for rules in both]
    acting = [[rule for rule in rules if {"decay_lr", "rollback"} & {*rule["then"]}] for rules in both]
    return "alarms with decay_lr or rollback set the learning rate" if acting[0] != acting[1] else ""


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


_MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_FROM_STEP = re.compile(r"# in force from step (\d+) on")
_INCIDENTAL = ("_name_or_path", "transformers_version")  # keys of a config.json that change nothing


@dataclass(frozen=True)
class Comparison:
    """What is new in the recipe and the files of a run. ``refused``: what makes another run of it."""

    allowed: list[Change] = field(default_factory=list)
    refused: list[Change] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        """One line for each change, for log.txt."""
        return [f"changed: {change}" for change in (*self.refused, *self.allowed)]


def contents(recipe: Recipe, train: Sequence[Prompt], validation: Sequence[Prompt]) -> dict[str, Any]:
    """What the files hold that the recipe names: model without its weights, other models with them, prompts, functions
    of the reward, the rollout and the objective.

    The model's weights are left out, because a resumed run has its own.
    """
    rewards = {recipe.reward.name, *recipe.reward.by_source.values()}
    teachers = {} if recipe.teacher is None else recipe.teacher.models
    teachers = {
        key: model.path or recipe.model.path for key, model in teachers.items() if model.engine != "vllm_server"
    }
    return {
        "model": {name: _model_file(recipe.model.path / name) for name in _MODEL_FILES},
        "data": {"train": prompts_digest(train), "validation": prompts_digest(validation)},
        "reward": _files_of(rewards),
        **({} if recipe.reference is None else {"reference": _weights(recipe.reference.path or recipe.model.path)}),
        **({"teacher": {key: _weights(path) for key, path in teachers.items()}} if teachers else {}),
        **({"rollout": _files_of([function])} if (function := recipe.rollout.function) else {}),
        **({"objective": own} if (own := _files_of(user_functions(recipe.objective))) else {}),
    }


def _files_of(functions: Iterable[str]) -> dict[str, str]:
    """The digest of each function's file; functions of modules are left out."""
    files = {name: Path(name.rpartition(":")[0]) for name in sorted(functions)}
    return {name: _digest(path.read_bytes()) for name, path in files.items() if path.suffix == ".py" and path.is_file()}


def _model_file(path: Path) -> Any:
    """A configuration as it is, so that a change of it can be named; the digest of anything else."""
    if not path.is_file():
        return None
    data = path.read_bytes()
    if path.name == "tokenizer.json":
        return _digest(data)
    try:
        return {key: value for key, value in json.loads(data).items() if key not in _INCIDENTAL}
    except (ValueError, AttributeError):
        return _digest(data)


def _weights(folder: Path) -> dict[str, str]:
    """The digest of each file of weights: of its size and its end, which any training changes."""
    digests = {}
    for path in HFFolder(folder).files:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - WEIGHTS_READ))
            digests[path.name] = _digest(f"{size} ".encode() + file.read())
    return digests


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def compare(directory: RunDirectory, recipe: Recipe, now: Mapping[str, Any]) -> Comparison:
    """What differs from what the run in ``directory`` was last given. ``now``: its `contents`.

    A directory without a step or a checkpoint holds no run yet: nothing differs.
    """
    if not has_begun(directory) or not directory.recipe.is_file():
        return Comparison()
    allowed, refused = recipe_changes(read_recipe(directory.recipe), recipe.model_dump(mode="json"))
    before = read_contents(directory)
    if before is not None:
        refused += differences(before, now)
    return Comparison(allowed, refused)


def compare_origin(directory: RunDirectory, checkpoint: Path, recipe: Recipe, now: Mapping[str, Any]) -> Comparison:
    """What differs from the run that ``checkpoint`` is of, where that is another than the one in ``directory``.

    A new run may begin from a checkpoint under another recipe, but not under another model. Raises `InputError` where
    ``directory`` holds steps of its own that this checkpoint would not continue.
    """
    origin = RunDirectory(checkpoint.resolve().parent.parent)
    if origin.root == directory.root.resolve():
        return Comparison()
    goes_on_elsewhere = has_begun(directory) and started_at(directory) != read_step(checkpoint)
    if goes_on_elsewhere or list_checkpoints(directory.checkpoints):
        raise InputError(
            f"--resume {checkpoint}: of another run, and {directory.root} holds steps of its own; continue these with "
            "--resume auto, or give the new run a name of its own (--set name=…)"
        )
    comparison = compare(origin, recipe, now)
    refused = [change for change in comparison.refused if change.key.startswith("model.")]
    others = [change for change in comparison.refused if change not in refused]
    return Comparison([*others, *comparison.allowed], refused)


def started_at(directory: RunDirectory) -> int:
    """The step that the run began at: above 0 where it began from a checkpoint of another run."""
    try:
        lines = [path.open(encoding="utf-8").readline() for path in directory.kept_recipes()[:1]]
        return int(_FROM_STEP.match(lines[0])[1]) if lines else 0
    except (OSError, ValueError, TypeError):
        return 0


def has_begun(directory: RunDirectory) -> bool:
    """Whether there is anything of a run: a recorded step, or a checkpoint."""
    recorded = directory.metrics.is_file() and directory.metrics.stat().st_size > 0
    return recorded or bool(list_checkpoints(directory.checkpoints))


def refuse(directory: RunDirectory, comparison: Comparison) -> None:
    """Raise `InputError` with the changes that make another run of it."""
    if comparison.refused:
        raise InputError(
            f"run directory {directory.root} holds a run with another recipe ({directory.recipe.name}):\n"
            + "\n".join(f"  {change}" for change in comparison.refused)
            + "\ngive the new run a name of its own (--set name=…), or let this one go on with the changes "
            "(--allow-changes; they are logged, and both recipes are kept)"
        )


def read_recipe(path: Path) -> dict[str, Any]:
    """A resolved recipe with the defaults of keys that it is too old to have.

    One that this version's schema does not take is returned as it is. Raises `InputError` for what is no recipe.
    """
    try:
        values, _ = parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path}: cannot be read: {error}; restore it from one of {path.stem}.<n>.yaml") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: holds no recipe; restore it from one of {path.stem}.<n>.yaml")
    try:
        return Recipe.model_validate(values).model_dump(mode="json")
    except ValidationError:
        return values


def read_contents(directory: RunDirectory) -> dict[str, Any] | None:
    """The `contents` that the run was last started with; None where nobody wrote them."""
    try:
        record = json.loads(directory.environment.read_text(encoding="utf-8"))
        starts = [record, *record.get("resumed", [])]
        return next((start["identity"] for start in reversed(starts) if "identity" in start), None)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return None


def keep_recipe(directory: RunDirectory, recipe: Recipe, step: int) -> None:
    """Make ``recipe`` the one in force from ``step`` on. One that was in force already is not kept twice."""
    text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)
    kept = directory.kept_recipes()
    if not has_begun(directory):  # of attempts that made no step
        for path in kept:
            path.unlink()
        kept = []
    elif not kept and directory.recipe.is_file():
        kept = [_keep(directory, 1, 0, directory.recipe.read_text(encoding="utf-8"))]
    if not kept or kept[-1].read_text(encoding="utf-8").partition("\n")[2] != text:
        _keep(directory, len(kept) + 1, step, text)
    write_whole(directory.recipe, text)


def recipe_in_force(directory: RunDirectory, step: int) -> Path:
    """The file of the recipe that the run made ``step`` with: the newest that was in force from that step or earlier
    on. The resolved recipe of a run that kept none.
    """
    return next((path for start, path in reversed(recipes_of(directory)) if start <= step), directory.recipe)


def recipes_of(directory: RunDirectory) -> list[tuple[int, Path]]:
    """The recipes that the run kept, each with the step from which it was in force, the first one first."""
    found = []
    for path in directory.kept_recipes():
        with path.open(encoding="utf-8") as file:
            start = _FROM_STEP.match(file.readline())
        found += [] if start is None else [(int(start[1]), path)]
    return found


def _keep(directory: RunDirectory, number: int, step: int, text: str) -> Path:
    path = directory.kept_recipe(number)
    write_whole(path, f"# in force from step {step} on, {time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}")
    return path


def read_step(checkpoint: Path) -> int:
    """The step that a run's checkpoint was written after. Raises `InputError` where it names none."""
    file = checkpoint / TRAINER_FILE
    return settled(file, read_json(file, {}), "learner", lambda own: int(own["step"]), {"step": 0})


def begin_step(directory: RunDirectory, checkpoint: Path | None, num_steps: int) -> int:
    """The step that the run goes on from.

    Raises `InputError` where the checkpoint is past the end of the run, or where the run in ``directory`` began from
    another one's checkpoint and none is there to go on from.
    """
    if checkpoint is None:
        if (first := started_at(directory)) > 0:
            raise InputError(
                f"run directory {directory.root}: holds no checkpoint, and its first step is {first}: it began from a "
                "checkpoint of another run; name that one again with --resume DIR, or delete the folder"
            )
        return 0
    if (step := read_step(checkpoint)) > num_steps:
        raise InputError(
            f"num_steps: {num_steps}, but {checkpoint} was written after step {step}; raise num_steps, or go back to "
            "an older checkpoint with --resume DIR"
        )
    return step


def read_done(directory: RunDirectory) -> int | None:
    """The number of steps that DONE says; None where there is no such file, or something else is in it."""
    try:
        return int(directory.done.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def is_complete(directory: RunDirectory, num_steps: int) -> bool:
    """Whether the run has come to its end, ``num_steps``, and its last checkpoint is there."""
    checkpoints = list_checkpoints(directory.checkpoints)
    return read_done(directory) == num_steps and bool(checkpoints) and checkpoint_step(checkpoints[-1]) == num_steps
