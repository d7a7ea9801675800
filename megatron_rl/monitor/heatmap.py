"""Routing disagreement of a run, layer by step, from its metrics.jsonl."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

_PREFIX = "router/agree_frac/layer_"
# Below one row in ten thousand, disagreement is drawn as none: a step of the tiny model has some thousand rows a layer.
_FLOOR = 1e-4


def disagreement(records: Sequence[dict[str, float]]) -> tuple[list[int], list[int], np.ndarray]:
    """Layers [L], steps [S] and 1 − `router/agree_frac/layer_<i>` [L, S]; NaN where a step lacks a layer."""
    steps = [int(r["step"]) for r in records if any(name.startswith(_PREFIX) for name in r)]
    by_step = {int(r["step"]): r for r in records}
    names = {name for r in records for name in r if name.startswith(_PREFIX)}
    layers = sorted(int(name.removeprefix(_PREFIX)) for name in names)
    values = [[1.0 - by_step[step].get(f"{_PREFIX}{layer}", np.nan) for step in steps] for layer in layers]
    return layers, steps, np.array(values).reshape(len(layers), len(steps))


def draw_disagreement(records: Sequence[dict[str, float]], title: str) -> Figure | None:
    """Heat map "layer × step"; None for a run that measured no routes."""
    layers, steps, values = disagreement(records)
    if not layers:
        return None
    figure = Figure(figsize=(8, max(2.2, 0.22 * len(layers) + 1.2)), layout="constrained")
    axes = figure.subplots()
    # By position, not by step number: a step without an update leaves no hole.
    image = axes.imshow(
        np.maximum(values, _FLOOR), aspect="auto", origin="lower", interpolation="nearest", norm=LogNorm(_FLOOR, 1.0)
    )
    wanted = MaxNLocator(8, integer=True).tick_values(steps[0], steps[-1])  # round numbers, where they were recorded
    ticks = [steps.index(int(step)) for step in wanted if int(step) in steps] or [0]
    axes.set_xticks(ticks, [str(steps[i]) for i in ticks], fontsize=8)
    rows = range(0, len(layers), max(1, len(layers) // 24))
    axes.set_yticks(list(rows), [str(layers[i]) for i in rows], fontsize=8)
    axes.set_xlabel("step", fontsize=9)
    axes.set_ylabel("layer", fontsize=9)
    axes.set_title(f"{title}: share of tokens that the learner alone would route otherwise", fontsize=10)
    figure.colorbar(image, ax=axes, pad=0.01).ax.tick_params(labelsize=8)
    return figure
