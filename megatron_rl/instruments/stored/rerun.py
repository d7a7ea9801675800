"""Repeats stored batches: the weights of their step, a changed recipe, and the comparison of results.

The weights of step S come from a checkpoint of step S, or from an earlier one and the repeated updates of the stored
batches in between. The user can choose other weights.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.checkpoint.manifest import TRAINER_FILE, list_checkpoints
from megatron_rl.config import Recipe, load_recipe
from megatron_rl.config.model_rules import layout_problems, routing_problems
from megatron_rl.errors import InputError
from megatron_rl.learner.learner import Learner
from megatron_rl.model.architecture import read_architecture
from megatron_rl.monitor import RunDirectory
from megatron_rl.process.ranks import broadcast_object, gather_objects, world_rank
from megatron_rl.run.recorded_batches import RecordedBatch, batch_path, load_batch, recorded_steps
from megatron_rl.types import Batch

LAYOUT_KEYS = {"tp": "tensor", "pp": "pipeline", "ep": "expert", "etp": "expert_tensor"}


@dataclass(frozen=True)
class WeightsPlan:
    """Where the weights come from: a checkpoint (None: the model that the run started from), then repeated updates."""

    checkpoint: Path | None
    repeat: tuple[int, ...] = ()  # steps whose updates are repeated
    age: int = 0  # steps by which the result is older than the batch's weights

    def __str__(self) -> str:
        source = self.checkpoint.name if self.checkpoint else "the starting model"
        repeated = f", then the updates of step {_ranges(list(self.repeat))} repeated" if self.repeat else ""
        return source + repeated + (f"; {self.age} steps older than the batch" if self.age else "")


def open_run(folder: Path, overrides: Sequence[str] = ()) -> tuple[RunDirectory, Recipe]:
    """Return the run directory and its recipe with ``overrides`` (``a.b=c``). Raises InputError for other folders."""
    directory = RunDirectory(Path(folder))
    if not directory.recipe.is_file():
        raise InputError(f"{folder}: no {directory.recipe.name} in it; expected the directory of a run")
    return directory, load_recipe(directory.recipe, overrides)


def layout_overrides(layout: str) -> list[str]:
    """Return overrides of learner.parallel for ``tp=1,ep=2``; sizes that are not named become 1."""
    sizes = dict.fromkeys(LAYOUT_KEYS, "1")
    for item in layout.split(","):
        key, _, size = item.partition("=")
        if key not in LAYOUT_KEYS or not size.isdigit() or int(size) < 1:
            raise InputError(
                f"--layout {layout}: {item!r}; expected some of {', '.join(f'{k}=N' for k in LAYOUT_KEYS)}"
            )
        sizes[key] = size
    return [f"learner.parallel.{LAYOUT_KEYS[key]}={size}" for key, size in sizes.items()]


def watching_routes(recipe: Recipe, batch: Batch) -> Recipe:
    """Return ``recipe`` with comparison of routes, if the batch has any, even without replay."""
    if recipe.routing.replay != "off" or batch.sequences[0].routed_experts is None:
        return recipe
    return changed_recipe(recipe, {"routing": {"telemetry": True}})


def check_replayable(recipe: Recipe, batch: Batch) -> None:
    """Raise InputError if the changed ``recipe`` does not fit the model or the batch."""
    architecture = read_architecture(recipe.model.path)
    problems = layout_problems(recipe.learner.parallel, architecture, num_ranks(recipe))
    problems += routing_problems(recipe.routing, architecture)
    if recipe.routing.needs_engine_routes and batch.sequences[0].routed_experts is None:
        problems.append(
            "routing: the stored batch has no routes; they are recorded with routing.replay: r2 or r3, or "
            "routing.telemetry: true"
        )
    if problems:
        raise InputError("\n  ".join(["this batch cannot be replayed so:", *problems]))


def num_ranks(recipe: Recipe) -> int:
    """Return the smallest number of ranks for the layout."""
    p = recipe.learner.parallel
    return p.pipeline * math.lcm(p.tensor * p.context, p.expert * p.expert_tensor)


def plan_weights(directory: RunDirectory, step: int, weights: str) -> WeightsPlan:
    """Return the source of the weights for replaying ``step``. ``weights``: ``exact`` or ``nearest``.

    Raises InputError that lists what is missing for exact weights.
    """
    checkpoints = {int(path.name.removeprefix("step_")): path for path in list_checkpoints(directory.checkpoints)}
    earlier = {0: None} | {at: path for at, path in checkpoints.items() if at <= step}
    newest = max(earlier)
    recorded = set(recorded_steps(directory.batches))
    missing = [s for s in range(newest, step) if s not in recorded]
    if not missing:
        return WeightsPlan(earlier[newest], tuple(range(newest, step)))
    if weights == "nearest":
        return WeightsPlan(earlier[newest], age=step - newest)
    raise InputError(
        f"step {step}: exact weights are not available. The newest checkpoint before it is of step {newest}, and to "
        f"repeat the updates since, the batches of steps {_ranges(missing)} would have to be on disk "
        "(recorder.record_batches: all, or last_n with keep ≥ checkpoint.every). --weights nearest takes "
        f"{'the checkpoint' if newest else 'the starting model'} as it is, --weights DIR other weights"
    )


@contextmanager
def learner_at(
    directory: RunDirectory, original: Recipe, changed: Recipe, step: int, weights: str
) -> Iterator[tuple[Learner, str]]:
    """Yield a learner of ``changed`` with the weights before ``step``, and the source of the weights. Collective.

    ``original``: the run's recipe on the layout of ``changed``, for repeated updates. ``weights``: ``exact``,
    ``nearest``, a checkpoint of this project or a Hugging Face folder. With another dtype, the learner gets the
    converted weights of the run's dtype and a new optimizer.
    """
    if weights in ("exact", "nearest"):
        plan = plan_weights(directory, step, weights)
    elif (Path(weights) / TRAINER_FILE).is_file():
        plan = WeightsPlan(Path(weights))
    else:
        yield Learner(_with_model(changed, Path(weights))), str(weights)
        return
    converts = changed.learner.dtype != original.learner.dtype
    if not plan.repeat and (plan.checkpoint is None or not converts):
        learner = Learner(changed)
        if plan.checkpoint is not None:
            learner.load(plan.checkpoint)
        yield learner, str(plan)
        return
    learner = Learner(original)
    if plan.checkpoint is not None:
        learner.load(plan.checkpoint)
    for earlier in plan.repeat:
        repeat_update(learner, load_batch(batch_path(directory.batches, earlier)))
    if changed == original:
        yield learner, str(plan)
    elif converts:
        with exported(learner) as folder:
            learner.close()
            yield Learner(_with_model(changed, folder)), str(plan)
    else:
        with _shared_folder() as folder:
            saved = learner.save(folder, {})
            learner.close()
            learner = Learner(changed)
            learner.load(saved)
            yield learner, str(plan)


@contextmanager
def exported(learner: Learner) -> Iterator[Path]:
    """Yield a temporary Hugging Face folder with the learner's weights, for all ranks. Collective."""
    with _shared_folder() as folder:
        learner.export_hf(folder)
        gather_objects(None)  # ranks read only after the folder is complete
        yield folder


