"""What the arms of a branch say: which of them bring back what was lost, as the lab's statistics judge it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from scipy import stats

from megatron_rl.instruments.branch.arms import CONTROL, Arm
from megatron_rl.instruments.branch.plan import DECISIVE, Branch, Loss
from megatron_rl.instruments.lab.archive import first_difference
from megatron_rl.instruments.lab.jobs import FINISHED, run_name, state_of
from megatron_rl.instruments.lab.results import (
    LEAST_SEEDS,
    Effect,
    Values,
    Verdict,
    holm,
    interval_half_width,
    paired_effect,
    read_results,
    unseen_told,
)
from megatron_rl.monitor import RunDirectory, read_metrics

WORDS: dict[Verdict, str] = {
    "as predicted": "brings it back",
    "contrary": "makes it worse",
    "no effect": "does not",
    "undecided": "undecided",
}
VALUE_CHARACTERS = 60  # of a recipe's value on the page
LEVEL = 0.05  # of all tests, as the lab has it
POWER = 0.8  # chance to decide that `seeds_to_decide` aims at
MOST_SEEDS = 50  # more are no short experiment
LOOKS = "looks.json"  # beside the arms' runs: numbers of seeds at which a judgement was printed
NOT_JUDGED = "not judged"


@dataclass(frozen=True)
class Judged:
    """An arm with its verdict. ``restored``: share of the control's loss that it brings back; None: not known."""

    arm: Arm
    values: Values  # seed → outcome
    effect: Effect | None
    p: float
    p_holm: float
    restored: float | None
    verdict: str
    seeds_to_decide: int | None = None  # where it is undecided


@dataclass(frozen=True)
class Judgement:
    """All that is said of a branch. ``repeated``: steps in which the control with the run's own random numbers repeats
    the run; ``difference``: the first metric in which it does not. ``best``: see `beside_the_best`. ``looks``: how
    often arms were judged, this time included; see `price_of_look`."""

    branch: Branch
    control: Values
    arms: tuple[Judged, ...]
    repeated: int
    difference: str | None
    unfinished: tuple[str, ...]
    best: Judged | None = None
    looks: int = 1

    @property
    def cures(self) -> list[Judged]:
        """Arms that bring it back, those that restore most first."""
        curing = [judged for judged in self.arms if judged.verdict == WORDS["as predicted"]]
        return sorted(curing, key=lambda judged: -abs(judged.effect.mean))

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        metric = self.branch.loss.metric
        if not shows_the_loss(self.branch.loss, self.control):
            return (
                f"nothing to explain from here: {metric} is {fmean(self.control.values()):.3g} in the control, "
                f"{self.branch.loss.after:.3g} in the run; begin later (--from STEP), where the control goes wrong as "
                "the run did; where it never does, what went wrong is not in recipe and checkpoint (the engine, the "
                "machine, a judge)"
            )
        undecided = [judged for judged in self.arms if judged.verdict == WORDS["undecided"]]
        names = ", ".join(judged.arm.name for judged in undecided)
        if cures := self.cures:
            named = [f"{cure.arm.name} ({_changes(self.branch, cure.arm)})" for cure in cures]
            verb = "brings" if len(cures) == 1 else "bring"
            each = ": each of them alone, the first most" if len(cures) > 1 else ""
            cured = f"{' and '.join(named)} {verb} {metric} back{each}"
            return f"{cured}; undecided: {names}, {_seeds_told(undecided)}" if undecided else cured
        if undecided:
            return f"undecided: {names} may bring {metric} back or not; {_seeds_told(undecided)}"
        return f"none of these arms brings {metric} back: the cause is another; --arms all, or --arm with your own"

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        branch, loss = self.branch, self.branch.loss
        lost = {name: getattr(loss, name) for name in ("metric", "before", "after", "margin")}
        return {
            "run": str(branch.parent),
            "checkpoint": branch.checkpoint and str(branch.checkpoint),
            "from": branch.begin,
            "onset": branch.onset,
            "steps": branch.steps,
            "seeds": len(branch.study.seeds),
            "outcome": lost | {"first_step": branch.first_step},
            "control": {"values": self.control, "repeated_steps": self.repeated, "difference": self.difference},
            "arms": [_arm_as_json(branch, judged) for judged in self.arms],
            "beside": self.best and self.best.arm.name,
            "left_out": [vars(item) for item in branch.left_out],
            "looks": self.looks,
            "unfinished": list(self.unfinished),
            "verdict": self.sentence,
        }


