"""Statistics of each expert in a stored batch: load on both engines, flips, and share of the mismatch.

A *flip* of expert e of layer l at a token: only one of the two engines sends the token there. The squared deviation
(rho - 1)^2 of a response token is split equally among all flips at that token, so that the shares of all experts and of
the tokens without a flip add up to one.

Shapes: N tokens with a route, L MoE layers, K experts per token, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_rl.errors import InputError
from megatron_rl.learner.learner import Learner
from megatron_rl.objective.guards import MAX_LOG_RATIO
from megatron_rl.routing import RouteShape
from megatron_rl.run.recorded_batches import RecordedBatch
from megatron_rl.types import Sequence

FLIPS_MATTER = 1.5  # times the deviation of a token without a flip


@dataclass
class ExpertReport:
    """Counts over all sequences of a batch."""

    layers: tuple[int, ...]  # [L] numbers of the MoE layers in the model
    engine_load: np.ndarray  # [L, E] int64, tokens that the rollout engine sends to the expert
    learner_load: np.ndarray  # [L, E] int64
    gained: np.ndarray  # [L, E] int64, tokens that only the learner sends there
    lost: np.ndarray  # [L, E] int64, tokens that only the engine sends there
    deviation: np.ndarray  # [L, E] float64, its part of the sum of (rho - 1)^2
    total_deviation: float  # of all trained response tokens
    num_tokens: int  # N over all sequences
    num_trained: int = 0  # trained response tokens
    num_flipped: int = 0  # those of them with a flip in any layer

    @property
    def rho_share(self) -> np.ndarray:
        """Share of the sum of (rho - 1)^2, [L, E]; zeros if rho is 1 everywhere."""
        return self.deviation / self.total_deviation if self.total_deviation else np.zeros_like(self.deviation)

    @property
    def share_without_flip(self) -> float:
        """Share of rho's deviation at tokens for which both engines choose the same experts in every layer."""
        return 1.0 - float(self.rho_share.sum()) if self.total_deviation else 0.0

    @property
    def flip_factor(self) -> float | None:
        """Mean (rho - 1)^2 of a token with a flip over that of one without; None if there are no such tokens."""
        without = self.num_trained - self.num_flipped
        if not self.num_flipped or not without or not self.total_deviation or self.share_without_flip <= 0:
            return None
        return (1 - self.share_without_flip) / self.num_flipped / (self.share_without_flip / without)

    def reading(self) -> list[str]:
        """What the numbers mean, in sentences. A share says little where most tokens have a flip; the factor does."""
        if not self.total_deviation:
            return ["rho is 1 at every token: there is no mismatch to share"]
        flipping = int(((self.gained + self.lost) > 0).sum())
        if not self.num_flipped:
            return ["no trained token is routed differently: routing is not what the mismatch is made of"]
        said = [f"{self.num_flipped / self.num_trained:.1%} of the trained tokens have a flip in some layer"]
        even = (1 - self.share_without_flip) / flipping
        said.append(f"scale of rho share: {even:.2%} each, if the {flipping} experts with flips had equal shares")
        factor = self.flip_factor
        if factor is None:
            said.append("every token has a flip, or none without one deviates: there is nothing to compare with")
            return said
        meaning = "flips and mismatch do not go together"
        if factor >= FLIPS_MATTER:
            meaning = "tokens that are routed differently carry more of it, which need not be because of their routes"
        said.append(f"(rho - 1)² of a token with a flip is {factor:.2g} times that of one without: {meaning}")
        said.append("rounding flips routes where it also moves probabilities; batch attribute measures what routes do")
        return said

    def rows(self, number: int) -> list[dict[str, float]]:
        """Return the ``number`` experts with the largest share of rho's variance, then the most flips."""
        flips = self.gained + self.lost
        order = np.lexsort((-flips.ravel(), -self.rho_share.ravel()))[:number]
        table = []
        for layer, expert in zip(*np.unravel_index(order, flips.shape), strict=True):
            at = (layer, expert)
            table.append(
                {
                    "layer": self.layers[layer],
                    "expert": int(expert),
                    "engine_load": int(self.engine_load[at]),
                    "learner_load": int(self.learner_load[at]),
                    "gained": int(self.gained[at]),
                    "lost": int(self.lost[at]),
                    "rho_share": float(self.rho_share[at]),
                }
            )
        return table


def expert_report(learner: Learner, recorded: RecordedBatch) -> ExpertReport:
    """Compare the engine's routes of a stored batch with the learner's at its current weights. Collective.

    rho = po/mu uses the learner's own routing. It takes one pass without gradient. Raises InputError if the batch has
    no routes of the engine, or the recipe does not compare routes.
    """
    batch = recorded.batch
    if any(s.routed_experts is None for s in batch.sequences):
        raise InputError(
            f"step {batch.step}: the batch has no routes of the engine; routing.replay: r3 or routing.telemetry: true "
            "records them"
        )
    shape = RouteShape.of(learner.architecture)
    engine = [s.routed_experts for s in batch.sequences]
    logprobs = learner.compute_logprobs(batch, "record")
    shape_le = (len(shape.layers), shape.num_experts)
    report = ExpertReport(shape.layers, *(np.zeros(shape_le, np.int64) for _ in range(4)), np.zeros(shape_le), 0.0, 0)
    for sequence, theirs, log_po in zip(batch.sequences, engine, logprobs, strict=True):
        _add(report, sequence, theirs, sequence.routed_experts, log_po, shape)
        sequence.routed_experts = theirs
    return report


def _add(
    report: ExpertReport,
    sequence: Sequence,
    engine: np.ndarray,
    learner: np.ndarray,
    log_po: np.ndarray,
    shape: RouteShape,
) -> None:
    """Add one sequence to ``report``.

    The output at position p - 1 samples the token at p, so (rho - 1)^2 of that token is split among the flips of
    position p - 1.
    """
    size = report.gained.shape
    is_recorded = engine[:, :, :1] < shape.num_experts  # [N, L, 1]: the engine has a record
    cells = np.arange(size[0])[:, None] * size[1]  # [L, 1]: number of a layer's first expert
    theirs, ours = (cells + routes.astype(np.int64) for routes in (engine, learner))  # [N, L, K]
    shared = ours[..., :, None] == theirs[..., None, :]  # [N, L, K, K]
    both = np.broadcast_to(is_recorded, ours.shape)
    gained, lost = both & ~shared.any(axis=-1), both & ~shared.any(axis=-2)

    def count(experts: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        return np.bincount(experts, weights, minlength=size[0] * size[1]).reshape(size)

    report.engine_load += count(theirs[both])
    report.learner_load += count(ours[both])
    report.gained += count(ours[gained])
    report.lost += count(theirs[lost])
    report.num_tokens += len(engine)
    log_rho = np.clip(log_po.astype(np.float64) - sequence.inference_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    squared = np.where(sequence.loss_mask, np.expm1(log_rho) ** 2, 0.0)  # [R]
    flips = gained.sum(axis=(1, 2)) + lost.sum(axis=(1, 2))  # [N]
    weight = np.zeros(len(engine))
    weight[sequence.prompt_length - 1 :] = squared
    weight = np.divide(weight, flips, out=np.zeros_like(weight), where=flips > 0)
    for experts, flipped in ((ours, gained), (theirs, lost)):
        report.deviation += count(experts[flipped], np.broadcast_to(weight[:, None, None], flipped.shape)[flipped])
    report.total_deviation += float(squared.sum())
    report.num_trained += int(sequence.loss_mask.sum())
    report.num_flipped += int((sequence.loss_mask & (flips[sequence.prompt_length - 1 :] > 0)).sum())
