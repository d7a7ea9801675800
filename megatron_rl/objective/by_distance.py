"""Mismatch by the age of the weights that sampled a token, where generation runs ahead (`rollout.max_staleness`).

A response may come from several policies (`rollout.in_flight`). Under weights that have not changed since, rho = po/mu
is the engines' mismatch alone; with every optimizer step in between staleness enters it.
Shapes: "tokens" is [B, T] padded or [N] packed.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from megatron_rl.objective.guards import MAX_LOG_RATIO
from megatron_rl.objective.stats import Collector

EDGES = (0, 1, 2, 3, 5, 9, 17)
"""Distances in optimizer steps at which a bin begins."""
LABELS = [f"{low}" if high == low + 1 else f"{low}-{high - 1}" for low, high in pairwise(EDGES)] + [f"{EDGES[-1]}-"]


def collect_by_distance(collector: Collector, log_rho: Tensor, distances: Tensor, mask: Tensor) -> None:
    """``log_rho`` tokens, log po - log mu; ``distances`` tokens, int; ``mask`` tokens, bool."""
    clamped = log_rho.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3 = clamped.expm1() - clamped
    edges = torch.tensor(EDGES[1:], device=distances.device)
    index = torch.bucketize(distances, edges, right=True)
    for number, label in enumerate(LABELS):
        here = (index == number) & mask
        collector.add(f"tokens of age {label}", here)
        collector.add_moments(f"log rho of age {label}", clamped * here)
        collector.add(f"k3 of age {label}", k3 * here)


def finalize_by_distance(sums: dict[str, float]) -> dict[str, float]:
    """`mismatch/*/distance/*` of the sums of a whole mini-batch; a distance without tokens has no metrics."""
    metrics, num_tokens = {}, max(sums["tokens"], 1.0)
    for label in LABELS:
        if not (count := sums[f"tokens of age {label}"]):
            continue
        total, square = sums[f"log rho of age {label}"], sums[f"log rho of age {label}²"]
        metrics[f"mismatch/share/distance/{label}"] = count / num_tokens
        metrics[f"mismatch/log_rho_mean/distance/{label}"] = total / count
        metrics[f"mismatch/k3/distance/{label}"] = sums[f"k3 of age {label}"] / count
        if count > 1:
            variance = max(square - total**2 / count, 0.0) / (count - 1)
            metrics[f"mismatch/log_rho_std/distance/{label}"] = math.sqrt(variance)
    return metrics
