"""Metrics under verl's names, for TensorBoard, where verl's metric means the same as ours.

verl's loop has fewer phases: `timing_s/update_actor` is the sum of ours that make up an update.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megatron_rl.types import Batch

_SAME = {
    "timing_s/gen": ("perf/time/generate",),
    "timing_s/reward": ("perf/time/reward",),
    "timing_s/old_log_prob": ("perf/time/old_logprobs",),
    "timing_s/update_actor": (
        "perf/time/forward_backward",
        "perf/time/gate",
        "perf/time/optimizer",
        "perf/time/noise",
        "perf/time/reduce_metrics",
    ),
    "timing_s/update_weights": ("perf/time/refit",),
    "timing_s/testing": ("perf/time/validate",),
    "timing_s/step": ("perf/time/step",),
    "perf/time_per_step": ("perf/time/step",),
}


def verl_names(step: int, metrics: Mapping[str, float], batch: Batch | None) -> dict[str, float]:
    """Return the figures of ``metrics`` and ``batch`` under verl's names. verl counts steps from 1."""
    values = {}
    for name, ours in _SAME.items():
        present = [metrics[our] for our in ours if our in metrics]
        if present:
            values[name] = float(sum(present))
    if batch is None or not batch.sequences:
        return values
    values["training/global_step"] = float(step + 1)
    values["perf/total_num_tokens"] = float(batch.num_tokens)
    lengths = np.array([sequence.prompt_length for sequence in batch.sequences])
    values |= _summary("prompt_length/", lengths, np.ones_like(lengths))
    advantages = np.array([sequence.advantage for sequence in batch.sequences])
    trained = np.array([sequence.num_trained for sequence in batch.sequences])
    return values | _summary("critic/advantages/", advantages, trained)


def _summary(name: str, values: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    """Return mean, maximum and minimum of ``values`` [B], weighted by ``weights`` [B], as verl weights by tokens.

    Values of weight 0 do not count.
    """
    if not weights.any():
        return {}
    seen = values[weights > 0]
    return {
        f"{name}mean": float(np.average(values, weights=weights)),
        f"{name}max": float(seen.max()),
        f"{name}min": float(seen.min()),
    }