@contextmanager
def _shared_folder() -> Iterator[Path]:
    """Yield a temporary folder of rank 0, which is removed when every rank is done."""
    folder = Path(broadcast_object(tempfile.mkdtemp(prefix="weights-") if world_rank() == 0 else ""))
    try:
        yield folder
        gather_objects(None)
    finally:
        if world_rank() == 0:
            shutil.rmtree(folder)


def repeat_update(learner: Learner, recorded: RecordedBatch) -> dict[str, float]:
    """Repeat the update of a stored step as in the loop and return its metrics. Learner log-probs are recomputed."""
    batch = recorded.batch
    for sequence in batch.sequences:
        sequence.old_logprobs = sequence.current_logprobs = None
    lengths = [sequence.response_length for sequence in batch.sequences]
    learner.scheduler.observe_length(learner.num_updates, sum(lengths) / len(lengths))
    metrics = learner.update(batch)
    learner.step = batch.step + 1
    return metrics


def current_logprobs(learner: Learner, batch: Batch) -> list[np.ndarray]:
    """Return log pi [R] of every sequence after an update on ``batch``, on every rank. Collective."""
    held = {i: s.current_logprobs for i, s in enumerate(batch.sequences) if s.current_logprobs is not None}
    by_index = learner.passes.share(held)
    return [by_index[i] for i in range(len(batch.sequences))]


def compare(
    stored: Mapping[str, float], now: Mapping[str, float], names: Sequence[str]
) -> list[tuple[str, str, str, str]]:
    """Return rows (name, stored, now, difference). A name that ends in ``*`` matches all with that beginning."""
    rows = []
    for pattern in names:
        matching = sorted({*stored, *now}) if pattern.endswith("*") else [pattern]
        for name in (n for n in matching if n == pattern or n.startswith(pattern[:-1])):
            pair = [stored.get(name), now.get(name)]
            if pair != [None, None]:
                difference = "" if None in pair else f"{pair[1] - pair[0]:+.3e}"
                rows.append((name, *("" if x is None else f"{x:.6g}" for x in pair), difference))
    return rows


def _with_model(recipe: Recipe, path: Path) -> Recipe:
    return changed_recipe(recipe, {"model": {"path": str(path)}})


def changed_recipe(recipe: Recipe, changes: dict[str, dict[str, Any]]) -> Recipe:
    """Return ``recipe`` with keys of its sections replaced, validated again."""
    values = recipe.model_dump(mode="json")
    for section, keys in changes.items():
        values[section] = {**values[section], **keys}
    return Recipe.model_validate(values)


def _ranges(steps: list[int]) -> str:
    """Return "3 … 5, 8" for [3, 4, 5, 8]."""
    starts = [s for s in steps if s - 1 not in steps]
    ends = [s for s in steps if s + 1 not in steps]
    return ", ".join(str(a) if a == b else f"{a} … {b}" for a, b in zip(starts, ends, strict=True))
