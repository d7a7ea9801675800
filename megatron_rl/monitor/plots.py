"""Curves of runs, from their metrics.jsonl and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter

from megatron_rl.monitor.curves import X_LABELS, Curves, XAxis, distinct, matching, smoothed, smoothing_span
from megatron_rl.monitor.heatmap import draw_disagreement
from megatron_rl.monitor.jsonl import read_metrics
from megatron_rl.monitor.panels import PANELS, Panel
from megatron_rl.monitor.run_directory import RunDirectory

LINE_STYLES = ("-", "--", ":", "-.")
COLOURS = tuple(f"C{index}" for index in range(10))
FAINT = 0.25  # opacity of what the smoothed line was made of
FEW_POINTS = 12  # validations: a line alone hides where they are


@dataclass(frozen=True)
class View:
    """How curves are drawn. ``smoothing``: steps that the exponential mean looks back over; None: by their number."""

    x: XAxis = "step"
    smoothing: int | None = None


def _names(panel: Panel, groups: Sequence[Curves]) -> dict[str, list[str]]:
    """Metrics that ``panel`` draws, each with those that are equal to it."""
    names = distinct(groups, matching(panel.metrics, set().union(*(group.metrics for group in groups))))
    # Side by side, several runs leave room for fewer curves each.
    limit = panel.limit if len(groups) == 1 else panel.limit and min(panel.limit, 2)
    if limit is None or len(names) <= limit:
        return names

    def mean(name: str) -> float:
        values = [float(r[name]) for group in groups for run in group.runs for r in run if name in r]
        return float(np.mean(values))

    return {name: names[name] for name in sorted(names, key=mean, reverse=True)[:limit]}


def drawable_panels(groups: Sequence[Curves]) -> list[Panel]:
    """The panels for which at least one run has a metric that is not 0 throughout."""
    return [panel for panel in PANELS if groups and _names(panel, groups)]


def zero_panels(groups: Sequence[Curves]) -> list[str]:
    """Titles of panels that are left out because every value is 0."""
    available = set().union(*(group.metrics for group in groups)) if groups else set()
    return [panel.title for panel in PANELS if matching(panel.metrics, available) and not _names(panel, groups)]


def draw_panel(axes: Axes, panel: Panel, groups: Sequence[Curves], view: View | None = None) -> None:
    """Draw ``panel``: a colour per group (mean over seeds, band from lowest to highest), a line style per metric.

    With one group the colours tell metrics apart. What tells groups apart is drawn by `add_group_legend`.
    """
    view = view or View(smoothing=1)
    metrics, single, positive = _names(panel, groups), len(groups) == 1, [np.empty(0)]
    handles = []
    for index, (metric, equal) in enumerate(metrics.items()):
        style = "-" if single else LINE_STYLES[index % len(LINE_STYLES)]
        handles.append(Line2D([], [], color=_colour(index) if single else "0.3", ls=style, label=_label(metric, equal)))
        for group_index, group in enumerate(groups):
            colour = _colour(index if single else group_index)
            positive.append(_draw_curve(axes, group, metric, view, colour, style))
    axes.set_title(panel.title, fontsize=10)
    if not metrics:
        recorded = matching(panel.metrics, set().union(*(group.metrics for group in groups)))
        say_why_empty(axes, "0 throughout" if recorded else "not recorded")
        return
    axes.set_xlabel(X_LABELS[view.x], fontsize=8)
    axes.tick_params(which="both", labelsize=8)
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=view.x == "step"))
    _scale(axes, panel, np.concatenate(positive))
    if len(metrics) > 1 or any(metrics.values()):
        legend_below(axes, handles, columns=1 if any(len(h.get_label()) > 24 for h in handles) else 2)


def say_why_empty(axes: Axes, why: str) -> None:
    """Write ``why`` where curves would be."""
    axes.set(xticks=[], yticks=[])
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", va="center", fontsize=9, color="0.4")


def _draw_curve(axes: Axes, group: Curves, metric: str, view: View, colour: str, style: str) -> np.ndarray:
    """Draw one metric of one group. Returns its positive values, which a logarithmic axis has to hold."""
    steps, values = group.series(metric)
    values = np.where(np.isfinite(values), values, np.nan)
    seen = np.isfinite(values).any(axis=0)
    steps, values = steps[seen], values[:, seen]
    if not len(steps):
        return np.empty(0)
    x, span = group.along(steps, view.x), smoothing_span(len(steps), view.smoothing)
    smooth = smoothed(values, span)
    marker = "." if len(steps) <= FEW_POINTS else None
    axes.plot(x, np.nanmean(smooth, axis=0), style, color=colour, lw=1.3, marker=marker, label=escaped(group.label))
    if len(values) > 1:
        axes.fill_between(x, np.nanmin(smooth, 0), np.nanmax(smooth, 0), color=colour, alpha=0.15, lw=0)
    elif span > 1:
        axes.plot(x, values[0], color=colour, lw=0.6, alpha=FAINT, zorder=1)
    return values[values > 0]


def _scale(axes: Axes, panel: Panel, positive: np.ndarray) -> None:
    # Within less than a decade the ticks of a logarithmic axis are hard to read, and nothing is gained.
    if panel.is_log and positive.size and positive.max() > 10 * positive.min():
        axes.set_yscale("log")
        if positive.max() > 100 * positive.min():
            axes.yaxis.set_minor_formatter(NullFormatter())
        return
    seen = np.concatenate([line.get_ydata() for line in axes.lines] or [np.empty(0)])
    seen = seen[np.isfinite(seen)]
    constant = seen.size and np.ptp(seen) <= 1e-9 * np.abs(seen).max()
    axes.yaxis.set_major_locator(FixedLocator([seen[0]]) if constant else MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _number(value)))


def _number(value: float) -> str:
    """``value`` in six digits at most, without the zeros of a small one: 1.2e-4, not 0.00012."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:.6g}"
    mantissa, exponent = f"{value:.5e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _label(metric: str, equal: Sequence[str]) -> str:
    """A metric's name, and the last parts of the names of those that have the same values."""
    return escaped(" = ".join([metric, *(name.rpartition("/")[2] for name in equal)]))


