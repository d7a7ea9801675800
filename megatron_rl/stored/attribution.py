"""Where the mismatch of a stored batch comes from: causes taken away one after another, and what each was worth.

The measure is the variance of w = pi/mu over response tokens, whose root is the std of rho that runs report. Variances
of independent causes add up, so the drop at each stage is that cause's part. The order is fixed: staleness, routing, LM
head, body. What is left when the learner computes in fp32 with the engine's routes is the engine's own rounding.
A part can be negative: a cause that cancelled another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_rl.config import Recipe
from megatron_rl.errors import InputError
from megatron_rl.learner.learner import Learner
from megatron_rl.monitor import RunDirectory
from megatron_rl.objective.guards import MAX_LOG_RATIO
from megatron_rl.stored.batches import RecordedBatch
from megatron_rl.stored.rerun import changed_recipe, exported, learner_at


@dataclass(frozen=True)
class Stage:
    """One line of the attribution: ``std`` is measured with this cause and those before it taken away."""

    cause: str
    what: str  # how the cause was taken away
    std: float  # of w or rho, what is left


@dataclass(frozen=True)
class Attribution:
    """``stages[0]`` is the mismatch with every cause in it."""

    stages: tuple[Stage, ...]
    num_tokens: int
    weights: str

    def parts(self) -> list[tuple[str, float]]:
        """(cause, variance): what each stage took away, then the remainder. They add up to the first variance."""
        variances = [stage.std**2 for stage in self.stages]
        drops = [(s.cause, a - b) for s, a, b in zip(self.stages[1:], variances[:-1], variances[1:], strict=True)]
        return [*drops, ("remainder", variances[-1])]


def attribute(directory: RunDirectory, recipe: Recipe, recorded: RecordedBatch, weights: str) -> Attribution:
    """Score the batch with the learner of its step under each stage. Collective; see `flight.learner_at`.

    Raises InputError where the batch lacks routes or current log-probs.
    """
    batch = recorded.batch
    for name, key in (
        ("routed_experts", "routing.replay: r3 or routing.telemetry: true"),
        ("current_logprobs", "recorder.record_batches"),
    ):
        if any(getattr(s, name) is None for s in batch.sequences):
            raise InputError(f"step {batch.step}: the batch has no {name}; {key} records them")
    if recipe.routing.replay == "r2":
        raise InputError("routing.replay: r2 stores the learner's own routes; attribution needs the engine's")
    if recipe.learner.dtype == "fp32":
        body, head = "already fp32", "already fp32"
    else:
        body, head = f"{recipe.learner.dtype} → fp32", "already fp32" if recipe.precision.fp32_head else "fp32 logits"
    routed = changed_recipe(recipe, {"routing": {"replay": "r3", "telemetry": False}})
    stored = np.concatenate([s.current_logprobs for s in batch.sequences])
    rho_std = _measure(recorded)
    with learner_at(directory, recipe, routed, batch.step, weights) as (learner, source):
        own = "replay" if recipe.routing.replay == "r3" else "native"
        native, replayed = (rho_std(_score(learner, recorded, mode)) for mode in ("native", "replay"))
        current, fresh = rho_std(stored), native if own == "native" else replayed
        with exported(learner) as folder:

            def with_precision(**changes: dict) -> float:
                changed = changed_recipe(routed, {"model": {"path": str(folder)}, **changes})
                return rho_std(_score(Learner(changed), recorded, "replay"))

            fp32_head = with_precision(precision={"fp32_head": True, "allow_asymmetric": True})
            fp32_body = with_precision(learner={"dtype": "fp32"})
    # Staleness is what lies between the weights of the update and those of the rollout; the run measured the first
    # with its own routing, so that the first line is put together: its variance with native routing.
    stale = current**2 - fresh**2
    everything = max(native**2 + stale, 0.0) ** 0.5
    stages = (
        Stage("everything", "native routing" + ("" if own == "native" else " (the run itself replayed)"), everything),
        Stage("staleness", "weights before the first update of the batch", native),
        Stage("routing", "the engine's routes replayed", replayed),
        Stage("LM head", head, fp32_head),
        Stage("body", body, fp32_body),
    )
    return Attribution(stages, len(stored), source)


def _score(learner: Learner, recorded: RecordedBatch, routing: str) -> np.ndarray:
    return np.concatenate(learner.compute_logprobs(recorded.batch, routing))


def _measure(recorded: RecordedBatch) -> Callable[[np.ndarray], float]:
    """log pi [R] → std of pi/mu over the trained tokens, as `mismatch/rho_std` has it."""
    mu = np.concatenate([s.inference_logprobs for s in recorded.batch.sequences]).astype(np.float64)
    mask = np.concatenate([s.loss_mask for s in recorded.batch.sequences])

    def rho_std(logprobs: np.ndarray) -> float:
        log_ratio = np.clip(logprobs - mu, -MAX_LOG_RATIO, MAX_LOG_RATIO)[mask]
        return float(np.expm1(log_ratio).std(ddof=1))

    return rho_std


def draw(attribution: Attribution, title: str, path: Path) -> None:
    """A bar per cause: its part of the variance."""
    from matplotlib.figure import Figure

    parts = attribution.parts()
    total = attribution.stages[0].std ** 2
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    bars = axes.bar([name for name, _ in parts], [value for _, value in parts], color="C0")
    axes.bar_label(bars, [f"{value / total:.0%}" if total else "" for _, value in parts], fontsize=9)
    axes.axhline(0, color="black", lw=0.6)
    axes.set_ylabel("variance of pi/mu")
    axes.set_title(f"{title}: std {attribution.stages[0].std:.3g} over {attribution.num_tokens} tokens", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
