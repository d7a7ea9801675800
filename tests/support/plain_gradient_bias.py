"""The gradient of a mismatched batch and a corrected one in plain PyTorch, and how far rounding may move their figures.

The same stored batch, weights and parts as the rank program's, in any type; see `tests.support.plain_training`.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch

from megatron_rl.types import Batch
from tests.support.plain_training import load, logits
from tests.support.rounding import gamma, norm_from_double
from tests.support.tiny import MODEL, stored_rollouts

STEP = 3  # of the stored rollouts
PARTS = 4
FIGURES = ("gradient norm", "reference norm", "norm ratio", "cosine", "bias norm", "variance", "reference variance")


def shifts(case: str, batch: Batch) -> list[np.ndarray]:
    """log mu − log po of every response token, sequence by sequence: what `case` names."""
    lengths = [s.length for s in batch.sequences]
    if case == "noisy":
        random = np.random.default_rng(0)
        return [0.1 * random.standard_normal(length) for length in lengths]
    return [np.full(length, {"same": 0.0, "half": math.log(0.5)}[case]) for length in lengths]


LEVELS = {"same": "sequence", "half": "token", "noisy": "sequence"}
"""Of the importance weights of each case's reference."""


@dataclass(frozen=True)
class Gradients:
    """[PARTS, weights] float64: what each part of the batch adds to the run's gradient and to the reference's."""

    mine: np.ndarray
    reference: np.ndarray


def gradients(case: str, dtype: torch.dtype) -> Gradients:
    """Of the start's weights."""
    batch, model = stored_rollouts(STEP), load(MODEL, dtype)
    trained = list(model.parameters())
    everything, gradients = list(range(len(batch.sequences))), ([], [])
    tokens = sum(int(s.loss_mask.sum()) for s in batch.sequences)
    for k in range(PARTS):
        part = everything[len(everything) * k // PARTS : len(everything) * (k + 1) // PARTS]
        pi = _logprobs(model, Batch(batch.step, [batch.sequences[i] for i in part], []))
        ratios = _importance_weights(case, batch, part, [x.detach() for x in pi])
        for weights, into in (([torch.ones_like(x) for x in pi], gradients[0]), (ratios, gradients[1])):
            terms = [
                -float(batch.sequences[i].advantage) * (w * x)[torch.from_numpy(batch.sequences[i].loss_mask)].sum()
                for i, w, x in zip(part, weights, pi, strict=True)
            ]
            parts = torch.autograd.grad(sum(terms) / tokens, trained, retain_graph=True, allow_unused=True)
            flat = [torch.zeros_like(p) if g is None else g for p, g in zip(trained, parts, strict=True)]
            into.append(torch.cat([g.double().view(-1) for g in flat]).numpy())
    return Gradients(*(np.stack(rows) for rows in gradients))


def _logprobs(model: torch.nn.Module, batch: Batch) -> list[torch.Tensor]:
    labels = torch.cat([torch.from_numpy(s.tokens).long() for s in batch.sequences])
    chosen = logits(model, batch).log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
    return list(chosen.split([s.length for s in batch.sequences]))


def _importance_weights(case: str, batch: Batch, part: list[int], po: list[torch.Tensor]) -> list[torch.Tensor]:
    weights = []
    for i, x in zip(part, po, strict=True):
        mu = (x.numpy() + shifts(case, batch)[i]).astype(np.float32)  # as the rank program stores it
        log_rho = x - torch.from_numpy(mu).to(x.dtype)
        if LEVELS[case] == "sequence":
            masked = log_rho[torch.from_numpy(batch.sequences[i].loss_mask)]
            log_rho = masked.sum().expand_as(log_rho)
        weights.append(log_rho.exp())
    return weights


def figures(both_gradients: Gradients) -> dict[str, float]:
    """As `megatron_rl.instruments.batch.gradient_bias` defines them, from whole vectors."""
    g, reference = both_gradients.mine.sum(0), both_gradients.reference.sum(0)
    norms = float(np.linalg.norm(g)), float(np.linalg.norm(reference))
    return {
        "gradient norm": norms[0],
        "reference norm": norms[1],
        "norm ratio": norms[0] / norms[1],
        "cosine": float(g @ reference) / (norms[0] * norms[1]),
        "bias norm": float(np.linalg.norm(g - reference)),
        "variance": _variance(both_gradients.mine),
        "reference variance": _variance(both_gradients.reference),
    }


def _variance(parts: np.ndarray) -> float:
    return float(PARTS * (parts**2).sum() - (parts.sum(0) ** 2).sum()) / (PARTS - 1)


@functools.cache
def expected(case: str) -> tuple[dict[str, float], dict[str, float]]:
    """`figures` in float64, and how far those of a correct float32 evaluation may lie from them."""
    single, double = (gradients(case, dtype) for dtype in (torch.float32, torch.float64))
    return figures(double), limits(single, double)


def limits(single: Gradients, double: Gradients) -> dict[str, float]:
    """From `norm_from_double` of the two gradients and of their parts; sums are over a batch's tokens."""
    length = sum(s.whole_length for s in stored_rollouts(STEP).sequences)
    (g, e, v), (r, f, w) = (_errors(getattr(single, n), getattr(double, n), length) for n in ("mine", "reference"))
    # The command has |g - g*|^2 from three dot products in float64, which cancel.
    cancelled = 4 * gamma(double.mine.shape[1]) * max(g, r) ** 2
    return {
        "gradient norm": e,
        "reference norm": f,
        "norm ratio": (g + e) / (r - f) - g / r,
        "cosine": math.asin(e / g) + math.asin(f / r),  # the angles by which they may turn
        "bias norm": e + f + math.sqrt(cancelled),
        "variance": v,
        "reference variance": w,
    }


def _errors(single: np.ndarray, double: np.ndarray, length: int) -> tuple[float, float, float]:
    """|g|, the limit of its error in norm, and that of its variance (K sum |h_k|^2 - |g|^2) / (K - 1)."""
    whole = float(np.linalg.norm(double.sum(0)))
    error = norm_from_double(single.sum(0), double.sum(0), length)
    of_square = 2 * whole * error + error**2
    for a, b in zip(single, double, strict=True):
        of_part = norm_from_double(a, b, length)
        of_square += PARTS * (2 * float(np.linalg.norm(b)) * of_part + of_part**2)
    return whole, error, of_square / (PARTS - 1)
