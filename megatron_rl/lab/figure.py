"""A study's figure: its rows of arms, a column per metric, means over seeds with bands from lowest to highest."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from megatron_rl.lab.results import Results
from megatron_rl.monitor.curves import Curves
from megatron_rl.monitor.plots import PANELS, Panel, draw_panel, group_handles, legend_below

DEFAULT_METRICS = (
    "critic/rewards/mean",
    "mismatch/rho_std",
    "actor/grad_norm",
    "actor/entropy",
    "response_length/mean",
    "hacking/J",
)
SMOOTHING = 5  # steps of the running mean; a batch of 64 responses is noisy
DPI, COLOURS = 75, 96
WIDTH, HEIGHT = 3.5, 2.7  # inches of a panel


def draw_study(results: Results) -> Figure:
    """One row per `figure` entry of the study. Arms without a finished run are left out."""
    study = results.study.study
    metrics = study.panels or DEFAULT_METRICS
    figure = Figure(figsize=(WIDTH * len(metrics), HEIGHT * len(study.figure) + 0.4), layout="constrained")
    counts = {len(by_seed) for by_seed in results.records.values() if by_seed}
    seeds = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    figure.suptitle(f"{study.title}: mean of {seeds} seeds, band from lowest to highest", fontsize=11)
    for row, entry in enumerate(study.figure):
        groups = [
            Curves(study.arms[arm].label or arm, [smoothed(run, metrics) for run in results.records[arm].values()])
            for arm in entry.arms
            if results.records[arm]
        ]
        for column, metric in enumerate(metrics):
            axes = figure.add_subplot(len(study.figure), len(metrics), row * len(metrics) + column + 1)
            draw_panel(axes, _panel(metric), groups)
            if column == 0:
                axes.set_ylabel(entry.title, fontsize=9)
                legend_below(axes, group_handles(groups), columns=2)
    return figure


def save_small(figure: Figure, path: Path) -> None:
    """Save as a PNG of few colours, a third of the size: these go into the repository."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=DPI)
    with Image.open(drawn) as image:
        image.convert("RGB").quantize(COLOURS).save(path, format="PNG", optimize=True)


def smoothed(records: list[dict[str, float]], metrics: Sequence[str]) -> list[dict[str, float]]:
    """Each of ``metrics`` as its mean over the last `SMOOTHING` steps, fewer at the start; steps are kept. What comes
    every 20th step, as validations do, stays as it is."""
    smooth: list[dict[str, float]] = [{"step": record["step"]} for record in records]
    for metric in metrics:
        recent: list[tuple[float, float]] = []  # step, value
        for record, target in zip(records, smooth, strict=True):
            if metric in record and np.isfinite(record[metric]):
                recent = [seen for seen in recent if seen[0] > record["step"] - SMOOTHING]
                recent.append((record["step"], float(record[metric])))
                target[metric] = float(np.mean([value for _, value in recent]))
    return smooth


def _panel(metric: str) -> Panel:
    for panel in PANELS:
        if panel.metrics[0] == metric:
            return Panel(panel.title, (metric,), panel.is_log)
    return Panel(metric, (metric,))
