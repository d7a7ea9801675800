"""Draw the picture of README from the kept runs of three studies: `python -m tools.dev.front_picture`."""

from __future__ import annotations

import json
import lzma
from collections import defaultdict
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RUNS = Path("docs/lab/runs")
OUT = Path("docs/images/front.png")
REWARD, MISMATCH = "val/reward/mean", "rollout_corr/log_ppl_abs_diff_sum"
REWARDS = (
    ("mismatch", "exact", "exact", "tab:green"),
    ("corrections", "tis", "int4, token TIS", "tab:orange"),
    ("mismatch", "int4", "int4", "tab:red"),
)
MISMATCHES = (
    ("routing", "int4", "int4", "tab:red"),
    ("precision", "bf16-rollout", "bf16", "tab:purple"),
    ("precision", "fp16-rollout", "fp16", "tab:blue"),
    ("precision", "fp32", "fp32", "tab:gray"),
)


def curves(study: str, metric: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the steps with ``metric`` of each arm of a study, and the values [seeds, steps] there."""
    by_arm = defaultdict(list)
    with lzma.open(RUNS / f"{study}.jsonl.xz", "rt", encoding="utf-8") as lines:
        next(lines)  # the registration
        for run in map(json.loads, lines):
            points = [(record["step"], record[metric]) for record in run["records"] if metric in record]
            by_arm[run["run"].rpartition("-seed")[0]].append(points)
    return {arm: (np.array(runs)[0, :, 0], np.array(runs)[:, :, 1]) for arm, runs in by_arm.items()}


def main() -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    for panel, metric, shown in zip(axes, (REWARD, MISMATCH), (REWARDS, MISMATCHES), strict=True):
        for study, arm, label, color in shown:
            steps, values = curves(study, metric)[arm]
            low, middle, high = np.quantile(values, (0.25, 0.5, 0.75), axis=0)
            panel.plot(steps, middle, color=color)
            panel.text(steps[-1], middle[-5:].mean(), f"  {label}", color=color, va="center")
            panel.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
        panel.set_xlabel("step")
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_xlim(0, 1.32 * steps[-1])
        panel.set_xticks(range(0, 201, 50))
    axes[0].set_title("Mismatch costs reward (held out)")
    axes[1].set_title("Mismatch of a response, Σ |log π − log μ|")
    axes[1].set_yscale("log")
    figure.savefig(OUT, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
