"""Plots of runs, drawn from their metrics.jsonl alone.

`PANELS` has the metrics of each panel. `Curves` are those of an experiment with its seeds.
"""

from __future__ import annotations

import html
import io
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter

from megatron_rl.monitor.run_directory import RunDirectory, read_metrics


@dataclass(frozen=True)
class Panel:
    """One small plot: its metrics (regular expressions of full names), scale and largest number of curves."""

    title: str
    metrics: tuple[str, ...]
    is_log: bool = False
    limit: int | None = None  # if more metrics match, those with the largest mean are drawn


VALIDATION = (r"val/reward/mean", r"val/.+/(avg|pass)@\d+")
PANELS = (
    Panel("reward", ("critic/rewards/mean",)),
    Panel("validation", VALIDATION),
    Panel("KL to the teacher", ("teacher/kl",)),
    Panel("response length", ("response_length/mean",)),
    Panel("mismatch: std of rho", ("mismatch/rho_std",), is_log=True),
    Panel("k3 KL, engine to learner", ("rollout_corr/k3_kl",), is_log=True),
    Panel("PPO KL", ("actor/ppo_kl",)),
    Panel("entropy", ("actor/entropy",)),
    Panel("clip fraction", ("actor/pg_clipfrac",)),
    Panel("gradient norm", ("actor/grad_norm", "noise/grad_norm_ema"), is_log=True),
    Panel("gradient noise scale", ("noise/gns",), is_log=True),
    Panel("learning rate", ("actor/lr", "lr_sched/shadow_lr"), is_log=True),
    Panel("route agreement", ("router/agree_frac",)),
    Panel("repetition", ("response/repetition_frac", "response_length/clip_ratio")),
    Panel("seconds by phase", (r"perf/time/(?!step$).+",), limit=5),
)


_NAMED_FILES = {".jsonl", ".csv", ".json"}  # a log of another project has its run's name
UNSMOOTHED_STEPS = 40  # a curve of at most this many steps is not smoothed
SMOOTHED_SHARE = 40  # a longer curve is smoothed over about 2/40 of its steps


LEARNED = ("actor/", "critic/")  # prefixes of metrics that a step has


def _tells(record: dict[str, float], prefixes: tuple[str, ...]) -> bool:
    return any(name.startswith(prefixes) for name in record)


