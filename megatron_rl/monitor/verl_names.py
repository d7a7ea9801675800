"""Metrics under verl's names, where both mean the same: for TensorBoard, beside ours.

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
    """What ``metrics`` and ``batch`` say under verl's names. verl counts steps from 1."""
    found = {}
    for name, ours in _SAME.items():
        present = [metrics[our] for our in ours if our in metrics]
        if present:
            found[name] = float(sum(present))
    if batch is None or not batch.sequences:
        return found
    found["training/global_step"] = float(step + 1)
    found["perf/total_num_tokens"] = float(batch.num_tokens)
    lengths = np.array([sequence.prompt_length for sequence in batch.sequences])
    found |= _summary("prompt_length/", lengths, np.ones_like(lengths))
    advantages = np.array([sequence.advantage for sequence in batch.sequences])
    trained = np.array([sequence.num_trained for sequence in batch.sequences])
    return found | _summary("critic/advantages/", advantages, trained)


def _summary(name: str, values: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    """Mean, largest and smallest of ``values`` [B], each as often as its weight [B] says; as verl takes advantages over
    tokens."""
    if not weights.any():
        return {}
    seen = values[weights > 0]
    return {
        f"{name}mean": float(np.average(values, weights=weights)),
        f"{name}max": float(seen.max()),
        f"{name}min": float(seen.min()),
    }
