"""Mismatch by probability, position and length against numpy, in every form and split of a batch."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.config import ObjectiveConfig
from megatron_rl.objective import (
    MetricStats,
    ObjectiveInputs,
    compute_denominators,
    compute_objective,
    finalize_metrics,
)
from megatron_rl.objective.metrics import PLACE_EDGES, log_rho_edges, place_labels
from tests.support.rounding import CLOSED_FORM, rounded, unit_roundoff
from tests.unit.objective.batches import BATCH, packed, padded, random_batch

DETAIL = ObjectiveConfig.model_validate({"mismatch_detail": True, "prob_bands": [0.1, 0.5]})
ROUNDING = CLOSED_FORM * unit_roundoff()  # of a logarithm around 0
BANDS = {"0-0.1": (0.0, 0.1), "0.1-0.5": (0.1, 0.5), "0.5-1": (0.5, 1.0)}


@pytest.fixture(scope="module")
def batch():
    return random_batch(3, num_sequences=40)


def reference(batch) -> dict[str, float]:
    po, mu = (np.array([x for s in batch for x in getattr(s, name)]) for name in ("po", "mu"))
    d, rho = po - mu, np.exp(po - mu)
    metrics = {
        "mismatch/prob_diff_max": (np.exp(po) - np.exp(mu)).max(),
        "mismatch/prob_diff_min": (np.exp(po) - np.exp(mu)).min(),
        "mismatch/total_variation": np.abs(rho - 1).mean() / 2,
        "mismatch/log_rho_std": d.std(ddof=1),
        "mismatch/abs_log_rho_sum": np.abs(d).sum() / sum(len(s) > 0 for s in batch),
    }
    for label, (low, high) in BANDS.items():
        inside = (np.exp(po) >= low) & (np.exp(po) < high)
        metrics[f"mismatch/rho_std/{label}"] = rho[inside].std(ddof=1)
    for name, values in (("mu", mu), ("po", po)):
        counts, _ = np.histogram(np.exp(values), 20, (0, 1))
        for i, count in enumerate(counts):
            metrics[f"mismatch/{name}_share/{i / 20:g}-{(i + 1) / 20:g}"] = count / len(values)
    position = np.concatenate([np.arange(len(s)) for s in batch])
    lengths = np.array([len(s) for s in batch])
    sums = np.array([abs(np.sum(np.subtract(s.po, s.mu))) for s in batch])
    for i, label in enumerate(place_labels()):
        here = np.digitize(position, PLACE_EDGES) == i
        of_length = (np.digitize(lengths, PLACE_EDGES) == i) & (lengths > 0)
        if here.any():
            metrics[f"mismatch/abs_log_rho/position/{label}"] = np.abs(d[here]).mean()
        if of_length.any():
            metrics[f"mismatch/log_ppl_abs_diff_sum/length/{label}"] = sums[of_length].mean()
            bound = 2 * metrics["mismatch/total_variation"] * (lengths[of_length] ** 2).mean()
            metrics[f"mismatch/gradient_bound/length/{label}"] = bound
    return metrics


@pytest.mark.parametrize("form", [padded, packed])
def test_every_figure_is_its_formula(batch, form):
    inputs, _ = form(batch)
    detailed, plain = (compute_objective(inputs, config).metrics for config in (DETAIL, ObjectiveConfig()))
    want = reference(batch)
    assert {name: detailed[name] for name in want} == rounded(want, BATCH)
    quantiles = {name for name in detailed if "/rho_q" in name}
    assert set(detailed) - set(want) - quantiles <= set(plain) | {
        f"mismatch/rho_{kind}/{label}" for kind in ("mean", "count") for label in BANDS
    }, "nothing else"


@pytest.mark.parametrize("form", [padded, packed])
def test_quantiles_lie_in_the_bin_of_the_exact_ones(batch, form):
    inputs, _ = form(batch)
    measured = compute_objective(inputs, DETAIL).metrics
    po, mu = (np.array([x for s in batch for x in getattr(s, name)]) for name in ("po", "mu"))
    edges = np.array([-20.0, *log_rho_edges(), 20.0])
    for label, (low, high) in BANDS.items():
        log_rho = np.sort((po - mu)[(np.exp(po) >= low) & (np.exp(po) < high)])
        for share in (0.05, 0.5, 0.95):
            exact = log_rho[int(np.ceil(share * len(log_rho))) - 1]
            bin_of = np.digitize(exact, edges)
            interpolated = np.log(measured[f"mismatch/rho_q{100 * share:02.0f}/{label}"])
            assert edges[bin_of - 1] - ROUNDING <= interpolated <= edges[bin_of] + ROUNDING


def test_parts_of_a_minibatch_add_up(batch):
    inputs, _ = padded(batch)
    whole = compute_objective(inputs, DETAIL)
    counts = compute_denominators(inputs, DETAIL)

    def part(rows: slice) -> MetricStats:
        tensors = {k: None if v is None else v[rows] for k, v in vars(inputs).items()}
        return compute_objective(ObjectiveInputs(**tensors), DETAIL, counts).stats

    merged = finalize_metrics(MetricStats.merge([part(slice(0, 13)), part(slice(13, 40))]))
    assert merged == rounded(whole.metrics, BATCH)


def test_it_is_off_unless_asked_for(batch):
    inputs, _ = padded(batch)
    names = set(compute_objective(inputs, ObjectiveConfig()).metrics)
    assert not any("position" in name or "length/" in name or "_q05" in name or "share" in name for name in names)
