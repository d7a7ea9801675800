"""Repeats stored batches: the weights of their step, a changed recipe, the comparison of results, and attribution.

The weights of step S come from a checkpoint of step S, or from an earlier one and the repeated updates of the stored
batches in between. The user can choose other weights.

Attribution splits the mismatch of a batch into its causes, independent of their order.
The measure is the variance of w = pi/mu over response tokens, whose root is the std of rho that runs report. Three
causes can be removed separately: routing (replay the engine's routes), the LM head (fp32 logits) and the body (fp32
everywhere, including the head). If they are removed one after another, a cause's part depends on the order. The part
here is the Shapley value [Shapley 1953]: its mean over all orders. Parts and remainder add up to the variance.

Staleness is the difference between the weights of the update and those of the rollout. Only the run measured it, with
its own routing and precision, so it is added without an order. The remainder after removing every cause is what the
rollout engine alone does: its rounding, and what the recipe adds to it (`left_over`). A part is negative if a cause
cancels others.

A batch without the engine's routes has no part of routing, which is in the remainder then.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.checkpoint.manifest import TRAINER_FILE, list_checkpoints
from megatron_rl.config import Recipe, load_recipe
from megatron_rl.config.base import FP32_STORED
from megatron_rl.config.model_rules import layout_problems, routing_problems, set_problems
from megatron_rl.errors import InputError
from megatron_rl.learner.learner import Learner
from megatron_rl.model.architecture import read_architecture
from megatron_rl.monitor import RunDirectory
from megatron_rl.objective.inputs import MAX_LOG_RATIO
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
    problems += routing_problems(recipe.routing, architecture) + set_problems(recipe, architecture)
    if len(batch.minibatches) > recipe.batch.minibatches:
        problems.append(
            f"batch.minibatches: {recipe.batch.minibatches}, but the stored batch has {len(batch.minibatches)} and is "
            "updated by as many; use that number"
        )
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
    """Repeat the update of a stored step as in the loop and return its metrics. Log-probs of the learner's ranks are
    computed again, those of a teacher with an engine of its own stay."""
    batch = recorded.batch
    for sequence in batch.sequences:
        sequence.old_logprobs = sequence.current_logprobs = None
        sequence.reference_logprobs = sequence.scoring_logprobs = None
    lengths = [sequence.length for sequence in batch.sequences]
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
    changes = {"model": {"path": str(path)}}
    for name, other in (("reference", recipe.reference), ("teacher", recipe.teacher)):
        if other is not None and other.path is None:
            changes[name] = {"path": str(recipe.model.path)}  # it is what the run started from
    return changed_recipe(recipe, changes)


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


CAUSES = ("routing", "LM head", "body")


@dataclass(frozen=True)
class Part:
    """The contribution of one cause to the variance of pi/mu."""

    cause: str
    what: str  # how the cause was removed
    variance: float


@dataclass(frozen=True)
class Attribution:
    """The split of a variance. ``total``: variance of pi/mu with every cause and native routing, the sum of ``parts``.

    ``measured``: the variance without these causes (staleness excluded), for every subset of `CAUSES`; of the two last
    ones where the batch has no routes.
    """

    total: float
    parts: tuple[Part, ...]  # staleness, `CAUSES` or the two last ones, remainder
    measured: Mapping[frozenset[str], float]
    num_tokens: int
    weights: str


def shapley(values: Mapping[frozenset[str], float], causes: Iterable[str]) -> dict[str, float]:
    """Return, per cause, by how much its removal lowers ``values``, averaged over all orders.

    ``values``: the rest after removing a set of causes, for every subset of ``causes``. The parts add up to
    ``values[none] - values[all]``.
    """
    causes = tuple(causes)
    orders = list(permutations(causes))
    parts = dict.fromkeys(causes, 0.0)
    for order in orders:
        for number, cause in enumerate(order):
            before = frozenset(order[:number])
            parts[cause] += values[before] - values[before | {cause}]
    return {cause: part / len(orders) for cause, part in parts.items()}


def attribute(directory: RunDirectory, recipe: Recipe, recorded: RecordedBatch, weights: str) -> Attribution:
    """Score the batch with the learner of its step without each set of causes, and return the split. Collective.

    ``weights``: see `rerun.learner_at`. It takes six passes over the batch without gradient, two if the learner
    computes in fp32; half as many without routes. Raises InputError if the batch lacks current log-probs.
    """
    batch = recorded.batch
    if any(s.current_logprobs is None for s in batch.sequences):
        raise InputError(f"step {batch.step}: the batch has no current_logprobs; recorder.record_batches records them")
    if recipe.routing.replay == "r2":
        raise InputError("routing.replay: r2 stores the learner's own routes; attribution needs the engine's")
    variance = _measure(recorded)
    num_tokens = sum(s.length for s in batch.sequences)
    has_routes = all(s.routed_experts is not None for s in batch.sequences)
    causes = CAUSES if has_routes else CAUSES[1:]
    # A measurement may use an fp32 head in the learner alone.
    routed = changed_recipe(recipe, {"routing": {"replay": "r3" if has_routes else "off", "telemetry": False}})
    measured: dict[frozenset[str], float] = {}

    def score(learner: Learner, taken: frozenset[str]) -> None:
        modes = {"native": frozenset()} | ({"replay": frozenset({"routing"})} if has_routes else {})
        for mode, routing in modes.items():
            measured[taken | routing] = variance(np.concatenate(learner.compute_logprobs(batch, mode)))

    stored_fp32 = recipe.learner.dtype in FP32_STORED
    head_is_fp32 = recipe.precision.fp32_head or stored_fp32
    with learner_at(directory, recipe, routed, batch.step, weights) as (learner, source):
        score(learner, frozenset())
        routes_are_missing = learner.architecture.is_moe and not has_routes
        with exported(learner) as folder:
            learner.close()
            for taken, changes, is_due in (
                ({"LM head"}, {"precision": {"fp32_head": True, "allow_asymmetric": True}}, not head_is_fp32),
                ({"LM head", "body"}, {part: {"dtype": "fp32"} for part in ("learner", "rollout")}, not stored_fp32),
            ):
                if is_due:
                    changed = changed_recipe(routed, {"model": {"path": str(folder)}, **changes})
                    learner = Learner(changed)
                    score(learner, frozenset(taken))
                    learner.close()
    measured = _every_set(measured, [frozenset(), frozenset({"routing"})] if has_routes else [frozenset()])
    recipes_causes = frozenset({"routing"}) if recipe.routing.replay == "r3" else frozenset()
    stored = np.concatenate([s.current_logprobs for s in batch.sequences])
    change = variance(stored) - measured[recipes_causes]
    shares = shapley(measured, causes)
    what = {
        "routing": "the engine's routes replayed" + (" (as in the run)" if recipes_causes else ""),
        "LM head": f"already {recipe.learner.dtype if stored_fp32 else 'fp32'}" if head_is_fp32 else "fp32 logits",
        "body": f"already {recipe.learner.dtype}" if stored_fp32 else f"{recipe.learner.dtype} → fp32",
    }
    parts = (
        Part("staleness", "weights before the first update of the batch", change),
        *(Part(cause, what[cause], shares[cause]) for cause in causes),
        Part("remainder", left_over(recipe, routes_are_missing), measured[frozenset(causes)]),
    )
    return Attribution(sum(part.variance for part in parts), parts, measured, num_tokens, source)


def left_over(recipe: Recipe, routing: bool = False) -> str:
    """What makes up the remainder by the recipe: the engine's types, and whatever makes mu another policy than pi.

    ``routing``: other experts than the engine's are part of it.
    They are not told apart: a measurement of one of them would need the engine.
    """
    rollout, quantization = recipe.rollout, recipe.rollout.quantization
    rounded = [f"{quantization.weights} weights"] if quantization.weights else []
    rounded += [f"{quantization.kv_cache} keys and values"] if quantization.kv_cache else []
    types = ", ".join([*rounded, f"{rollout.dtype} elsewhere" if rounded else str(rollout.dtype)])
    also = ["routing (the batch has no routes: routing.telemetry: true)"] if routing else []
    also += [f"a dose of the kind {recipe.exact.dose.kind}"] if recipe.exact.dose else []
    also += ["what precision.allow_asymmetric permits"] if recipe.precision.allow_asymmetric else []
    also += ["weights of earlier steps"] if rollout.max_staleness else []
    return f"left over: the engine's rounding ({types})" + "".join(f", {text}" for text in also)


def _every_set(
    measured: Mapping[frozenset[str], float], routings: Iterable[frozenset[str]] = (frozenset(), frozenset({"routing"}))
) -> dict[frozenset[str], float]:
    """Return the variance for every set; some need no measurement: a body in fp32 implies a head in fp32.

    ``measured`` has the ``routings`` for the run's precision, and for an fp32 head and an fp32 body if they differ from
    it.
    """
    variances = {}
    for routing in routings:
        run = measured[routing]
        head = measured.get(routing | {"LM head"}, run)
        body = measured.get(routing | {"LM head", "body"}, head)
        variances |= {
            routing: run,
            routing | {"LM head"}: head,
            routing | {"body"}: body,
            routing | {"LM head", "body"}: body,
        }
    return variances


def _measure(recorded: RecordedBatch) -> Callable[[np.ndarray], float]:
    """Return a function from log pi [R] to the variance of pi/mu over trained tokens (root: `mismatch/rho_std`)."""
    mu = np.concatenate([s.inference_logprobs for s in recorded.batch.sequences]).astype(np.float64)
    mask = np.concatenate([s.loss_mask for s in recorded.batch.sequences])

    def variance(logprobs: np.ndarray) -> float:
        log_ratio = np.clip(logprobs - mu, -MAX_LOG_RATIO, MAX_LOG_RATIO)[mask]
        return float(np.expm1(log_ratio).var(ddof=1))

    return variance
