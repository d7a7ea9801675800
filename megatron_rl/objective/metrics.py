"""Metrics of an objective (algorithms.md §11): sums per microbatch, and the numbers computed from them.

Symbols: mu, po, pi = probability under the rollout engine, the learner at rollout weights, the current learner;
d = log mu - log po, rho = po/mu, r = pi/po. Without old log-probs, po is pi of the same step. Ratios are summed as
rho - 1 and probabilities as 1 - p, so that variances and correlations of numbers close to 1 keep their digits. Shapes:
"tokens" is [B, T] padded or [N] packed; ``B`` sequences.

Mismatch by probability, position and length is as in the papers' figures (`objective.mismatch_detail`). All values are
sums per microbatch, computed without atomics and without waiting for the device, so that they add up over any split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from megatron_rl.config.objective import ObjectiveConfig
from megatron_rl.objective.aggregation import Collector, MetricStats
from megatron_rl.objective.centering import Centering
from megatron_rl.objective.corrections import Corrected
from megatron_rl.objective.inputs import MAX_LOG_RATIO, ObjectiveInputs, Tokens, k3, read_tokens, safe_exp
from megatron_rl.objective.instruments import REFERENCE_DISTORTION, is_low
from megatron_rl.objective.policy_terms import Term

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


EFFECTIVE_SAMPLE = "rollout_corr/eff_sample_size_seq"
"""(Σ P_i)² / (n Σ P_i²) of the n sequences that have trained tokens; `schedule.effective_sample` reads it."""


@torch.no_grad()
def collect(
    tokens: Tokens,
    config: ObjectiveConfig,
    term: Term,
    corrected: Corrected,
    loss: Tensor,
    regularizer: Tensor | None = None,
    centering: Centering | None = None,
) -> MetricStats:
    """Return the statistics of one call of compute_objective; `loss` and `regularizer` are its shares of the loss."""
    collector = start(tokens)
    collector.add("pg_loss", loss)
    if centering is not None:
        collector.add("head mu", centering.mu_mass)
        collector.range_of("head mu", centering.mu_mass, tokens.mask, smallest=True)
        collector.add("head pi", centering.pi_mass)
        collector.add("ρ", centering.tail_ratio * tokens.weight)
        collector.add("|c|", centering.coefficients)
        collector.add("sampled in head", centering.has_sampled)
    if regularizer is not None:
        collector.add("regularizer", regularizer)
    if tokens.reference is not None:
        difference = tokens.current.detach() - tokens.reference
        collector.add("log ref", difference)
        collector.add("k3 ref", k3(-difference))
    collector.add("log r", tokens.log_ratio)
    if tokens.router_weight is not None:
        collector.add("1 - γ", 1 - tokens.router_weight)
        collector.add("γ_min", (tokens.router_weight <= config.router_shift) & tokens.mask)
    if term.clipped is not None:
        collector.add("clipped", term.clipped & tokens.mask)
    if term.clipped_lower is not None:
        collector.add("clipped_lower", term.clipped_lower & tokens.mask)
    if tokens.entropy is not None:
        collector.add("entropy", tokens.entropy)
    distortion = config.distortion or REFERENCE_DISTORTION
    collector.add("J", tokens.advantages * is_low(tokens, distortion), scale=distortion.delta - 1)
    if tokens.inference is not None:
        collect_mismatch(collector, tokens, config.prob_bands)
        if config.mismatch_detail:
            collect_detail(collector, tokens, band_labels(config.prob_bands), config.prob_bands)
        if tokens.distances is not None:
            collect_by_distance(collector, tokens.old - tokens.inference, tokens.distances, tokens.mask)
        _collect_spurious(collector, tokens, term)
        if tokens.scoring is not None:
            _collect_scoring(collector, tokens)
    if tokens.teacher_gap is not None:
        _collect_teacher(collector, tokens, config)
    _collect_corrections(collector, tokens, corrected)
    return collector.stats()


def _collect_scoring(collector: Collector, tokens: Tokens) -> None:
    """Add the statistics of the two parts of log rho = (log po - log s) + (log s - log mu)."""
    learner, log_rho = tokens.old - tokens.scoring, tokens.old - tokens.inference
    for name, part in (("learner", learner), ("rest", tokens.scoring - tokens.inference)):
        collector.add_moments(f"s {name}", part)
        collector.range_of(f"s |{name}|", part.abs(), tokens.mask)
    collector.add_product("s log rho²", log_rho, log_rho)
    collector.add_product("s learner log rho", learner, log_rho)


def _collect_teacher(collector: Collector, tokens: Tokens, config: ObjectiveConfig) -> None:
    collector.add("teacher d", tokens.teacher_gap)
    collector.range_of("teacher d", tokens.teacher_gap, tokens.mask)
    collector.add("teacher floored", tokens.teacher_floored & tokens.mask)
    if tokens.divergence is not None:
        collector.add("D", tokens.divergence.value)
        collector.add("set pi", tokens.divergence.pi_mass)
        collector.add("set τ", tokens.divergence.teacher_mass)
    if config.mismatch_detail and tokens.inference is not None:
        place = _bins(tokens.layout.rank(tokens.mask).to(tokens.weight.dtype), PLACE_EDGES)
        for i, label in enumerate(place_labels()):
            collector.add(f"teacher d at {label}", tokens.teacher_gap * (place == i))


def start(tokens: Tokens) -> Collector:
    """Return a collector with the denominators of all means: trained tokens, and sequences that have any."""
    collector = Collector()
    collector.add("tokens", tokens.lengths)
    collector.add("sequences", tokens.lengths > 0)
    return collector


def collect_mismatch(collector: Collector, tokens: Tokens, bands: Sequence[float]) -> None:
    """Add the statistics of rho = po/mu and of both probabilities over trained tokens."""
    log_rho = tokens.old - tokens.inference
    clamped = log_rho.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    excess = clamped.expm1()  # rho - 1
    collector.add("log rho", log_rho)
    collector.add("k3", excess - clamped)
    collector.range_of("rho", excess, tokens.mask)
    collector.add_moments("rho", excess)
    rest_po, rest_mu = -tokens.old.expm1(), -tokens.inference.expm1()
    difference = (rest_mu - rest_po).abs()
    collector.range_of("diff", difference, tokens.mask)
    collector.add_moments("diff", difference)
    collector.add_moments("po", rest_po)
    collector.add_moments("mu", rest_mu)
    collector.add_product("po mu", rest_po, rest_mu)
    below = torch.zeros_like(tokens.mask)
    for label, high in zip(band_labels(bands), [*bands, None]):
        # Masked tokens have log po = 0, which is below no edge; the last band is the rest of the mask.
        below_high = tokens.mask if high is None else tokens.old < math.log(high)
        inside = below_high ^ below
        collector.add(f"tokens in {label}", inside)
        collector.add(f"rho in {label}", excess * inside)
        below = below_high
    _collect_sequence_mismatch(collector, tokens, log_rho)


def _collect_sequence_mismatch(collector: Collector, tokens: Tokens, log_rho: Tensor) -> None:
    log_product = tokens.layout.sum(log_rho)
    log_mean = log_product / tokens.lengths.clamp(min=1)
    collector.add("|mean d|", log_mean.abs())
    collector.add("|sum d|", log_product.abs())
    collector.add("ppl ratio", safe_exp(-log_mean) * (tokens.lengths > 0))
    product = log_product.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).double()
    collector.add_moments("P", product.exp() * (tokens.lengths > 0))
    collector.add("P² - 1", (2 * product).expm1())


def _collect_spurious(collector: Collector, tokens: Tokens, term: Term) -> None:
    """Add the statistics of X = r A [OH Eq 10] and X (phi - 1) [OH Eq 14].

    phi = 0 on every token whose ratio is outside the clip range, even if its gradient is not cut [OH Eq 12]. For terms
    without such a range, phi = 0 where the term clips.
    """
    x = safe_exp(tokens.log_ratio.detach()) * tokens.advantages
    inverse = (tokens.inference - tokens.old).clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO).expm1_()
    collector.add("x", x)
    collector.add("1/rho", inverse)
    collector.add_product("x/rho", x, inverse)
    outside = term.clipped if term.outside is None else term.outside
    if outside is not None:
        collector.add("x outside", x * outside)


def _collect_corrections(collector: Collector, tokens: Tokens, corrected: Corrected) -> None:
    if corrected.bounds is not None:
        lower, upper = corrected.bounds
        ratio = corrected.ratio
        # A one-sided cap has verl's floor 1/C, so that tiny weights do not raise the effective sample size.
        bounded = (ratio.clamp(lower or (1 / upper if upper < math.inf else 0.0), upper) - 1) * tokens.weight
        collector.add("is", (ratio - 1) * tokens.weight)
        collector.range_of("is", ratio, tokens.mask, smallest=True)
        collector.add_moments("is bounded", bounded)
        collector.add("is outside", ((ratio < lower) | (ratio > upper)) & tokens.mask)
    if corrected.weight is not None:
        applied = (corrected.weight - 1) * tokens.weight
        collector.range_of("applied", corrected.weight, tokens.mask, smallest=True)
        collector.add_moments("applied", applied)
    if corrected.dropped is not None:
        collector.add("dropped", corrected.dropped)
        collector.add("dropped sequences", tokens.layout.sum(corrected.dropped.to(tokens.weight.dtype)) > 0)


def finalize_metrics(stats: MetricStats) -> dict[str, float]:
    """Return the metrics of algorithms.md §11 from statistics of a whole mini-batch. It reads the device once.

    Metrics of absent inputs are left out. For a mini-batch without trained tokens, only its loss (0) and counts are
    returned: means are left out, so that no alarm or curve takes them for measurements.
    """
    sums, maxs, mins = _read(stats)
    if not sums["tokens"]:
        return {"actor/pg_loss": sums["pg_loss"], **_band_metrics(sums)}
    metrics = {**_actor_metrics(sums), **_correction_metrics(sums, maxs, mins)}
    if "rho" in sums:
        metrics.update(_mismatch_metrics(sums, maxs))
    if "|c|" in sums:
        metrics.update(_centering_metrics(sums, mins))
    if "teacher d" in sums:
        metrics.update(_teacher_metrics(sums, maxs))
    if "s learner" in sums:
        metrics.update(_scoring_metrics(sums, maxs))
    if "po - mu" in maxs:
        metrics.update(finalize_detail(sums, maxs, mins))
    if f"tokens of age {LABELS[0]}" in sums:
        metrics.update(finalize_by_distance(sums))
    if "x/rho" in sums:
        metrics.update(_spurious_metrics(sums))
    return metrics


def finalize_mismatch(stats: MetricStats) -> dict[str, float]:
    """Return the mismatch metrics from statistics of collect_mismatch; without tokens, only counts."""
    sums, maxs, _ = _read(stats)
    return _mismatch_metrics(sums, maxs) if sums["tokens"] else _band_metrics(sums)


def _read(stats: MetricStats) -> tuple[dict[str, float], ...]:
    values = (stats.sums, stats.maxs, stats.mins)
    return tuple(dict(zip(names, tensor.tolist())) for names, tensor in zip(stats.names, values))


def _actor_metrics(sums: dict[str, float]) -> dict[str, float]:
    num_tokens = max(sums["tokens"], 1.0)
    metrics = {"actor/pg_loss": sums["pg_loss"], "actor/ppo_kl": -sums["log r"] / num_tokens, "hacking/J": sums["J"]}
    if "regularizer" in sums:
        metrics["actor/regularizer_loss"] = sums["regularizer"]
    for name, total in (("pg_clipfrac", "clipped"), ("pg_clipfrac_lower", "clipped_lower"), ("entropy", "entropy")):
        if total in sums:
            metrics[f"actor/{name}"] = sums[total] / num_tokens
    if "log ref" in sums:
        metrics["reference/kl"] = sums["log ref"] / num_tokens
        metrics["reference/k3_kl"] = sums["k3 ref"] / num_tokens
    if "γ_min" in sums:
        metrics["actor/router_weight"] = 1 - sums["1 - γ"] / num_tokens
        metrics["actor/router_floor_frac"] = sums["γ_min"] / num_tokens
    return metrics


def _centering_metrics(sums: dict[str, float], mins: dict[str, float]) -> dict[str, float]:
    num_tokens = max(sums["tokens"], 1.0)
    metrics = {
        "head_mass_mu": sums["head mu"] / num_tokens,
        "head_mass_min": _finite(mins["head mu"]),
        "head_mass_pi": sums["head pi"] / num_tokens,
        "tail_ratio": sums["ρ"] / num_tokens,
        "abs_coeff_sum": sums["|c|"] / num_tokens,
        "outside_frac": 1 - sums["sampled in head"] / num_tokens,
    }
    return {f"score_centering/{name}": value for name, value in metrics.items()}


def _scoring_metrics(sums: dict[str, float], maxs: dict[str, float]) -> dict[str, float]:
    """Both parts, and Cov(learner, log rho) / Var(log rho), which is left out where log rho does not vary. NaN where a
    log-prob is."""
    num_tokens, metrics = sums["tokens"], {}
    for name in ("learner", "rest"):
        metrics[f"scoring/{name}_mean"] = sums[f"s {name}"] / num_tokens
        metrics[f"scoring/{name}_std"] = _std(sums, f"s {name}")
        metrics[f"scoring/{name}_max"] = maxs[f"s |{name}|"]
    variance = sums["s log rho²"] - sums["log rho"] ** 2 / num_tokens
    if variance > 0:
        covariance = sums["s learner log rho"] - sums["s learner"] * sums["log rho"] / num_tokens
        metrics["scoring/learner_share"] = covariance / variance
    return metrics


def _teacher_metrics(sums: dict[str, float], maxs: dict[str, float]) -> dict[str, float]:
    num_tokens = max(sums["tokens"], 1.0)
    metrics = {
        "teacher/kl": sums["teacher d"] / num_tokens,
        "teacher/kl_max": _finite(maxs["teacher d"]),
        "teacher/share_floor": sums["teacher floored"] / num_tokens,
    }
    if "D" in sums:
        metrics["teacher/divergence"] = sums["D"] / num_tokens
        metrics["teacher/set_mass"] = sums["set τ"] / num_tokens
        metrics["teacher/set_mass_pi"] = sums["set pi"] / num_tokens
    for label in place_labels():
        if f"teacher d at {label}" in sums and (count := sums[f"tokens at {label}"]) > 0:
            metrics[f"teacher/kl/position/{label}"] = sums[f"teacher d at {label}"] / count
    return metrics


def _spurious_metrics(sums: dict[str, float]) -> dict[str, float]:
    num_tokens = max(sums["tokens"], 1.0)
    covariance = sums["x/rho"] / num_tokens - sums["x"] / num_tokens * sums["1/rho"] / num_tokens
    metrics = {"hacking/cov_x_inv_rho": covariance}
    if "x outside" in sums:
        metrics["hacking/clip_bias"] = 0.0 - sums["x outside"] / num_tokens
    return metrics


def _correction_metrics(sums: dict, maxs: dict, mins: dict) -> dict[str, float]:
    num_tokens, metrics = max(sums["tokens"], 1.0), {}
    if "is" in sums:
        std, sample_size = _spread(sums, "is bounded")
        metrics = {
            "mean": 1 + sums["is"] / num_tokens,
            "std": std,
            "max": _finite(maxs["is"]),
            "min": _finite(mins["is"]),
            "eff_sample_size": sample_size,
            "oob_ratio": sums["is outside"] / num_tokens,
        }
        metrics = {f"rollout_corr/rollout_is_{name}": value for name, value in metrics.items()}
    if "applied" in sums:
        std, sample_size = _spread(sums, "applied")
        applied = {
            "mean": 1 + sums["applied"] / num_tokens,
            "std": std,
            "max": _finite(maxs["applied"]),
            "min": _finite(mins["applied"]),
            "eff_sample_size": sample_size,
        }
        metrics |= {f"rollout_corr/applied_weight_{name}": value for name, value in applied.items()}
    if "dropped" in sums:
        metrics["rollout_corr/rollout_rs_masked_fraction"] = sums["dropped"] / num_tokens
        metrics["rollout_corr/rollout_rs_seq_masked_fraction"] = sums["dropped sequences"] / max(sums["sequences"], 1.0)
    return metrics


def _spread(sums: dict, name: str) -> tuple[float, float]:
    """Return standard deviation and effective sample size (Σw)² / (n Σw²) of weights summed as w - 1 under ``name``."""
    num_tokens = max(sums["tokens"], 1.0)
    mean, square = sums[name] / num_tokens, sums[f"{name}²"] / num_tokens
    second_moment = square + 2 * mean + 1
    sample_size = (1 + mean) ** 2 / second_moment if second_moment > 0 else 0.0
    return math.sqrt(max(square - mean**2, 0.0)), sample_size


def _mismatch_metrics(sums: dict[str, float], maxs: dict[str, float]) -> dict[str, float]:
    num_tokens, num_sequences = max(sums["tokens"], 1.0), max(sums["sequences"], 1.0)
    correlation = _correlation(sums, "po", "mu", num_tokens)
    metrics = {
        "rollout_corr/kl": -sums["log rho"] / num_tokens,
        "rollout_corr/k3_kl": sums["k3"] / num_tokens,
        "rollout_corr/chi2_token": (sums["rho²"] + 2 * sums["rho"]) / num_tokens,
        "rollout_corr/chi2_seq": sums["P² - 1"] / num_sequences,
        EFFECTIVE_SAMPLE: sums["P"] ** 2 / (num_sequences * sums["P²"]),
        "rollout_corr/log_ppl_abs_diff": sums["|mean d|"] / num_sequences,
        "rollout_corr/log_ppl_abs_diff_sum": sums["|sum d|"] / num_sequences,
        "rollout_corr/ppl_ratio": sums["ppl ratio"] / num_sequences,
        "training/rollout_probs_diff_mean": sums["diff"] / num_tokens,
        "training/rollout_probs_diff_max": _finite(maxs["diff"]),
        "training/rollout_probs_diff_std": _std(sums, "diff"),
        "training/rollout_actor_probs_pearson_corr": correlation,
        "mismatch/rho_std": _std(sums, "rho"),
        "mismatch/rho_max": 1 + _finite(maxs["rho"]),
        "mismatch/pcc": correlation,
    }
    return {**metrics, **_band_metrics(sums)}


def band_labels(edges: Sequence[float]) -> list[str]:
    """Return labels of the bands [low, high) of po: ["0-0.1", "0.1-1"] for one edge 0.1."""
    return [f"{low:g}-{high:g}" for low, high in pairwise([0.0, *edges, 1.0])]


def _band_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Return mean and count of rho per band of po; an empty band has count 0 and no mean."""
    metrics = {}
    for label in (name.removeprefix("tokens in ") for name in sums if name.startswith("tokens in ")):
        count = sums[f"tokens in {label}"]
        metrics[f"mismatch/rho_count/{label}"] = count
        if count > 0:
            metrics[f"mismatch/rho_mean/{label}"] = 1 + sums[f"rho in {label}"] / count
    return metrics


