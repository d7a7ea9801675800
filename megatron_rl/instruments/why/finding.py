"""What `why` found in one run, and the page that tells it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config.levels import level_rules
from megatron_rl.config.monitor import AlarmRule
from megatron_rl.instruments.why.changes import Change, first_change
from megatron_rl.instruments.why.suspects import Case, Suspect, suspects
from megatron_rl.monitor.alarms import Alarms
from megatron_rl.monitor.scoring import CollapseRule, first_collapse

# Metrics that tell of trouble, and the direction in which they do: 1 up, -1 down, 0 either way.
TELLING = {
    "critic/rewards/mean": -1,
    "val/reward/mean": -1,
    "groups/no_signal_frac": 1,
    "actor/ppo_kl": 1,
    "actor/pg_clipfrac": 1,
    "actor/grad_norm": 0,
    "actor/entropy": 0,
    "noise/relative_update": 1,
    "actor/update_skipped": 1,
    "mismatch/rho_std": 1,
    "rollout_corr/k3_kl": 1,
    "router/agree_frac": -1,
    "response_length/mean": 0,
    "response_length/clip_ratio": 1,
    "response/repetition_frac": 1,
}
LEAST = 1.5  # a level that moved by less than this factor tells nothing
AFTERWARDS = 20  # steps beyond the first sign that are looked at: what comes later is a consequence


@dataclass(frozen=True)
class Sign:
    """A rule that would go off, or a collapse, with the first step of it."""

    name: str
    step: int
    text: str


@dataclass(frozen=True)
class Finding:
    """All that is said of a run. Without a sign there are no changes and no suspects."""

    run: str
    steps: int
    collapse: int | None
    signs: tuple[Sign, ...]
    changes: tuple[Change, ...]
    suspects: tuple[Suspect, ...]

    @property
    def is_healthy(self) -> bool:
        return not self.signs

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"healthy": self.is_healthy}


def find(name: str, records: Sequence[Mapping[str, float]], recipe: Mapping[str, Any]) -> Finding:
    """What happened to a run, from its ``records`` and its ``recipe`` as plain values."""
    collapse = first_collapse(records, CollapseRule())
    signs = _signs(records, recipe, collapse)
    if not signs:
        return Finding(name, len(records), None, (), (), ())
    onset = min(sign.step for sign in signs)
    changes = _changes(records, onset + AFTERWARDS)
    case = Case(records, recipe, onset, collapse, {change.metric: change.step for change in changes})
    return Finding(name, len(records), collapse, signs, changes, tuple(suspects(case)))


def _signs(records: Sequence[Mapping[str, float]], recipe: Mapping[str, Any], collapse: int | None) -> tuple[Sign, ...]:
    own = (recipe.get("monitor") or {}).get("alarms") or ()
    rules = [AlarmRule.model_validate(rule) for rule in own]
    # A run of an earlier version, or one with monitor.levels false, is looked at with them all the same.
    levels = level_rules({**recipe, "monitor": {}})
    alarms = Alarms(rules, levels)
    first: dict[str, Sign] = {}
    for record in records:
        for event in alarms.observe(int(record["step"]), record):
            text = event.message.partition(": ")[2].partition("; then")[0]
            first.setdefault(event.name, Sign(event.name, event.step, text))
        for metric, value in record.items():
            name = metric.removeprefix("alarm/")
            if metric.startswith("alarm/") and value > 0 and name not in first:
                first[name] = Sign(name, int(record["step"]), "went off in the run")
    if collapse is not None:
        first["collapse"] = Sign("collapse", collapse, "the reward fell to half its best and stayed there")
    return tuple(sorted(first.values(), key=lambda sign: sign.step))


def _changes(records: Sequence[Mapping[str, float]], until: int) -> tuple[Change, ...]:
    found = []
    for metric, direction in TELLING.items():
        pairs = [(int(r["step"]), float(r[metric])) for r in records if metric in r and r["step"] <= until]
        if not pairs:
            continue
        change = first_change(metric, *zip(*pairs, strict=True))
        if change is not None and _tells(change, direction):
            found.append(change)
    return tuple(sorted(found, key=lambda change: change.step))


def _tells(change: Change, direction: int) -> bool:
    if direction and (direction > 0) != change.goes_up:
        return False
    low, high = sorted((abs(change.before), abs(change.after)))
    return high >= LEAST * low


def page(finding: Finding, run: Path | None) -> str:
    """The finding as text. ``run``: its directory; None for a log of another project, which has no recipe."""
    if finding.is_healthy:
        return f"{finding.run}: {finding.steps} steps, no rule went off and no reward collapsed: nothing to explain"
    lines = [f"{finding.run}: {finding.steps} steps", "", "What was seen, in order:"]
    lines += [f"  step {sign.step:>5}  {sign.name:<18}  {sign.text}" for sign in finding.signs]
    lines += ["", "What left its own baseline, in order:"]
    lines += [f"  step {c.step:>5}  {c.metric:<28}{c.before:.3g} → {c.after:.3g}" for c in finding.changes]
    if not finding.changes:
        lines.append("  nothing for certain: whatever it was, it was there from the first steps on")
    else:
        lines.append(f"  first: {finding.changes[0].metric}")
    lines += ["", "Suspects, by how far their number is above a value known to be safe:"]
    for rank, suspect in enumerate(finding.suspects, start=1):
        lines += _told(rank, suspect, run)
    if not finding.suspects:
        lines.append("  none: no number of this run and no value of its recipe is beyond what is known to be safe")
    decides = "A run that undoes one of them, over several seeds, decides."
    if run is not None:
        decides = f"`megatron-rl run branch {run}` undoes each of them over several seeds, and decides."
    lines += ["", f"These are suspects. {decides}"]
    return "\n".join(lines)


def _told(rank: int, suspect: Suspect, run: Path | None) -> list[str]:
    lines = [f"  {rank}. {suspect.name} ({suspect.excess:.2g}×): {suspect.said}; safe: {suspect.safe:g}"]
    lines += [f"       for: {text}" for text in suspect.supports]
    lines += [f"       against: {text}" for text in suspect.contradicts]
    lines.append(f"       keys: {', '.join(suspect.keys)}")
    if suspect.test and run is None:
        lines.append(f"       test: the same run with {', '.join(suspect.test)} (docs/coming-from.md has your names)")
    elif suspect.test:
        name = f"{run.name}-{suspect.name.replace(' ', '-')}"
        sets = " ".join(f"--set {shlex.quote(change)}" for change in suspect.test)
        lines.append(f"       test: megatron-rl train {run / 'recipe.resolved.yaml'} --set name={name} {sets}")
    return lines
