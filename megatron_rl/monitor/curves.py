"""Curves of runs: which metrics a panel has, seeds of an experiment, smoothing; over steps, hours or tokens."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from megatron_rl.monitor.run_directory import read_metrics


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


XAxis = Literal["step", "time", "tokens"]
X_LABELS = {"step": "step", "time": "hours", "tokens": "million response tokens"}
_STEP_SECONDS, _STEP_TOKENS = "perf/time/step", "perf/rollout_tokens"
_NAMED_FILES = {".jsonl", ".csv", ".json"}  # a log of another project has its run's name
UNSMOOTHED_STEPS = 40  # a curve of at most this many steps is not smoothed
SMOOTHED_SHARE = 40  # a longer curve is smoothed over about 2/40 of its steps


@dataclass
class Curves:
    """A named group of runs (the seeds of one experiment) with the records of each."""

    label: str
    runs: list[list[dict[str, float]]] = field(default_factory=list)

    @property
    def metrics(self) -> set[str]:
        """Names of all metrics that any record has."""
        return {name for run in self.runs for record in run for name in record}

    def series(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Return steps ``[S]`` and values ``[seeds, S]`` of ``metric``; NaN where a seed lacks a step."""
        by_run = [{r["step"]: float(r[metric]) for r in run if metric in r} for run in self.runs]
        steps = np.array(sorted({step for run in by_run for step in run}), dtype=np.int64)
        return steps, np.array([[run.get(int(step), np.nan) for step in steps] for run in by_run])

    def along(self, steps: np.ndarray, x: XAxis) -> np.ndarray:
        """Return the axis positions [S] of ``steps`` [S]: hours or tokens at the end of each, averaged over seeds."""
        if x == "step":
            return steps.astype(float)
        spent = []
        for run in self.runs:
            at, total = [], 0.0
            for record in run:
                if x == "time":
                    total += record.get(_STEP_SECONDS, 0.0) / 3600
                else:
                    total += record.get(_STEP_TOKENS, 0.0) / 1e6
                at.append((record["step"], total))
            if at:
                spent.append(np.interp(steps, *zip(*at, strict=True)))
        return np.mean(spent, axis=0)


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


def distinct(groups: Sequence[Curves], metrics: Sequence[str]) -> dict[str, list[str]]:
    """Return the metrics to draw, each with the metrics of identical values. Metrics that are always 0 are left out."""
    by_first: dict[str, list[str]] = {}
    first_of: dict[tuple, str] = {}
    for metric in metrics:
        if not any(r.get(metric, 0) != 0 for group in groups for run in group.runs for r in run):
            continue
        values = [group.series(metric) for group in groups]
        key = tuple((steps.tobytes(), series.tobytes()) for steps, series in values)
        by_first.setdefault(first_of.setdefault(key, metric), []).append(metric)
    return {first: names[1:] for first, names in by_first.items()}


def smoothing_span(num_steps: int, asked: int | None) -> int:
    """Return the span of smoothing in steps (1: none). ``asked`` None derives it from the length of the curve."""
    if asked is not None:
        return max(1, asked)
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


def last_values(groups: Sequence[Curves], metrics: Sequence[str]) -> Mapping[str, list[str]]:
    """Return, per group, the text of each metric's last value (mean over seeds); "" where there is none."""
    table = {}
    for group in groups:
        cells = []
        for metric in metrics:
            ends = [[r[metric] for r in run if metric in r][-1:] for run in group.runs]
            last = [float(end[0]) for end in ends if end]
            cells.append(f"{np.mean(last):.4g}" if last else "")
        table[group.label] = cells
    return table