def escaped(text: str) -> str:
    """``text`` as matplotlib is to show it: no formula between dollar signs, and no name that legends leave out."""
    return ("\u200b" if text.startswith("_") else "") + text.replace("$", r"\$")


def legend_below(axes: Axes, handles: Iterable[Line2D], columns: int) -> None:
    """A legend under the axis of ``axes``, where no curve is."""
    axes.legend(
        handles=list(handles), fontsize=7, ncols=columns, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2)
    )


def group_handles(groups: Sequence[Curves]) -> list[Line2D]:
    """A coloured line for every group, with its name."""
    return [Line2D([], [], color=_colour(i), lw=2, label=escaped(group.label)) for i, group in enumerate(groups)]


def draw_figure(groups: Sequence[Curves], title: str, columns: int = 3, view: View | None = None) -> Figure:
    """All drawable panels in one figure; the names of several groups stand above them."""
    panels = drawable_panels(groups)
    rows = max(1, -(-len(panels) // columns))
    figure = Figure(figsize=(4.6 * columns, 3.1 * rows + 0.8), layout="constrained")
    for index, panel in enumerate(panels):
        draw_panel(figure.add_subplot(rows, columns, index + 1), panel, groups, view or View())
    if len(groups) > 1:
        shown = group_handles(groups)
        figure.legend(
            handles=shown, title=escaped(title), loc="outside upper center", ncols=min(4, len(shown)), frameon=False
        )
    else:
        figure.suptitle(escaped(title), fontsize=12)
    if zero := zero_panels(groups):
        figure.supxlabel(f"0 throughout, not drawn: {', '.join(zero)}", fontsize=8, color="0.4")
    return figure


def plot_run(run_dir: RunDirectory) -> Path:
    """``plots/curves.png`` of one run (returned), and ``plots/routes.png`` where routes were measured."""
    run_dir.plots.mkdir(parents=True, exist_ok=True)
    path = run_dir.plots / "curves.png"
    records = read_metrics(run_dir.metrics)
    draw_figure([Curves(run_dir.root.name, [records])], run_dir.root.name).savefig(path, dpi=110)
    if (figure := draw_disagreement(records, run_dir.root.name)) is not None:
        figure.savefig(run_dir.plots / "routes.png", dpi=110)
    return path