def _std(sums: dict[str, float], name: str) -> float:
    """Return the sample standard deviation (n - 1), as torch.std and verl do; 0 for fewer than two tokens."""
    num_tokens = sums["tokens"]
    if num_tokens < 2:
        return 0.0
    variance = (sums[f"{name}²"] - sums[name] ** 2 / num_tokens) / (num_tokens - 1)
    return math.sqrt(max(variance, 0.0))


def _correlation(sums: dict[str, float], x: str, y: str, num_tokens: float) -> float:
    """Return the Pearson correlation; 0 if one of the two is constant, where it is undefined."""
    variance_x = sums[f"{x}²"] - sums[x] ** 2 / num_tokens
    variance_y = sums[f"{y}²"] - sums[y] ** 2 / num_tokens
    covariance = sums[f"{x} {y}"] - sums[x] * sums[y] / num_tokens
    scale = math.sqrt(max(variance_x, 0.0)) * math.sqrt(max(variance_y, 0.0))
    return max(-1.0, min(1.0, covariance / scale)) if scale > 0 else 0.0


DEFAULT_BANDS = ObjectiveConfig.model_fields["prob_bands"].default


@torch.no_grad()
def mismatch_metrics(
    old_logprobs: Tensor,
    inference_logprobs: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor | None = None,
    bands: Sequence[float] = DEFAULT_BANDS,
) -> dict[str, float]:
    """Return `rollout_corr/*`, `mismatch/*` and `training/rollout_*` (algorithms.md §11), as compute_objective does.

    Takes log po, log mu and the mask, each [B, T], or packed [N] with ``cu_seqlens``. Mismatch is the spread of
    rho = po/mu [OH §2; LD Eqs 7-8 for log_ppl_abs_diff_sum]. Raises InputError for shapes that disagree.
    """
    no_advantage = torch.zeros_like(old_logprobs)
    tokens = read_tokens(
        ObjectiveInputs(old_logprobs, old_logprobs, inference_logprobs, no_advantage, loss_mask, cu_seqlens)
    )
    collector = start(tokens)
    collect_mismatch(collector, tokens, bands)
    return finalize_mismatch(collector.stats())
