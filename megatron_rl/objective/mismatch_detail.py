"""Mismatch by probability, position and length, as in the papers' figures (`objective.mismatch_detail`).

Symbols as in `metrics`: d = log mu - log po, rho = po/mu. All values are sums per microbatch, computed without atomics
and without waiting for the device, so that they add up over any split. Shapes: "tokens" is [B, T] padded or [N] packed;
``B`` sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from megatron_rl.objective.guards import MAX_LOG_RATIO
from megatron_rl.objective.inputs import Tokens
from megatron_rl.objective.stats import Collector

PLACE_EDGES = (4, 16, 64, 256, 1024, 4096, 16384, 65536)
"""Bounds of the bins of positions and of lengths, in tokens."""
PROBABILITY_BINS = 20
SMALLEST_LOG_RHO, NUM_LOG_RHO_EDGES = 1e-6, 40
"""|log rho| is counted in bins from this value to MAX_LOG_RATIO, each 1.54 times as wide as the previous. Quantiles of
rho are interpolated inside a bin."""
QUANTILES = (0.05, 0.5, 0.95)


def place_labels() -> list[str]:
    """Return the labels of the bins [low, high) of positions and lengths: ["0-4", "4-16", …, "65536-"]."""
    return [f"{low}-{high}" for low, high in pairwise([0, *PLACE_EDGES])] + [f"{PLACE_EDGES[-1]}-"]


def probability_labels() -> list[str]:
    return [f"{i / PROBABILITY_BINS:g}-{(i + 1) / PROBABILITY_BINS:g}" for i in range(PROBABILITY_BINS)]


def log_rho_edges() -> list[float]:
    """Return the edges of the bins of log rho, ascending and symmetric about 0."""
    positive = [SMALLEST_LOG_RHO * math.exp(i * _log_step()) for i in range(NUM_LOG_RHO_EDGES)]
    return [-edge for edge in reversed(positive)] + positive


def collect_detail(collector: Collector, tokens: Tokens, bands: Sequence[str], band_edges: Sequence[float]) -> None:
    """Add the detailed statistics. ``bands``: labels of the bands of po that ``band_edges`` divide (0, 1) into."""
    log_rho = (tokens.old - tokens.inference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    difference = tokens.old.exp() - tokens.inference.exp()
    collector.range_of("po - mu", difference, tokens.mask, smallest=True)
    collector.add("|rho - 1|", log_rho.expm1().abs())
    collector.add("|d|", log_rho.abs())
    collector.add_moments("d", log_rho)
    band = _bins(tokens.old, [math.log(edge) for edge in band_edges])
    for i, label in enumerate(bands):
        inside = log_rho.expm1() * ((band == i) & tokens.mask)
        collector.add_product(f"rho² in {label}", inside, inside)
    size = 2 * NUM_LOG_RHO_EDGES + 1
    fine = band * size + _log_rho_bins(log_rho)
    _add_counts(collector, "rho bin", fine, tokens.mask, size * len(bands))
    for name, logprobs in (("mu", tokens.inference), ("po", tokens.old)):
        bin_of = (logprobs.exp() * PROBABILITY_BINS).long().clamp(max=PROBABILITY_BINS - 1)
        _add_counts(collector, f"{name} bin", bin_of, tokens.mask, PROBABILITY_BINS)
    place = _bins(tokens.layout.rank(tokens.mask).to(tokens.weight.dtype), PLACE_EDGES)
    by_length = _bins(tokens.lengths, PLACE_EDGES)
    trained, product = tokens.lengths > 0, tokens.layout.sum(tokens.old - tokens.inference).abs()
    for i, label in enumerate(place_labels()):
        in_bin = (place == i) & tokens.mask
        collector.add(f"tokens at {label}", in_bin)
        collector.add(f"|d| at {label}", log_rho.abs() * in_bin)
        of_length = (by_length == i) & trained
        collector.add(f"sequences of {label}", of_length)
        collector.add(f"|sum d| of {label}", product * of_length)
        collector.add(f"T² of {label}", tokens.lengths.double().square() * of_length)


def _bins(values: Tensor, edges: Sequence[float]) -> Tensor:
    """Return the index of the bin [low, high) of each value, 0 … len(edges); fast for few edges."""
    index = torch.zeros_like(values, dtype=torch.int64)
    for edge in edges:
        index += values >= edge
    return index


def _log_rho_bins(log_rho: Tensor) -> Tensor:
    """Return the same for `log_rho_edges`, computed on the device: copying them from the host would wait."""
    steps = torch.arange(NUM_LOG_RHO_EDGES, dtype=torch.float64, device=log_rho.device)
    positive = SMALLEST_LOG_RHO * (steps * _log_step()).exp()
    edges = torch.cat([-positive.flip(0), positive]).to(log_rho.dtype)
    return torch.bucketize(log_rho, edges, right=True)


def _log_step() -> float:
    return math.log(MAX_LOG_RATIO / SMALLEST_LOG_RHO) / (NUM_LOG_RHO_EDGES - 1)


def _add_counts(collector: Collector, name: str, index: Tensor, mask: Tensor, size: int) -> None:
    """Add how often each of 0 … size - 1 occurs in ``index`` under the mask."""
    ordered = index.masked_fill(~mask, -1).flatten().sort().values
    bounds = torch.searchsorted(ordered, torch.arange(size + 1, device=index.device))
    collector.add_vector(name, bounds.diff())


def finalize_detail(sums: dict[str, float], maxs: dict[str, float], mins: dict[str, float]) -> dict[str, float]:
    """Return `mismatch/*` from the sums of a whole mini-batch; an empty bin has a count of 0 and no mean."""
    num_tokens = max(sums["tokens"], 1.0)
    total_variation = sums["|rho - 1|"] / num_tokens / 2
    metrics = {
        "mismatch/prob_diff_max": _finite(maxs["po - mu"]),
        "mismatch/prob_diff_min": _finite(mins["po - mu"]),
        "mismatch/total_variation": total_variation,
        "mismatch/abs_log_rho_sum": sums["|d|"] / max(sums["sequences"], 1.0),
        "mismatch/log_rho_std": math.sqrt(max(sums["d²"] - sums["d"] ** 2 / num_tokens, 0.0) / max(num_tokens - 1, 1)),
    }
    size = 2 * NUM_LOG_RHO_EDGES + 1
    for i, label in enumerate(name.removeprefix("rho² in ") for name in sums if name.startswith("rho² in ")):
        count, total, square = sums[f"tokens in {label}"], sums[f"rho in {label}"], sums[f"rho² in {label}"]
        if count > 1:
            metrics[f"mismatch/rho_std/{label}"] = math.sqrt(max(square - total**2 / count, 0.0) / (count - 1))
        if count > 0:
            counts = [sums[f"rho bin[{i * size + j}]"] for j in range(size)]
            for share in QUANTILES:
                metrics[f"mismatch/rho_q{100 * share:02.0f}/{label}"] = math.exp(_quantile(counts, share))
    for name in ("mu", "po"):
        for i, label in enumerate(probability_labels()):
            metrics[f"mismatch/{name}_share/{label}"] = sums[f"{name} bin[{i}]"] / num_tokens
    for label in place_labels():
        if (count := sums[f"tokens at {label}"]) > 0:
            metrics[f"mismatch/abs_log_rho/position/{label}"] = sums[f"|d| at {label}"] / count
        if (count := sums[f"sequences of {label}"]) > 0:
            metrics[f"mismatch/log_ppl_abs_diff_sum/length/{label}"] = sums[f"|sum d| of {label}"] / count
            metrics[f"mismatch/gradient_bound/length/{label}"] = 2 * total_variation * sums[f"T² of {label}"] / count
    return metrics


def _quantile(counts: Sequence[float], share: float) -> float:
    """Return the log rho below which the share ``share`` of tokens is, interpolated linearly inside a bin."""
    edges = [-MAX_LOG_RATIO, *log_rho_edges(), MAX_LOG_RATIO]
    rank, before = share * sum(counts), 0.0
    for count, low, high in zip(counts, edges, edges[1:], strict=True):
        if count and before + count >= rank:
            return low + (high - low) * (rank - before) / count
        before += count
    return edges[-1]


def _finite(value: float) -> float:
    """Return ``value``, or 0 for the extreme of an empty set."""
    return value if math.isfinite(value) else 0.0


# Mismatch by the age of the weights that sampled a token, if generation runs ahead (`rollout.max_staleness`).
#
# A response may come from several policies (`rollout.in_flight`). If the weights have not changed since, rho = po/mu is
# only the engines' mismatch; each optimizer step in between adds staleness. Shapes: "tokens" is [B, T] padded or [N]
# packed.


EDGES = (0, 1, 2, 3, 5, 9, 17)
"""Distances in optimizer steps at which a bin begins."""
LABELS = [f"{low}" if high == low + 1 else f"{low}-{high - 1}" for low, high in pairwise(EDGES)] + [f"{EDGES[-1]}-"]


def collect_by_distance(collector: Collector, log_rho: Tensor, distances: Tensor, mask: Tensor) -> None:
    """Add statistics of ``log_rho`` (tokens, log po - log mu) by ``distances`` (tokens, int) under ``mask``."""
    clamped = log_rho.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3 = clamped.expm1() - clamped
    edges = torch.tensor(EDGES[1:], device=distances.device)
    index = torch.bucketize(distances, edges, right=True)
    for number, label in enumerate(LABELS):
        in_bin = (index == number) & mask
        collector.add(f"tokens of age {label}", in_bin)
        collector.add_moments(f"log rho of age {label}", clamped * in_bin)
        collector.add(f"k3 of age {label}", k3 * in_bin)


def finalize_by_distance(sums: dict[str, float]) -> dict[str, float]:
    """Return `mismatch/*/distance/*` from the sums of a mini-batch; a distance without tokens has no metrics."""
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
