"""Figures of the papers, drawn from the metrics.jsonl of runs: same axes as in the paper, seeds as a band.

`draw_scatter` plots inference against training probabilities, of a run's first and last stored batch [OH Fig 3].
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_rl.monitor import RunDirectory
from megatron_rl.monitor.plots import Curves, Panel, draw_panel, group_handles, legend_below, matching, say_why_empty
from megatron_rl.run.recorded_batches import batch_path, load_batch, recorded_steps
from megatron_rl.types import Batch

DETAIL = "objective.mismatch_detail: true records it"


@dataclass(frozen=True)
class PaperPanel(Panel):
    """A panel and how to draw it.

    ``kind``: curves over steps; the last step's values over bins (named at the end of the metrics' names); quantiles
    of rho over bins; or points over steps with their correlation. ``hint``: the setting that records the metrics, if
    not every run has them.
    """

    kind: str = "curves"
    hint: str = ""
    x: str = "step"


@dataclass(frozen=True)
class PaperFigure:
    name: str
    title: str
    panels: tuple[PaperPanel, ...]


def _bins(title: str, metrics: str, x: str) -> PaperPanel:
    return PaperPanel(title, (metrics,), kind="bins", is_log=True, hint=DETAIL, x=x)


REWARD = PaperPanel("training reward", ("critic/rewards/mean",))
ACCURACY = PaperPanel("validation accuracy", (r"val/.+/avg@\d+",), hint="validation.every")
LOG_PPL = PaperPanel("log ppl_abs_diff (LD Eq 8)", ("rollout_corr/log_ppl_abs_diff_sum",), is_log=True)
GRAD_NORM = PaperPanel("gradient norm", ("actor/grad_norm",), is_log=True)
SMOOTH_NORM = PaperPanel("smoothed gradient norm", ("noise/grad_norm_ema",), is_log=True)
LENGTH = PaperPanel("response length", ("response_length/mean",))
ENTROPY = PaperPanel("token entropy", ("actor/entropy",))
RATE = PaperPanel("learning rate", ("actor/lr",), is_log=True)
RHO_STD = PaperPanel("mismatch: std of rho", ("mismatch/rho_std",), is_log=True)
CLIP_RATIO = PaperPanel("token clip ratio", ("actor/pg_clipfrac",))
EXTREMES = PaperPanel("pi - mu: largest, smallest", ("mismatch/prob_diff_max", "mismatch/prob_diff_min"), hint=DETAIL)
BY_LENGTH = _bins("|log pi(y)/mu(y)| by response length", r"mismatch/log_ppl_abs_diff_sum/length/.+", "response tokens")
BOUND = _bins("2 TV T², the bound over B, by length", r"mismatch/gradient_bound/length/.+", "response tokens")
BY_POSITION = _bins("|log rho| of tokens by position", r"mismatch/abs_log_rho/position/.+", "position in the response")
QUANTILES = PaperPanel("quantiles of rho", (r"mismatch/rho_q(05|50|95)/.+",), kind="quantiles", hint=DETAIL, x="po")
HACKING = (REWARD, ACCURACY, RHO_STD, ENTROPY)
EXTENDED = (ACCURACY, RHO_STD, ENTROPY, CLIP_RATIO, GRAD_NORM)

PAPERS: dict[str, tuple[PaperFigure, ...]] = {
    "length-decay": (
        PaperFigure("fig01", "validation and mismatch at a constant rate", (ACCURACY, LOG_PPL)),
        PaperFigure("fig02", "with and without importance sampling", (REWARD, ACCURACY)),
        PaperFigure("fig03", "smoothed gradient norm", (SMOOTH_NORM,)),
        PaperFigure("fig04", "1e-6 against 1e-7", (ACCURACY, LOG_PPL)),
        PaperFigure("fig05", "part of the training data", (REWARD, ACCURACY)),
        PaperFigure("fig06", "surge of the response length", (LENGTH,)),
        PaperFigure("fig07-08", "length-decay schedule", (REWARD, ACCURACY, GRAD_NORM, LOG_PPL, ENTROPY, RATE)),
        PaperFigure("fig09-10", "decay periods", (ACCURACY, LOG_PPL, RATE)),
        PaperFigure("fig11-13", "schedule with MIS, TIS and fp16", (ACCURACY, LOG_PPL)),
        PaperFigure("theorem31", "mismatch of long responses (last step)", (BY_POSITION, BY_LENGTH, BOUND)),
    ),
    "fp16": (
        PaperFigure("fig01", "training reward", (REWARD,)),
        PaperFigure(
            "fig02",
            "mismatch of tokens and of sequences (last step)",
            (
                _bins("share of tokens by probability", r"mismatch/(mu|po)_share/.+", "probability"),
                BY_LENGTH,
            ),
        ),
        PaperFigure("fig03", "stability of algorithms", (REWARD, ACCURACY, EXTREMES, RHO_STD)),
        PaperFigure("fig04", "algorithms in fp16", (REWARD, ACCURACY)),
        PaperFigure("fig05", "pairs of dtypes", (REWARD, ACCURACY, RHO_STD)),
        PaperFigure("fig06", "validation", (ACCURACY,)),
    ),
    "hacking": (
        PaperFigure("fig02", "initial discrepancy: GRPO and TIS", HACKING),
        PaperFigure("fig04", "strength of token clipping", HACKING),
        PaperFigure("fig05", "injected weight distortion", HACKING),
        PaperFigure("fig06", "surrogate of the spurious signal", (PaperPanel("J", ("hacking/J",), kind="points"),)),
        PaperFigure(
            "fig07",
            "rho by probability",
            (
                QUANTILES,
                PaperPanel("mean of rho in bands of po", (r"mismatch/rho_mean/.+",)),
            ),
        ),
        PaperFigure(
            "fig09",
            "correlation and largest ratio",
            (
                PaperPanel("correlation of po and mu", ("mismatch/pcc",)),
                PaperPanel("largest rho", ("mismatch/rho_max",), is_log=True),
            ),
        ),
        PaperFigure("fig10", "no weight on unlikely tokens", HACKING),
        PaperFigure("fig12", "variance of weights", HACKING),
        PaperFigure("fig14", "early stage", (RHO_STD, ENTROPY, GRAD_NORM)),
        PaperFigure("fig15-17", "extended dynamics", EXTENDED),
    ),
    "router-replay": (
        PaperFigure(
            "dynamics",
            "training with and without replay",
            (
                REWARD,
                ACCURACY,
                PaperPanel("KL of the engines (k3)", ("rollout_corr/k3_kl",), is_log=True),
                RHO_STD,
                PaperPanel("route agreement", ("router/agree_frac",), hint="routing.telemetry or routing.replay"),
                GRAD_NORM,
                ENTROPY,
            ),
        ),
    ),
}


def draw_paper(paper: str, groups: Sequence[Curves], folder: Path, only: Sequence[str] = ()) -> tuple[list, list[str]]:
    """Draw the figures of ``paper`` (those in ``only``, else all) into ``folder``.

    Returns the files, and a sentence per run and panel whose metric was not recorded.
    """
    written, missing = [], []
    for figure in PAPERS[paper]:
        if only and figure.name not in only:
            continue
        lacking = [
            f"{figure.name}, {panel.title}: {group.label} has no {' or '.join(panel.metrics)}"
            + (f" ({panel.hint})" if panel.hint else "")
            for panel in figure.panels
            for group in groups
            if not matching(panel.metrics, group.metrics)
        ]
        missing += lacking
        if len(lacking) == len(figure.panels) * len(groups):
            continue
        path = folder / f"{paper}-{figure.name}.png"
        _draw(figure, paper, groups).savefig(path, dpi=110)
        written.append(path)
    return written, missing


def _draw(figure: PaperFigure, paper: str, groups: Sequence[Curves]) -> Figure:
    columns = min(3, len(figure.panels))
    rows = -(-len(figure.panels) // columns)
    drawn = Figure(figsize=(4.8 * columns, 3.2 * rows + 0.4), layout="constrained")
    drawn.suptitle(f"{paper}, {figure.name}: {figure.title}", fontsize=11)
    for index, panel in enumerate(figure.panels):
        axes = drawn.add_subplot(rows, columns, index + 1)
        having = [group for group in groups if matching(panel.metrics, group.metrics)]
        if having:
            _KINDS[panel.kind](axes, panel, having)
            if panel.kind != "curves":
                axes.set_xlabel(panel.x, fontsize=8)
                axes.tick_params(axis="y", labelsize=8)
                axes.grid(alpha=0.3)
                axes.legend(fontsize=6)
        else:
            say_why_empty(axes, "not recorded")
        axes.set_title(panel.title, fontsize=10)
    return drawn


def _curves(axes: Axes, panel: PaperPanel, groups: Sequence[Curves]) -> None:
    draw_panel(axes, panel, groups)
    if len(groups) > 1:
        styles = axes.get_legend().legend_handles if axes.get_legend() is not None else []
        legend_below(axes, [*group_handles(groups), *styles], columns=2)


def _last(group: Curves, metric: str) -> float:
    """Return the last value of ``metric``, averaged over seeds."""
    ends = [[record[metric] for record in run if metric in record][-1:] for run in group.runs]
    return float(np.mean([end[0] for end in ends if end]))


def _families(panel: PaperPanel, group: Curves) -> dict[str, dict[str, float]]:
    """Return {name without bin: {bin: last value}}, bins in ascending order."""
    by_family: dict[str, dict[str, float]] = {}
    for metric in matching(panel.metrics, group.metrics):
        family, _, bin_of = metric.rpartition("/")
        by_family.setdefault(family, {})[bin_of] = _last(group, metric)
    return {family: dict(sorted(bins.items(), key=lambda item: _low(item[0]))) for family, bins in by_family.items()}


def _low(label: str) -> float:
    """Return the lower end of a bin: 0.05 for "0.05-0.1"."""
    return float(re.match(r"[\d.]+(?:e-?\d+)?", label)[0])


def _bins(axes: Axes, panel: PaperPanel, groups: Sequence[Curves]) -> None:
    """Draw a line over bins per family of metrics, in a colour per group."""
    order = sorted({b for g in groups for bins in _families(panel, g).values() for b in bins}, key=_low)
    for number, group in enumerate(groups):
        families = _families(panel, group)
        for family, style in zip(sorted(families), ("-", "--", ":")):
            bins = families[family]
            places = [order.index(label) for label in bins]
            name = f"{group.label} {family.rsplit('/', 1)[-1]}" if len(families) > 1 else group.label
            values = [value or np.nan for value in bins.values()] if panel.is_log else list(bins.values())
            axes.plot(places, values, style, marker=".", color=f"C{number % 10}", lw=1.2, label=name)
    every = max(1, len(order) // 8)
    axes.set_xticks(range(0, len(order), every), order[::every], rotation=45, fontsize=7)
    if panel.is_log:
        axes.set_yscale("log")


def _quantiles(axes: Axes, panel: PaperPanel, groups: Sequence[Curves]) -> None:
    """Draw the median of rho in each band of po, with a bar from its 5% to its 95% quantile."""
    order = sorted({b for g in groups for bins in _families(panel, g).values() for b in bins}, key=_low)
    for number, group in enumerate(groups):
        families = _families(panel, group)
        low, middle, high = (families[f"mismatch/rho_q{q}"] for q in ("05", "50", "95"))
        places = np.array([order.index(label) for label in middle]) + 0.8 * (number + 0.5) / len(groups) - 0.4
        values = np.array(list(middle.values()))
        bars = [values - np.array(list(low.values())), np.array(list(high.values())) - values]
        axes.errorbar(
            places, values, np.maximum(bars, 0), fmt="o", ms=3, capsize=3, color=f"C{number % 10}", label=group.label
        )
    axes.axhline(1, color="tab:red", ls="--", lw=0.8)
    axes.set_xticks(range(len(order)), order, fontsize=7)


def _points(axes: Axes, panel: PaperPanel, groups: Sequence[Curves]) -> None:
    """Draw a dot per step; the legend has the Pearson correlation of the metric with the step."""
    for number, group in enumerate(groups):
        steps, values = group.series(panel.metrics[0])
        x = np.tile(steps, len(values))
        y = values.ravel()
        x, y = x[np.isfinite(y)], y[np.isfinite(y)]
        varies = len(y) > 2 and x.std() > 0 and y.std() > 0
        name = f"{group.label}: PCC {np.corrcoef(x, y)[0, 1]:.2f}" if varies else group.label
        axes.plot(x, y, ".", ms=4, color=f"C{number % 10}", label=name)


_KINDS: dict[str, Callable[[Axes, PaperPanel, Sequence[Curves]], None]] = {
    "curves": _curves,
    "bins": _bins,
    "quantiles": _quantiles,
    "points": _points,
}


MOST_POINTS = 20_000
"""Largest number of tokens in a plot, evenly thinned; the correlation is over all tokens."""


def probabilities(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return (po, mu) of the trained tokens, [N] each.

    po comes from the update's own pass if there is no other. Both are empty if the batch lacks the learner's log-probs.
    """
    pairs = []
    for sequence in batch.sequences:
        learner = sequence.learner_logprobs
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
