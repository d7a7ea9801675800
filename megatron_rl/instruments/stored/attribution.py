"""Splits the mismatch of a stored batch into its causes, independent of their order.

The measure is the variance of w = pi/mu over response tokens, whose root is the std of rho that runs report. Three
causes can be removed separately: routing (replay the engine's routes), the LM head (fp32 logits) and the body (fp32
everywhere, including the head). If they are removed one after another, a cause's part depends on the order. The part
here is the Shapley value [Shapley 1953]: its mean over all orders. Parts and remainder add up to the variance.

Staleness is the difference between the weights of the update and those of the rollout. Only the run measured it, with
its own routing and precision, so it is added without an order. The remainder after removing every cause is what the
rollout engine alone does: its rounding, and what the recipe adds to it (`left_over`). A part is negative if a cause
cancels others.

A batch without the engine's routes has no part of routing, which is in the remainder then. An imported batch without
the learner's log-probs has no part of staleness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import numpy as np

from megatron_rl.config import Recipe
from megatron_rl.config.base import FP32_STORED
from megatron_rl.errors import InputError
from megatron_rl.instruments.stored.rerun import changed_recipe, exported, learner_at
from megatron_rl.learner.learner import Learner
from megatron_rl.monitor import RunDirectory
from megatron_rl.objective.guards import MAX_LOG_RATIO
from megatron_rl.run.recorded_batches import IMPORTED, RecordedBatch

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
    computes in fp32; half as many without routes. Raises InputError if a batch of a run lacks current log-probs.
    """
    batch = recorded.batch
    known = [s.current_logprobs is not None for s in batch.sequences]
    is_stale_known = all(known)
    if not is_stale_known and (any(known) or IMPORTED not in recorded.metrics):
        raise InputError(f"step {batch.step}: the batch has no current_logprobs; recorder.record_batches records them")
    if recipe.routing.replay == "r2":
        raise InputError("routing.replay: r2 stores the learner's own routes; attribution needs the engine's")
    variance = _measure(recorded)
    num_tokens = sum(s.response_length for s in batch.sequences)
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
                ({"LM head", "body"}, {"learner": {"dtype": "fp32"}}, not stored_fp32),
            ):
                if is_due:
                    changed = changed_recipe(routed, {"model": {"path": str(folder)}, **changes})
                    learner = Learner(changed)
                    score(learner, frozenset(taken))
                    learner.close()
    measured = _every_set(measured, [frozenset(), frozenset({"routing"})] if has_routes else [frozenset()])
    recipes_causes = frozenset({"routing"}) if recipe.routing.replay == "r3" else frozenset()
    staleness: list[Part] = []
    if is_stale_known:
        stored = np.concatenate([s.current_logprobs for s in batch.sequences])
        change = variance(stored) - measured[recipes_causes]
        staleness = [Part("staleness", "weights before the first update of the batch", change)]
    shares = shapley(measured, causes)
    what = {
        "routing": "the engine's routes replayed" + (" (as in the run)" if recipes_causes else ""),
        "LM head": f"already {recipe.learner.dtype if stored_fp32 else 'fp32'}" if head_is_fp32 else "fp32 logits",
        "body": f"already {recipe.learner.dtype}" if stored_fp32 else f"{recipe.learner.dtype} → fp32",
    }
    parts = (
        *staleness,
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


def draw(attribution: Attribution, title: str, path: Path) -> None:
    """Draw a bar per cause with its part of the variance."""
    from matplotlib.figure import Figure

    total = attribution.total
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    bars = axes.bar([part.cause for part in attribution.parts], [p.variance for p in attribution.parts], color="C0")
    axes.bar_label(bars, [f"{p.variance / total:.0%}" if total > 0 else "" for p in attribution.parts], fontsize=9)
    axes.axhline(0, color="black", lw=0.6)
    axes.set_ylabel("variance of pi/mu")
    axes.set_title(f"{title}: std {max(total, 0.0) ** 0.5:.3g} over {attribution.num_tokens} tokens", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