def _arm_as_json(branch: Branch, judged: Judged) -> dict[str, Any]:
    arm, effect = judged.arm, judged.effect
    ends = () if effect is None else ("lower", "upper", "alike_lower", "alike_upper")
    numbers = {} if effect is None else {"effect": effect.mean} | {end: getattr(effect, end) for end in ends}
    judgement = ("values", "p", "p_holm", "restored", "verdict", "seeds_to_decide")
    return (
        {"name": arm.name, "undoes": arm.suspect, "keys": branch.changes(arm), "note": arm.note}
        | {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        | {name: getattr(judged, name) for name in judgement}
    )


def seeds_to_decide(effect: Effect, margin: float, num_arms: int, scatter: Effect | None = None) -> int | None:
    """Return the number of seeds that decide on an arm with a chance of `POWER`; None where `MOST_SEEDS` do not.

    It takes the ``effect`` of the seeds so far, and their scatter (that of ``scatter``, if given), for the true ones.
    The arm is decided where the difference is significant and beyond ``margin``, or where one as large as the margin is
    excluded, each corrected for ``num_arms``.
    """
    if effect.num_seeds < 2:
        return None
    scatter = effect if scatter is None else scatter
    mean, deviation = abs(effect.mean), (scatter.alike_upper - scatter.mean) / interval_half_width(scatter.num_seeds)
    if not deviation:
        return None
    for seeds in range(effect.num_seeds + 1, MOST_SEEDS + 1):
        error = deviation / math.sqrt(seeds)
        differs = max(margin, float(stats.t.isf(LEVEL / num_arms / 2, seeds - 1)) * error)
        same = margin - float(stats.t.isf(LEVEL / num_arms, seeds - 1)) * error
        decided = stats.norm.sf((differs - mean) / error) + stats.norm.cdf((-differs - mean) / error)
        if same > 0:
            decided += stats.norm.cdf((same - mean) / error) - stats.norm.cdf((-same - mean) / error)
        if decided >= POWER:
            return seeds
    return None


def price_of_look(number: int) -> int:
    """Return what the p-values of the k-th look at an experiment are multiplied by: k (k + 1). The shares of the level,
    1 / (k (k + 1)), sum to no more than the level, however often somebody looks."""
    return number * (number + 1)


def count_look(root: Path, seeds: int) -> int:
    """Return how many numbers of seeds the arms below ``root`` were judged at, ``seeds`` included, which is noted."""
    file = root / LOOKS
    try:
        looks = [int(value) for value in json.loads(file.read_text())]
    except (OSError, ValueError, TypeError):
        looks = []
    if seeds not in looks:
        looks.append(seeds)
        file.write_text(json.dumps(looks))
    return looks.index(seeds) + 1


def shows_the_loss(loss: Loss, control: Values) -> bool:
    """Return whether the control loses more than counts as none of what the run lost; true where nothing was."""
    if not control or not loss.size:
        return True
    fallen = loss.before - fmean(control.values())
    return (fallen if loss.back == "higher" else -fallen) > loss.margin


def beside_the_best(
    arms: Sequence[Judged], control: Values, loss: Loss, price: int = 1
) -> tuple[Judged | None, list[Judged]]:
    """Return the best arm where it restores more than was lost, and the arms judged beside it; else None and ``arms``.

    A run goes on learning, so that without the harm it would be above its level before. What counts as nothing is then
    a quarter (`DECISIVE`) of what the best arm restores, by seed, and no longer of what was lost. Holm's correction is
    over the other arms.
    """
    cures = [judged for judged in arms if judged.verdict == WORDS["as predicted"]]
    best = max(cures, key=lambda judged: abs(judged.effect.mean), default=None)
    if best is None or abs(best.effect.mean) <= loss.size:
        return None, list(arms)
    sign = 1.0 if loss.back == "higher" else -1.0
    gains = [{seed: sign * (v - control[seed]) for seed, v in arm.values.items() if seed in control} for arm in arms]
    least = {seed: DECISIVE * gain for seed, gain in gains[arms.index(best)].items()}
    above = [paired_effect(gain, least) for gain in gains]  # below 0: the arm restores less than a quarter
    below = [paired_effect(gain, {seed: -value for seed, value in least.items()}) for gain in gains]  # or harms by less
    enough = [effect is not None and effect.num_seeds >= LEAST_SEEDS for effect in above]
    others = [i for i, arm in enumerate(arms) if arm is not best and enough[i]]
    of_both = holm([max(_one_sided(above[i], -1), _one_sided(below[i], 1)) for i in others])
    p = dict(zip(others, (price * value for value in of_both), strict=True))
    num_open = sum(value >= LEVEL for value in p.values())
    judged = list(arms)
    for i in others:
        arm, is_cure = arms[i], arms[i].verdict == WORDS["as predicted"]
        if p[i] < LEVEL and arm.verdict != WORDS["contrary"]:
            judged[i] = replace(arm, verdict=WORDS["no effect"], seeds_to_decide=None)
        elif arm.verdict == WORDS["undecided"] or (is_cure and above[i].mean <= 0):
            margin, scatter = sum(least.values()) / len(least), above[i] if sign * arm.effect.mean > 0 else below[i]
            seeds = seeds_to_decide(arm.effect, margin, num_open, scatter)
            judged[i] = replace(arm, verdict=WORDS["undecided"], seeds_to_decide=seeds)
    return best, judged


def _one_sided(effect: Effect, sign: int) -> float:
    """Return the p-value of the hypothesis that the difference has not this sign."""
    return effect.p / 2 if effect.mean * sign > 0 else 1.0 - effect.p / 2


def _seeds_told(undecided: Sequence[Judged]) -> str:
    scattered = [judged for judged in undecided if (e := judged.effect) is None or e.alike_lower < e.alike_upper]
    if not scattered:
        return "so far they do exactly what the control does"
    needed = [judged.seeds_to_decide for judged in scattered]
    if None in needed:
        return f"and {MOST_SEEDS} seeds would hardly decide; give more --steps or another --outcome"
    return f"about --seeds {max(needed)} would decide"


def judge(branch: Branch, root: Path, looks: int = 1) -> Judgement:
    """Return the judgement of the finished runs below ``root``. ``looks``: which look at these arms this is."""
    price = price_of_look(looks)
    results = read_results(branch, root)
    by_name = {arm.name: arm for arm in branch.arms}
    control = results.outcomes[CONTROL]["loss"]
    is_lost = shows_the_loss(branch.loss, control)
    lost = branch.loss.before - fmean(control.values()) if control and branch.loss.size else 0.0
    arms = []
    for decision in results.decisions(price):
        effect, is_open = decision.effect, decision.verdict == "undecided"
        judged = Judged(
            by_name[decision.name],
            results.outcomes[decision.name]["loss"],
            effect,
            decision.p,
            min(1.0, price * decision.p_holm),
            effect.mean / lost if effect and lost else None,
            WORDS[decision.verdict] if is_lost else NOT_JUDGED,
            seeds_to_decide(effect, branch.loss.margin, len(by_name)) if effect and is_open else None,
        )
        arms.append(judged)
    best, arms = beside_the_best(arms, control, branch.loss, price)
    repeated, difference = repeats_the_run(branch, root)
    unfinished = tuple(results.unfinished)
    return Judgement(branch, control, tuple(arms), repeated, difference, unfinished, best, looks)


def repeats_the_run(branch: Branch, root: Path) -> tuple[int, str | None]:
    """Return over how many steps the control of seed 0 was compared with the run, and the first difference if any.

    Alarms apart, whose actions the arms do not have. 0 steps where the control is not finished.
    """
    folder = root / run_name(CONTROL, 0)
    if state_of(folder) not in FINISHED:
        return 0, None
    paths = (RunDirectory(branch.parent).metrics, RunDirectory(folder).metrics)
    both = [{int(r["step"]): r for r in read_metrics(path)} for path in paths]
    last = branch.recipe_of_run.num_steps  # the last record of a run has its last validation alone
    steps = [s for s in sorted(both[0].keys() & both[1].keys()) if branch.begin <= s < branch.begin + branch.steps]
    learned = [
        [{k: v for k, v in records[s].items() if not k.startswith("alarm/")} for s in steps if s != last]
        for records in both
    ]
    return len(learned[0]), first_difference(*learned)


def _changes(branch: Branch, arm: Arm) -> str:
    return ", ".join(f"{key} {_value(old)} → {_value(new)}" for key, (old, new) in branch.changes(arm).items())


def _value(value: Any) -> str:
    """A value as a recipe has it."""
    text = json.dumps(value)
    return text if len(text) <= VALUE_CHARACTERS else f"{text[:VALUE_CHARACTERS]} …"


def _heading(branch: Branch) -> list[str]:
    loss, seeds = branch.loss, len(branch.study.seeds)
    onset = "" if branch.onset is None else f", onset at step {branch.onset}"
    start = "where the run started" if branch.checkpoint is None else str(branch.checkpoint)
    end = branch.begin + branch.steps - 1
    counts_as_none = f"a difference up to {loss.margin:.2g} counts as none" if loss.margin else "nothing was lost"
    return [
        f"{branch.parent}: from step {branch.begin} ({start}){onset}",
        f"  {len(branch.arms)} arms and the control, {seeds} seeds, {branch.steps} steps each",
        f"  outcome: mean {loss.metric} of steps {branch.first_step} to {end}. In the run it was {loss.before:.3g} "
        f"before step {branch.begin} and {loss.after:.3g} there; {counts_as_none}",
        "",
    ]


def _left_out(branch: Branch) -> list[str]:
    return ["", "Left out:", *(f"  {i.name}: {i.reason}" for i in branch.left_out)] if branch.left_out else []


def plan_page(branch: Branch, num_parallel: int, ranks: int) -> str:
    """Return what will be run and how long it takes by the run's own steps, as text."""
    lines = _heading(branch)
    width = max(len(arm.name) for arm in branch.arms)
    for arm in branch.arms:
        lines.append(f"  {arm.name:{width}}  undoes {arm.suspect}: {_changes(branch, arm)}")
        lines += [f"  {'':{width}}  {arm.note}"] if arm.note else []
    lines += _left_out(branch)
    runs = (len(branch.arms) + 1) * len(branch.study.seeds)
    lines += ["", f"{runs} runs, {runs * branch.steps} steps"]
    if times := [r["perf/time/step"] for r in read_metrics(branch.parent) if "perf/time/step" in r]:
        hours = median(times) * branch.steps * runs / 3600
        lines[-1] += (
            f": {hours:.3g} hours by the run's own steps, {hours / num_parallel:.3g} with {num_parallel} at a time, "
            f"{hours * ranks:.3g} rank-hours; start-up apart"
        )
    return "\n".join(lines)


def page(judgement: Judgement) -> str:
    """Return the judgement as text."""
    branch = judgement.branch
    rows = [["arm", "undoes", "mean", "effect", "95% interval", "p (Holm)", "restores", "verdict"]]
    rows.append([CONTROL, "–", _mean(judgement.control), *["–"] * 5])
    rows += [_row(judged) for judged in judgement.arms]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = _heading(branch)
    lines += ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"  {arm.name}: {arm.note}" for arm in branch.arms if arm.note]
    if judgement.best is not None:
        lines.append(f"  {judgement.best.arm.name} restores more than was lost: a quarter of that counts as none")
    lines.append("")
    if judgement.difference is not None:
        lines.append(f"The control with the run's own seeds differs from the run: {judgement.difference}")
    elif judgement.repeated:
        text = f"The control with the run's own seeds repeats {judgement.repeated} steps of the run, bit for bit."
        lines.append(text)
    lines += _chances(judgement)
    if judgement.unfinished:
        lines.append(f"Not finished: {', '.join(judgement.unfinished)}; the same command goes on")
    lines += [f"Verdict: {judgement.sentence}", *_left_out(branch)]
    return "\n".join(lines)


