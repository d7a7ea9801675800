"""The remedies of several studies side by side: a table and a picture, from runs that share a control.

Each remedy is compared with the control without one, seed by seed. The share of reward that it keeps is its difference
over that of the arm without mismatch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from megatron_rl.errors import InputError
from megatron_rl.instruments.lab.jobs import collapse_of
from megatron_rl.instruments.lab.results import Effect, Results, Values, paired_effect

STUDIES = ("remedies_early", "remedies_early_2")
"""Studies of one table: equal control and gate, other remedies."""
REWARD, MISMATCH, COLLAPSE = "early reward", "dose", "collapse step"
COSTS = "remedies_cost.json"
"""In docs/lab: arm → CPU seconds of a step (tools/dev/remedy_cost.py)."""


@dataclass(frozen=True)
class Row:
    """A remedy against the control: ``kept`` is its share of the reward that the mismatch takes."""

    arm: str
    label: str
    effect: Effect
    kept: float
    mismatch: list[float]  # by seed: standard deviation of log rho
    collapsed: int  # runs
    seconds: float  # CPU seconds of a step over the control's; NaN if not measured


def rank(studies: Sequence[Results], seconds: Mapping[str, float]) -> list[Row]:
    """Return the rows of all arms but the control, by the reward that they keep.

    Raises `InputError` where two studies have other outcomes for one arm and seed.
    """
    outcomes: dict[str, dict[str, Values]] = {}  # arm → outcome → seed → value, of all studies
    labels: dict[str, str] = {}
    for results in studies:
        for arm, setting in results.study.study.arms.items():
            labels.setdefault(arm, setting.label or arm)
            known = outcomes.setdefault(arm, {REWARD: {}, MISMATCH: {}, COLLAPSE: {}})
            for name, values in (results.outcomes[arm] | {COLLAPSE: _collapses(results, arm)}).items():
                for seed, value in values.items() if name in known else ():
                    if known[name].setdefault(seed, value) != value:
                        raise InputError(
                            f"{arm}, seed {seed}: {name} is {known[name][seed]} in one study and {value} here"
                        )
    without_mismatch, control = studies[0].study.study.gate_arms
    reward = {arm: values[REWARD] for arm, values in outcomes.items()}
    rows = []
    for arm in labels:
        if arm == control:
            continue
        effect = paired_effect(reward[arm], reward[control])
        lost = np.mean([reward[without_mismatch][seed] - reward[control][seed] for seed in reward[arm]])
        rows.append(
            Row(
                arm,
                labels[arm],
                effect,
                float(effect.mean / lost),
                list(outcomes[arm][MISMATCH].values()),
                int(sum(outcomes[arm][COLLAPSE].values())),
                seconds.get(arm, float("nan")) / seconds.get(control, float("nan")),
            )
        )
    return sorted(rows, key=lambda row: -row.kept)


def _collapses(results: Results, arm: str) -> Values:
    """Return by seed whether the run collapsed: 1 or 0."""
    how = results.study.study.outcomes[COLLAPSE]
    seen = {seed: collapse_of(records, how) for seed, records in results.records[arm].items()}
    return {seed: float(pair is not None and pair[1]) for seed, pair in seen.items()}


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| remedy | reward against none (95% interval) | kept | collapsed | mismatch | CPU time of a step |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        effect = row.effect
        mismatch = f"{np.mean(row.mismatch):.2f}" if row.mismatch else "0"
        seconds = "–" if np.isnan(row.seconds) else f"{row.seconds:.2f} ×"
        yield (
            f"| {row.label} | {effect.mean:+.2f} ({effect.lower:+.2f} to {effect.upper:+.2f}) | {row.kept:.0%} | "
            f"{row.collapsed} of {effect.num_seeds} | {mismatch} | {seconds} |"
        )


def draw(rows: Sequence[Row]) -> Figure:
    """Return the picture: reward kept, mismatch left, and cost of each remedy."""
    figure = Figure(figsize=(10.5, 0.32 * len(rows) + 1.3), layout="constrained")
    reward, mismatch, cost = figure.subplots(1, 3, sharey=True, width_ratios=(2, 1, 1))
    places = np.arange(len(rows))[::-1]
    effects = [row.effect for row in rows]
    means = np.array([effect.mean for effect in effects])
    ends = np.array([[effect.mean - effect.lower, effect.upper - effect.mean] for effect in effects]).T
    reward.errorbar(means, places, xerr=ends, fmt="o", capsize=3)
    reward.axvline(0, color="grey", linewidth=1)
    reward.set_yticks(places, [row.label for row in rows])
    reward.set_title("reward against no remedy, 95% interval")
    mismatch.plot([np.mean(row.mismatch) if row.mismatch else 0 for row in rows], places, "s", color="tab:red")
    mismatch.set_xlim(left=-0.02)
    mismatch.set_title("mismatch: std of log rho")
    cost.plot([row.seconds for row in rows], places, "D", color="tab:green")
    cost.axvline(1, color="grey", linewidth=1)
    cost.set_title("CPU time of a step / control's")
    for axes in (reward, mismatch, cost):
        axes.grid(axis="y", alpha=0.3)
        axes.title.set_fontsize(10)
    return figure


def read_costs(docs: Path) -> dict[str, float]:
    """Return arm → CPU seconds of a step, of docs/lab; empty if they were not measured."""
    file = docs / "lab" / COSTS
    return json.loads(file.read_text())["seconds"] if file.is_file() else {}
