"""How the mismatch changes the gradient of a stored batch: it is that of a changed optimization problem [LD App. A].

Two objectives are differentiated at the weights of the step: the run's own, and a reference whose correction makes it
unbiased (untruncated importance sampling over whole sequences). With g the run's gradient and g* the reference's,
Bias = g - g* and Var = E|g - E g|^2, estimated from parts of the batch. These are the quantities of [LD Eq 13], whose
three terms are

    A = |g*|^2 - Var*,   B = <g*, Bias>,   C = Var + |Bias|^2,

with |g*|^2 made unbiased by the reference's own variance. One step of rate eta improves J by at least
eta (1 - L eta / 2) A + eta (1 - L eta) B - (L eta^2 / 2) C, where L is the unknown smoothness of J.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from megatron_rl.config import Recipe
from megatron_rl.errors import InputError
from megatron_rl.learner.gradient_noise import counted_shards
from megatron_rl.learner.learner import Learner
from megatron_rl.types import Batch


def reference_changes(recipe: Recipe) -> list[str]:
    """Changes that make the objective of ``recipe`` the reference: a correction that is unbiased over whole responses
    [LD Eq 4], and no score centering, which is not defined beside it."""
    changes = ["objective.correction=[{mode: is, level: sequence}]"]
    if recipe.objective.score_centering:
        changes.append("objective.score_centering=false")
        if recipe.teacher is None or recipe.teacher.tokens != "student":
            changes.append("rollout.sampled_head=0")
    return changes


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
    def bias_norm(self) -> float:
        """|g - g*|."""
        return max(self.norm**2 - 2 * self.dot + self.reference_norm**2, 0.0) ** 0.5

    def figures(self) -> dict[str, float]:
        """Return all figures under the names of the command's table."""
        return {
            "gradient norm": self.norm,
            "reference norm": self.reference_norm,
            "norm ratio": self.norm / self.reference_norm,
            "cosine": self.dot / (self.norm * self.reference_norm),
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
    logprobs: list = [None] * count
    needs_po = any(objective.renormalizes for objective in objectives)
    if original.routing.replay == "r2" or needs_po:
        logprobs = learner.compute_logprobs(batch, "record" if original.routing.replay == "r2" else None)
    for sequence, own_logprobs in zip(batch.sequences, logprobs, strict=True):
        sequence.old_logprobs = own_logprobs if needs_po else None  # at the weights of the step po is pi
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
