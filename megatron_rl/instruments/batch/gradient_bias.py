"""What a stored batch shows of its learner: how the mismatch changes the gradient, and statistics of each expert.

The gradient is that of a changed optimization problem [LD App. A].
Two objectives are differentiated at the weights of the step: the run's own, and a reference whose correction makes it
unbiased (untruncated importance sampling over whole sequences). With g the run's gradient and g* the reference's,
Bias = g - g* and Var = E|g - E g|^2, estimated from parts of the batch. These are the quantities of [LD Eq 13], whose
three terms are

    A = |g*|^2 - Var*,   B = <g*, Bias>,   C = Var + |Bias|^2,

with |g*|^2 made unbiased by the reference's own variance. One step of rate eta improves J by at least
eta (1 - L eta / 2) A + eta (1 - L eta) B - (L eta^2 / 2) C, where L is the unknown smoothness of J.

A *flip* of expert e of layer l at a token: only one of the two engines sends the token there. The squared deviation
(rho - 1)^2 of a response token is split equally among all flips at that token, so that the shares of all experts and of
the tokens without a flip add up to one.

Shapes: N tokens with a route, L MoE layers, K experts per token, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.config import Recipe
from megatron_rl.errors import InputError
from megatron_rl.learner.gradient_noise import counted_shards
from megatron_rl.learner.learner import Learner
from megatron_rl.objective.inputs import MAX_LOG_RATIO
from megatron_rl.routing import RouteShape
from megatron_rl.run.recorded_batches import RecordedBatch
from megatron_rl.types import Batch, Rollout


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
    sequence: Rollout,
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


REFERENCE = ({"mode": "is", "level": "sequence"},)
"""The correction of the reference objective: unbiased over whole responses [LD Eq 4]."""


@dataclass(frozen=True)
class GradientBias:
    """Norms of gradients of the loss over the whole batch; ``num_parts``: number of parts for the variances."""

    norm: float  # |g|
    reference_norm: float  # |g*|
    dot: float  # <g, g*>
    variance: float  # Var of g, an estimate; it can be negative by chance
    reference_variance: float
    num_parts: int

    @property
    def cosine(self) -> float:
        return self.dot / (self.norm * self.reference_norm)

    @property
    def bias_norm(self) -> float:
        """|g - g*|."""
        return max(self.norm**2 - 2 * self.dot + self.reference_norm**2, 0.0) ** 0.5

    def figures(self) -> dict[str, float]:
        """Return all figures under the names of the command's table."""
        return {
            "gradient norm": self.norm,
            "reference norm": self.reference_norm,
            "norm ratio": self.norm / self.reference_norm,
            "cosine": self.cosine,
            "bias norm": self.bias_norm,
            "bias / reference": self.bias_norm / self.reference_norm,
            "variance": self.variance,
            "reference variance": self.reference_variance,
            "LD Eq 13, A": self.reference_norm**2 - self.reference_variance,
            "LD Eq 13, B": self.dot - self.reference_norm**2,
            "LD Eq 13, C": self.variance + self.bias_norm**2,
        }


def gradient_bias(learner: Learner, batch: Batch, reference: Recipe, num_parts: int = 4) -> GradientBias:
    """Compare the gradient of the learner's objective with that of ``reference`` over ``batch``. Collective.

    The batch is a single mini-batch here, even if the run split it. Its ``num_parts`` parts are consecutive sequences,
    so that groups stay together. The learner's weights do not change. It keeps two float32 gradients of this rank's
    share in host memory. Raises InputError if the batch has fewer sequences than parts.
    """
    count = len(batch.sequences)
    if not 2 <= num_parts <= count:
        raise InputError(f"--parts {num_parts}: expected 2 … {count}, the sequences of the batch")
    original = learner.recipe
    objectives = (original.objective, reference.objective)
    logprobs: list = [None] * count  # at the weights of the step po is pi
    if original.routing.replay == "r2" or any(objective.needs_old_logprobs(1) for objective in objectives):
        logprobs = learner.compute_logprobs(batch, "record" if original.routing.replay == "r2" else None)
    for sequence, own_logprobs in zip(batch.sequences, logprobs, strict=True):
        sequence.old_logprobs = own_logprobs
    try:
        gradient, variance = _gradient(learner, batch, num_parts)
        learner.recipe = reference
        theirs, reference_variance = _gradient(learner, batch, num_parts)
    finally:
        learner.recipe = original
    dots = _sum_over_ranks([_dot(a, b) for a, b in ((gradient, gradient), (theirs, theirs), (gradient, theirs))])
    return GradientBias(dots[0] ** 0.5, dots[1] ** 0.5, dots[2], variance, reference_variance, num_parts)


def _gradient(learner: Learner, batch: Batch, num_parts: int) -> tuple[list[torch.Tensor], float]:
    """Return this rank's share of the gradient over ``batch``, and the variance of the whole gradient.

    The parts' contributions h_k add up to g, and K h_k estimates g: Var = (K sum |h_k|^2 - |g|^2) / (K - 1).
    """
    everything = list(range(len(batch.sequences)))
    bounds = [len(everything) * k // num_parts for k in range(num_parts + 1)]
    total: list[torch.Tensor] | None = None
    squares = 0.0
    scale = 1.0 / float(learner.optimizer.get_loss_scale())
    for start, end in pairwise(bounds):
        learner.accumulate(batch, everything[start:end], everything)
        shards = counted_shards(learner.optimizer)
        part = [(p.main_grad.view(-1)[first:last].float() * scale).cpu() for p, first, last in shards]
        squares += _dot(part, part)
        total = part if total is None else [a.add_(b) for a, b in zip(total, part, strict=True)]
    total_square, parts = _sum_over_ranks([_dot(total, total), squares])
    return total, (num_parts * parts - total_square) / (num_parts - 1)


def _dot(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    return sum(float(torch.dot(a.double(), b.double())) for a, b in zip(left, right, strict=True))


def _sum_over_ranks(values: list[float]) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.tolist()