@dataclass
class Curves:
    """A named group of runs (the seeds of one experiment) with the records of each."""

    label: str
    runs: list[list[dict[str, float]]] = field(default_factory=list)

    @property
    def metrics(self) -> set[str]:
        """Names of all metrics that any record has."""
        return {name for run in self.runs for record in run for name in record}

    @property
    def num_steps(self) -> int:
        """Steps of the longest run. The last validation of a run has a record of its own and is no step."""
        numbers = (sum(_tells(row, LEARNED) or not _tells(row, ("val/",)) for row in run) for run in self.runs)
        return max(numbers, default=0)

    def series(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Return steps ``[S]`` and values ``[seeds, S]`` of ``metric``; NaN where a seed lacks a step."""
        by_run = [{r["step"]: float(r[metric]) for r in run if metric in r} for run in self.runs]
        steps = np.array(sorted({step for run in by_run for step in run}), dtype=np.int64)
        return steps, np.array([[run.get(int(step), np.nan) for step in steps] for run in by_run])


# The seed at the end of a run's name: "grpo-seed3", "grpo_s3", "grpo/seed_3". What precedes it is the experiment.
_SEED = re.compile(r"(?:^|[-_./])(?:seed|s)[-_=]?\d+$")


def group_runs(arguments: Sequence[str], read: Callable[[Path], list[dict[str, float]]] = read_metrics) -> list[Curves]:
    """Read runs and group the seeds of each experiment.

    An argument is a run directory (or its metrics.jsonl), optionally as ``label=PATH``. Runs with equal labels form
    one group. The default label is the folder's name without a trailing ``-seed<n>`` or ``-s<n>``; that of a file with
    another name than metrics.jsonl is its own. ``read`` returns the records of a path. Raises `InputError` for a run
    that cannot be read.
    """
    groups: dict[str, Curves] = {}
    for argument in arguments:
        label, _, path = argument.rpartition("=") if not os.path.exists(argument) else ("", "", argument)
        if path.endswith(".exit.json"):  # a lab's note beside a run, which `runs/lab/X/*-seed*` names too
            continue
        folder = Path(path).resolve()
        if folder.is_file():
            folder = (
                folder.with_suffix("") if folder.suffix in _NAMED_FILES and folder.stem != "metrics" else folder.parent
            )
        name = label or _SEED.sub("", folder.name) or _SEED.sub("", f"{folder.parent.name}/{folder.name}")
        groups.setdefault(name, Curves(name)).runs.append(read(Path(path)))
    return list(groups.values())


def matching(patterns: Sequence[str], available: set[str]) -> list[str]:
    """Return the names in ``available`` that fully match a pattern, ordered by pattern, then by name."""
    matches = [name for pattern in patterns for name in sorted(available) if re.fullmatch(pattern, name)]
    return list(dict.fromkeys(matches))


def smoothing_span(num_steps: int) -> int:
    """Return the span of smoothing in steps (1: none) of a curve of ``num_steps``."""
    return 1 if num_steps <= UNSMOOTHED_STEPS else max(2, num_steps // SMOOTHED_SHARE * 2)


def smoothed(values: np.ndarray, span: int) -> np.ndarray:
    """Return the bias-corrected exponential mean along the last axis; the newest value has weight 2/(span + 1)."""
    if span <= 1:
        return values
    keep = 1 - 2 / (span + 1)
    out, total, weight = np.full(values.shape, np.nan), np.zeros(values.shape[:-1]), np.zeros(values.shape[:-1])
    for step in range(values.shape[-1]):
        seen = np.isfinite(values[..., step])
        total = np.where(seen, keep * total + np.where(seen, values[..., step], 0.0), total)
        weight = np.where(seen, keep * weight + 1, weight)
        out[..., step] = np.where(seen, total / np.maximum(weight, 1e-300), np.nan)
    return out


# Routing disagreement of a run, layer by step, from its metrics.jsonl.


_PREFIX = "router/agree_frac/layer_"
# Disagreement below 1 in 10,000 rows is drawn as none: a step of the tiny model has a few thousand rows per layer.
_FLOOR = 1e-4


def disagreement(records: Sequence[dict[str, float]]) -> tuple[list[int], list[int], np.ndarray]:
    """Return layers [L], steps [S] and 1 − `router/agree_frac/layer_<i>` [L, S]; NaN where a step lacks a layer."""
    steps = [int(r["step"]) for r in records if any(name.startswith(_PREFIX) for name in r)]
    by_step = {int(r["step"]): r for r in records}
    names = {name for r in records for name in r if name.startswith(_PREFIX)}
    layers = sorted(int(name.removeprefix(_PREFIX)) for name in names)
    values = [[1.0 - by_step[step].get(f"{_PREFIX}{layer}", np.nan) for step in steps] for layer in layers]
    return layers, steps, np.array(values).reshape(len(layers), len(steps))


def draw_disagreement(records: Sequence[dict[str, float]], title: str) -> Figure | None:
    """Return a heat map of disagreement by layer and step; None for a run that measured no routes."""
    layers, steps, values = disagreement(records)
    if not layers:
        return None
    figure = Figure(figsize=(8, max(2.2, 0.22 * len(layers) + 1.2)), layout="constrained")
    axes = figure.subplots()
    # Columns are positions, not step numbers, so that a step without an update leaves no gap.
    image = axes.imshow(
        np.maximum(values, _FLOOR), aspect="auto", origin="lower", interpolation="nearest", norm=LogNorm(_FLOOR, 1.0)
    )
    round_steps = MaxNLocator(8, integer=True).tick_values(steps[0], steps[-1])
    ticks = [steps.index(int(step)) for step in round_steps if int(step) in steps] or [0]
    axes.set_xticks(ticks, [str(steps[i]) for i in ticks], fontsize=8)
    rows = range(0, len(layers), max(1, len(layers) // 24))
    axes.set_yticks(list(rows), [str(layers[i]) for i in rows], fontsize=8)
    axes.set_xlabel("step", fontsize=9)
    axes.set_ylabel("layer", fontsize=9)
    axes.set_title(f"{title}: share of tokens that the learner alone would route otherwise", fontsize=10)
    figure.colorbar(image, ax=axes, pad=0.01).ax.tick_params(labelsize=8)
    return figure


LINE_STYLES = ("-", "--", ":", "-.")
COLOURS = tuple(f"C{index}" for index in range(10))
FAINT = 0.25  # opacity of the unsmoothed curve
FEW_POINTS = 12  # curves with at most this many points get markers


def panel_metrics(panel: Panel, groups: Sequence[Curves]) -> list[str]:
    """Return the metrics that ``panel`` draws. Those that are always 0 are left out."""
    records = [record for group in groups for run in group.runs for record in run]
    names = matching(panel.metrics, set().union(*(group.metrics for group in groups)))
    names = [name for name in names if any(record.get(name, 0) != 0 for record in records)]
    # With several groups, each draws fewer curves.
    limit = panel.limit if len(groups) == 1 else panel.limit and min(panel.limit, 2)
    if limit is None or len(names) <= limit:
        return names

    def mean(name: str) -> float:
        return float(np.mean([float(record[name]) for record in records if name in record]))

    return sorted(names, key=mean, reverse=True)[:limit]


def drawable_panels(groups: Sequence[Curves]) -> list[Panel]:
    """Return the panels that have a metric with a nonzero value in any run."""
    return [panel for panel in PANELS if groups and panel_metrics(panel, groups)]


def draw_panel(axes: Axes, panel: Panel, groups: Sequence[Curves], is_smoothed: bool = False) -> None:
    """Draw ``panel``: a colour per group (mean over seeds, band from lowest to highest), a line style per metric.

    With one group, the colour marks the metric instead. The figure's legend names the groups.
    """
    metrics, single, positive = panel_metrics(panel, groups), len(groups) == 1, [np.empty(0)]
    handles = []
    for index, metric in enumerate(metrics):
        style = "-" if single else LINE_STYLES[index % len(LINE_STYLES)]
        handles.append(Line2D([], [], color=_colour(index) if single else "0.3", ls=style, label=escaped(metric)))
        for group_index, group in enumerate(groups):
            colour = _colour(index if single else group_index)
            positive.append(_draw_curve(axes, group, metric, is_smoothed, colour, style))
    axes.set_title(panel.title, fontsize=10)
    if not metrics:
        recorded = matching(panel.metrics, set().union(*(group.metrics for group in groups)))
        say_why_empty(axes, "0 throughout" if recorded else "not recorded")
        return
    axes.set_xlabel("step", fontsize=8)
    axes.tick_params(which="both", labelsize=8)
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    _scale(axes, panel, np.concatenate(positive))
    if len(metrics) > 1:
        legend_below(axes, handles, columns=1 if any(len(h.get_label()) > 24 for h in handles) else 2)


def say_why_empty(axes: Axes, why: str) -> None:
    """Write ``why`` into an empty plot."""
    axes.set(xticks=[], yticks=[])
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", va="center", fontsize=9, color="0.4")


def _draw_curve(axes: Axes, group: Curves, metric: str, is_smoothed: bool, colour: str, style: str) -> np.ndarray:
    """Draw one metric of one group and return its positive values, for the limits of a logarithmic axis."""
    steps, values = group.series(metric)
    values = np.where(np.isfinite(values), values, np.nan)
    seen = np.isfinite(values).any(axis=0)
    steps, values = steps[seen], values[:, seen]
    if not len(steps):
        return np.empty(0)
    span = smoothing_span(len(steps)) if is_smoothed else 1
    smooth = smoothed(values, span)
    marker = "." if len(steps) <= FEW_POINTS else None
    axes.plot(steps, np.nanmean(smooth, axis=0), style, color=colour, lw=1.3, marker=marker, label=escaped(group.label))
    if len(values) > 1:
        axes.fill_between(steps, np.nanmin(smooth, 0), np.nanmax(smooth, 0), color=colour, alpha=0.15, lw=0)
    elif span > 1:
        axes.plot(steps, values[0], color=colour, lw=0.6, alpha=FAINT, zorder=1)
    return values[values > 0]


def _scale(axes: Axes, panel: Panel, positive: np.ndarray) -> None:
    # Below one decade a logarithmic axis has hard-to-read ticks and no advantage.
    if panel.is_log and positive.size and positive.max() > 10 * positive.min():
        axes.set_yscale("log", nonpositive="mask")  # a value of 0 is a gap, not a slope to the lower edge
        if positive.max() > 100 * positive.min():
            axes.yaxis.set_minor_formatter(NullFormatter())
        return
    seen = np.concatenate([line.get_ydata() for line in axes.lines] or [np.empty(0)])
    seen = seen[np.isfinite(seen)]
    constant = seen.size and np.ptp(seen) <= 1e-9 * np.abs(seen).max()
    axes.yaxis.set_major_locator(FixedLocator([seen[0]]) if constant else MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _number(value)))


def _number(value: float) -> str:
    """Return ``value`` with at most six digits; small values as 1.2e-4, not 0.00012."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:.6g}"
    mantissa, exponent = f"{value:.5e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def escaped(text: str) -> str:
    """Return ``text`` escaped for matplotlib: dollar signs start no formula, a leading underscore is shown."""
    return ("\u200b" if text.startswith("_") else "") + text.replace("$", r"\$")


def legend_below(axes: Axes, handles: Iterable[Line2D], columns: int) -> None:
    """Add a legend below the axis of ``axes``, where it covers no curve."""
    axes.legend(
        handles=list(handles), fontsize=7, ncols=columns, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2)
    )


