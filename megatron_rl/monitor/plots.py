"""Curves of runs, from their metrics.jsonl and nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_rl.monitor.heatmap import draw_disagreement
from megatron_rl.monitor.jsonl import read_metrics
from megatron_rl.monitor.run_directory import RunDirectory


@dataclass(frozen=True)
class Panel:
    """One small plot: which metrics (regular expressions of whole names), on which scale, how many at most."""

    title: str
    metrics: tuple[str, ...]
    is_log: bool = False
    limit: int | None = None  # of more, those with the largest mean


VALIDATION = (r"val/reward/mean", r"val/.+/(avg|pass)@\d+")
PANELS = (
    Panel("reward", ("critic/rewards/mean",)),
    Panel("validation", VALIDATION),
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
LINE_STYLES = ("-", "--", ":", "-.")


@dataclass
class Curves:
    """One line group of an overlay: a name and the records of each of its seeds."""

    label: str
    runs: list[list[dict[str, float]]] = field(default_factory=list)

    @property
    def metrics(self) -> set[str]:
        """Every metric that any record has."""
        return {name for run in self.runs for record in run for name in record}

    def series(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps ``[S]`` and values ``[seeds, S]`` of ``metric``; NaN where a seed lacks a step."""
        by_run = [{r["step"]: float(r[metric]) for r in run if metric in r} for run in self.runs]
        steps = np.array(sorted({step for run in by_run for step in run}), dtype=np.int64)
        return steps, np.array([[run.get(int(step), np.nan) for step in steps] for run in by_run])


# "grpo-seed3", "grpo_s3", "grpo/seed_3": the rest of the name is the experiment, the number one repetition of it.
_SEED = re.compile(r"(?:^|[-_./])(?:seed|s)[-_=]?\d+$")


def group_runs(arguments: Sequence[str]) -> list[Curves]:
    """Read runs and put seeds of one experiment together.

    An argument is a run directory (or its metrics.jsonl), optionally as ``label=PATH``. Equal labels are one group;
    without a label, the folder's name less a trailing ``-seed<n>`` or ``-s<n>`` is the label. Raises `InputError`
    for what cannot be read.
    """
    groups: dict[str, Curves] = {}
    for argument in arguments:
        label, _, path = argument.rpartition("=") if not Path(argument).exists() else ("", "", argument)
        folder = Path(path).resolve()
        folder = folder.parent if folder.is_file() else folder
        name = label or _SEED.sub("", folder.name) or _SEED.sub("", f"{folder.parent.name}/{folder.name}")
        groups.setdefault(name, Curves(name)).runs.append(read_metrics(Path(path)))
    return list(groups.values())


def matching(patterns: Sequence[str], available: set[str]) -> list[str]:
    """The names in ``available`` that a pattern matches whole, in the order of the patterns, then by name."""
    found = [name for pattern in patterns for name in sorted(available) if re.fullmatch(pattern, name)]
    return list(dict.fromkeys(found))


def _chosen(panel: Panel, groups: Sequence[Curves]) -> list[str]:
    names = matching(panel.metrics, set().union(*(group.metrics for group in groups)))
    # Side by side, several runs leave room for fewer curves each.
    limit = panel.limit if len(groups) == 1 else panel.limit and min(panel.limit, 2)
    if limit is None or len(names) <= limit:
        return names

    def mean(name: str) -> float:
        values = [float(r[name]) for group in groups for run in group.runs for r in run if name in r]
        return float(np.mean(values))

    return sorted(names, key=mean, reverse=True)[:limit]


def drawable_panels(groups: Sequence[Curves]) -> list[Panel]:
    """The panels for which at least one run has a metric."""
    available = set().union(*(group.metrics for group in groups)) if groups else set()
    return [panel for panel in PANELS if matching(panel.metrics, available)]


def draw_panel(axes: Axes, panel: Panel, groups: Sequence[Curves]) -> None:
    """Draw ``panel``: a colour per group (mean over seeds, band from lowest to highest), a line style per metric.

    With one group the colours tell metrics apart.
    """
    metrics = _chosen(panel, groups)
    single, drawn = len(groups) == 1, [np.empty(0)]
    for group_index, group in enumerate(groups):
        for metric_index, metric in enumerate(metrics):
            steps, values = group.series(metric)
            if not len(steps):
                continue
            values = np.where(np.isfinite(values), values, np.nan)
            seen = np.isfinite(values).any(axis=0)
            steps, values = steps[seen], values[:, seen]
            drawn.append(values[values > 0])
            color = f"C{(metric_index if single else group_index) % 10}"
            style = "-" if single else LINE_STYLES[metric_index % len(LINE_STYLES)]
            names = ([] if single else [group.label]) + ([metric] if len(metrics) > 1 else [])
            marker = "." if len(steps) <= 12 else None  # few validations: a line alone hides where they are
            axes.plot(
                steps, np.nanmean(values, axis=0), style, color=color, lw=1.2, marker=marker, label=" ".join(names)
            )
            if len(values) > 1:
                axes.fill_between(steps, np.nanmin(values, 0), np.nanmax(values, 0), color=color, alpha=0.2, lw=0)
    axes.set_title(panel.title, fontsize=10)
    axes.set_xlabel("step", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    positive = np.concatenate(drawn)
    # Within less than a decade the ticks of a logarithmic axis are hard to read, and nothing is gained.
    if panel.is_log and positive.size and positive.max() > 10 * positive.min():
        axes.set_yscale("log")
    if any(axes.get_legend_handles_labels()[1]):
        axes.legend(fontsize=6)


def draw_figure(groups: Sequence[Curves], title: str, columns: int = 3) -> Figure:
    """All drawable panels in one figure."""
    panels = drawable_panels(groups)
    rows = max(1, -(-len(panels) // columns))
    figure = Figure(figsize=(4.6 * columns, 2.9 * rows), layout="constrained")
    figure.suptitle(title, fontsize=12)
    for index, panel in enumerate(panels):
        draw_panel(figure.add_subplot(rows, columns, index + 1), panel, groups)
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


def last_values(groups: Sequence[Curves], metrics: Sequence[str]) -> Mapping[str, list[str]]:
    """Per group, the mean over seeds of each metric's last value, as text; "" where there is none."""
    table = {}
    for group in groups:
        cells = []
        for metric in metrics:
            ends = [[r[metric] for r in run if metric in r][-1:] for run in group.runs]
            found = [float(end[0]) for end in ends if end]
            cells.append(f"{np.mean(found):.4g}" if found else "")
        table[group.label] = cells
    return table