def _chances(judgement: Judgement) -> list[str]:
    """What the p-values take into account, and what they do not."""
    looks = judgement.looks
    ordinal = "first look at these arms" if looks == 1 else f"look number {looks} at these arms"
    lines = [f"p: Holm's, times {price_of_look(looks)} for the {ordinal}; more seeds are another look."]
    lines += unseen_told(len(judgement.control)) if judgement.control else []
    without = []
    for judged in judgement.arms:
        both = [{s: v for s, v in values.items() if s} for values in (judged.values, judgement.control)]
        if (effect := paired_effect(*both)) is not None:
            without.append(f"{judged.arm.name} {effect.mean:+.3g}")
    if without:
        lines.append(
            "Seed 0 is the run's own, looked at because it went wrong: effects lean to the arms. Without it: "
            + ", ".join(without)
        )
    return lines


def _row(judged: Judged) -> list[str]:
    row, effect = [judged.arm.name, judged.arm.suspect, _mean(judged.values)], judged.effect
    if effect is None:
        return [*row, *["–"] * 4, judged.verdict]
    interval = f"[{effect.alike_lower:+.3g}, {effect.alike_upper:+.3g}]"
    restored = "–" if judged.restored is None else f"{round(judged.restored, 2) + 0.0:.0%}"
    return [*row, f"{effect.mean:+.3g}", interval, f"{judged.p_holm:.2g}", restored, judged.verdict]


def _mean(values: Values) -> str:
    return f"{fmean(values.values()):.3g}" if values else "–"