def group_handles(groups: Sequence[Curves]) -> list[Line2D]:
    """Return the legend's handles: a coloured line per group, with its name."""
    return [Line2D([], [], color=_colour(i), lw=2, label=escaped(group.label)) for i, group in enumerate(groups)]


def draw_figure(groups: Sequence[Curves], title: str, columns: int = 3) -> Figure:
    """Return one figure of all drawable panels; if there are several groups, their names are at the top."""
    panels = drawable_panels(groups)
    rows = max(1, -(-len(panels) // columns))
    figure = Figure(figsize=(4.6 * columns, 3.1 * rows + 0.8), layout="constrained")
    for index, panel in enumerate(panels):
        draw_panel(figure.add_subplot(rows, columns, index + 1), panel, groups, is_smoothed=True)
    if len(groups) > 1:
        shown = group_handles(groups)
        figure.legend(
            handles=shown, title=escaped(title), loc="outside upper center", ncols=min(4, len(shown)), frameon=False
        )
    else:
        figure.suptitle(escaped(title), fontsize=12)
    return figure


def plot_run(run_dir: RunDirectory) -> Path:
    """Draw and return ``plots/curves.png`` of a run; also draw ``plots/routes.png`` if routes were measured."""
    run_dir.plots.mkdir(parents=True, exist_ok=True)
    path = run_dir.plots / "curves.png"
    records = read_metrics(run_dir.metrics)
    draw_figure([Curves(run_dir.root.name, [records])], run_dir.root.name).savefig(path, dpi=110)
    if (figure := draw_disagreement(records, run_dir.root.name)) is not None:
        figure.savefig(run_dir.plots / "routes.png", dpi=110)
    return path


CURVES_STYLE = """
main, .panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(420px, 1fr)); gap: 8px; }
figure { margin: 0; }
svg { width: 100%; height: auto; }
.groups span { margin-right: 1.5em; white-space: nowrap; }
.groups i { display: inline-block; width: 1.6em; height: 0.25em; margin: 0 0.4em 0.2em 0; }
"""


def panel_svg(panel: Panel, groups: Sequence[Curves]) -> str:
    """Return one panel as an ``<svg>`` element."""
    figure = Figure(figsize=(5.2, 3.5), layout="constrained")
    draw_panel(figure.add_subplot(), panel, groups, is_smoothed=True)
    return figure_svg(figure, panel.title)


def figure_svg(figure: Figure, name: str) -> str:
    """Return a figure as an ``<svg>`` element. The ids of its clip paths are unique within a page, by its ``name``."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _legend(groups: Sequence[Curves]) -> str:
    if len(groups) == 1:
        return ""
    colours = [to_hex(handle.get_color()) for handle in group_handles(groups)]
    names = [html.escape(group.label) for group in groups]
    spans = (f'<span><i style="background:{c}"></i>{name}</span>' for c, name in zip(colours, names, strict=True))
    return f'<p class="groups">{"".join(spans)}</p>'


def curves_html(groups: Sequence[Curves]) -> str:
    """Return all panels of ``groups``, with a legend where there are several."""
    panels = "\n".join(f"<figure>{panel_svg(panel, groups)}</figure>" for panel in drawable_panels(groups))
    return f"{_legend(groups)}\n<main>\n{panels}\n</main>"
