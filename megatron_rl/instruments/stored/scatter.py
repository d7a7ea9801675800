"""Scatter plots of inference against training probabilities, of a run's first and last stored batch [OH Fig 3]."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from megatron_rl.monitor import RunDirectory
from megatron_rl.run.recorded_batches import batch_path, load_batch, recorded_steps
from megatron_rl.types import Batch

MOST_POINTS = 20_000
"""Largest number of tokens in a plot, evenly thinned; the correlation is over all tokens."""


def probabilities(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return (po, mu) of the trained tokens, [N] each.

    po comes from the update's own pass if there is no other. Both are empty if the batch lacks the learner's log-probs.
    """
    pairs = []
    for sequence in batch.sequences:
        learner = sequence.current_logprobs if sequence.old_logprobs is None else sequence.old_logprobs
        if learner is not None:
            pairs.append(np.exp(np.stack([learner, sequence.inference_logprobs])[:, sequence.loss_mask]))
    return tuple(np.concatenate(pairs, axis=1)) if pairs else (np.empty(0), np.empty(0))


def draw_scatter(runs: Sequence[tuple[str, Path]], title: str) -> Figure | None:
    """Return a figure with two panels per (label, run folder) with stored batches; None if there are none."""
    recorded = [(label, RunDirectory(folder).batches) for label, folder in runs]
    recorded = [(label, folder, steps) for label, folder in recorded if (steps := recorded_steps(folder))]
    if not recorded:
        return None
    figure = Figure(figsize=(8, 3.8 * len(recorded) + 0.4), layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(len(recorded), 2, squeeze=False)
    for row, (label, folder, steps) in zip(axes, recorded, strict=True):
        for panel, step in zip(row, (steps[0], steps[-1]), strict=True):
            po, mu = probabilities(load_batch(batch_path(folder, step)).batch)
            every = max(1, len(po) // MOST_POINTS)
            panel.plot(po[::every], mu[::every], ".", ms=2, alpha=0.4)
            panel.plot([0, 1], [0, 1], "--", color="tab:red", lw=0.8)
            varies = len(po) > 2 and po.std() > 0 and mu.std() > 0
            text = f"{label}, step {step}" + (f": PCC {np.corrcoef(po, mu)[0, 1]:.4f}" if varies else "")
            panel.set_title(text, fontsize=9)
            panel.set_xlabel("learner", fontsize=8)
            panel.set_ylabel("rollout engine", fontsize=8)
    return figure
