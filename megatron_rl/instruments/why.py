"""Why a run became unstable: when each metric left its baseline, what went first, and what may have caused it.

A change is found by Pettitt's test, applied again to what lies before each change it finds. A suspect has a number that
is held against a value known to be safe. The numbers come from the run's own metrics where they can, and from its
recipe else. `Suspect.excess` is the number over the safe value, weighed by what speaks for and against: above 1 it is a
suspect, and suspects stand in that order. It is no probability: an experiment that undoes one of them decides.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from megatron_rl.checkpoint.manifest import newest_checkpoint
from megatron_rl.config.monitor import RISKS, AlarmRule, level_rules, mismatch_has_updates
from megatron_rl.monitor.alarms import Alarms, CollapseRule, first_collapse
from megatron_rl.monitor.run_directory import RunDirectory

SURE = 0.01  # most probable error of a change, by the test
SHORTEST = 4  # observations on each side of a change
AHEAD = 20  # steps before the first sign in which a change of a metric counts as the onset


@dataclass(frozen=True)
class Change:
    """A metric's level is another from ``step`` on. ``before``, ``after``: medians on both sides."""

    metric: str
    step: int
    before: float
    after: float
    probability: float  # of so clear a change in a series without any

    @property
    def goes_up(self) -> bool:
        """Whether the later level is the higher one."""
        return self.after > self.before


def pettitt(values: Sequence[float]) -> tuple[int, float]:
    """The first index after the likeliest change of level in ``values``, and the probability of it by chance.

    The statistic is the largest |U_t|, where U_t sums the signs of all differences between values up to t and values
    after it (A. N. Pettitt, Applied Statistics 28, 1979); the probability is his approximation 2·exp(-6K²/(n³ + n²)).
    It uses order alone, so that spikes and the scale of a metric do not matter.
    """
    n = len(values)
    if n < 2:
        return 0, 1.0
    _, place, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    smaller = np.cumsum(counts) - counts
    signs = (smaller - (n - smaller - counts))[place]  # of each value less all others, summed
    u = np.cumsum(signs)[:-1]  # pairs on one side of t cancel
    at = int(np.argmax(np.abs(u)))
    k = float(abs(u[at]))
    return at + 1, min(1.0, 2.0 * math.exp(-6.0 * k**2 / (n**3 + n**2)))


def first_change(metric: str, steps: Sequence[int], values: Sequence[float]) -> Change | None:
    """The earliest change of level of a series that the test is sure of; None where it is sure of none.

    Values that are not finite count as larger than every other. After a change is found, what lies before it is
    searched again: the first departure is wanted, not the largest.
    """
    known = [value for value in values if math.isfinite(value)]
    top = max(known, default=0.0)
    x = [value if math.isfinite(value) else top + abs(top) + 1.0 for value in values]
    change, end = None, len(x)
    while end >= 2 * SHORTEST:
        at, probability = pettitt(x[:end])
        if probability > SURE or at < SHORTEST or end - at < SHORTEST:
            break
        before, after = float(np.median(x[:at])), float(np.median(x[at:end]))
        change = Change(metric, int(steps[at]), before, after, probability)
        end = at
    return change


Records = Sequence[Mapping[str, float]]
Recipe = Mapping[str, Any]

FIRST = 10  # steps that say what a run was like before it went wrong
HIGHEST = 0.9  # rates above this share of the highest one count as the highest

# Largest values in the healthy runs of the laptop recipes and of the lab, rounded up.
SAFE_UPDATE = 1e-3  # noise/relative_update: change of the weights in one update, relative to them
SAFE_UPDATES = 4  # updates a batch: what the recipes and the papers use
SAFE_STALENESS = 1  # steps
SAFE_RHO = 0.03  # mismatch/rho_std before anything was learned: bf16
SAFE_KL = 0.02  # actor/ppo_kl of a batch
SAFE_FALL = 0.25  # share of the reward that is lost from one step to the next
SAFE_SKIPPED = 0.05  # share of updates that are skipped
SAFE_LENGTH = 1.5  # times the length of the first steps
SAFE_TRUNCATED = 0.25  # share of responses at the length limit
SAFE_CLIP = 0.4  # widest clip range of a policy term
SAFE_GAP = 1.5  # held-out over training reward, of the same policy
SAFE_FLIPS = 0.05  # share of rows that both engines route differently
SAFE_TEMPERATURE = 1.25  # and its inverse


@dataclass(frozen=True)
class Suspect:
    """One possible cause. ``keys``: of the recipe; ``test``: overrides that undo it."""

    name: str
    keys: tuple[str, ...]
    observation: str
    value: float
    safe: float
    excess: float
    supports: tuple[str, ...] = ()
    contradicts: tuple[str, ...] = ()
    test: tuple[str, ...] = ()


@dataclass
class Case:
    """A run as the suspects see it."""

    records: Records
    recipe: Recipe
    onset: int | None  # the step of the first sign
    collapse: int | None
    changes: Mapping[str, int] = field(default_factory=dict)  # metric → the step at which it left its baseline

    def values(self, metric: str, until: int | None = None) -> list[float]:
        """The metric where it is there and finite, of the steps up to ``until``."""
        return [
            float(r[metric])
            for r in self.records
            if metric in r and math.isfinite(r[metric]) and (until is None or r["step"] <= until)
        ]

    def first(self, metric: str) -> float | None:
        """The median of the first steps."""
        return self._median_of_first(metric, self.records)

    def at_the_highest_rate(self, metric: str) -> float | None:
        """The median of the first steps at the highest learning rate up to the onset, or without rates of the first.

        A rate is set from outside, by a schedule or a changed recipe: a rise of it is no symptom.
        """
        rates = self.values("actor/lr", self.onset)
        if not rates or min(rates) > HIGHEST * max(rates):
            return self.first(metric)
        return self._median_of_first(metric, [r for r in self.records if r.get("actor/lr", 0.0) > HIGHEST * max(rates)])

    @staticmethod
    def _median_of_first(metric: str, records: Records) -> float | None:
        values = [float(r[metric]) for r in records if metric in r and math.isfinite(r[metric])][:FIRST]
        return median(values) if values else None

    def setting(self, path: str, default: Any = None) -> Any:
        """A key of the recipe."""
        value: Any = self.recipe
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return default if value is None else value

    @property
    def updates(self) -> int:
        """Updates a batch."""
        return int(self.setting("batch.minibatches", 1))


def suspects(case: Case) -> list[Suspect]:
    """Those above their safe value, the furthest first."""
    suspected = [suspect for look in LOOKS if (suspect := look(case)) is not None and suspect.excess > 1]
    return sorted(suspected, key=lambda suspect: -suspect.excess)


def _suspect(
    name: str, keys: str, observation: str, value: float, safe: float, factor: float = 1.0, **more: Any
) -> Suspect:
    return Suspect(name, tuple(keys.split()), observation, float(value), safe, value / safe * factor, **more)


def learning_rate(case: Case) -> Suspect | None:
    """The change of the weights in an update, or where that was not measured the KL that a batch's updates make."""
    rate = case.setting("learner.optimizer.lr", case.first("actor/lr"))
    size = case.at_the_highest_rate("noise/relative_update")
    test = () if rate is None else (f"learner.optimizer.lr={rate / 3:.3g}",)
    clipped = case.first("actor/ppo_kl") or 0.0
    supports = [f"actor/ppo_kl is {clipped:.2g} in the first steps"] if clipped > SAFE_KL else []
    norms = case.values("actor/grad_norm")
    rates = case.values("actor/lr", case.onset)
    if rates and max(rates) > 2 * min(rates) > 0:
        supports.append(f"actor/lr rose from {min(rates):.2g} to {max(rates):.2g} before the first sign")
    if norms[:3] and max(norms) > 3 * median(norms[:3]):
        supports.append(f"actor/grad_norm rose from {_two(median(norms[:3]))} to {_two(max(norms))}")
    if size is not None:
        observation = f"one update changes the weights by {size:.2%} of their size"
        against = () if size > SAFE_UPDATE else ("the updates are small",)
        more = {"supports": tuple(supports), "contradicts": against, "test": test}
        return _suspect("learning rate", "learner.optimizer.lr schedule", observation, size, SAFE_UPDATE, **more)
    if clipped <= 0:
        return None
    observation = f"the updates of one batch move the policy by a KL of {clipped:.2g}"
    return _suspect("learning rate", "learner.optimizer.lr schedule", observation, clipped, SAFE_KL, test=test)


def several_updates(case: Case) -> Suspect | None:
    """More updates a batch than the papers make."""
    kl = case.first("actor/ppo_kl") or 0.0
    supports = (f"actor/ppo_kl is {kl:.2g} in the first steps",) if kl > SAFE_KL else ()
    against = (f"actor/ppo_kl is only {kl:.2g} in the first steps",) if kl <= SAFE_KL / 10 else ()
    factor = math.sqrt(max(kl / SAFE_KL, 1.0)) if case.updates > 1 else 0.0
    observation = f"a batch is used for {case.updates} updates"
    more = {"supports": supports, "contradicts": against, "test": ("batch.minibatches=1",)}
    return _suspect("updates a batch", "batch.minibatches", observation, case.updates, SAFE_UPDATES, factor, **more)


def clipping(case: Case) -> Suspect | None:
    """A clip range that holds nothing back."""
    term = case.setting("objective.policy_term", {})
    if not isinstance(term, Mapping) or term.get("name") != "ppo_clip":
        return None
    widest = max(float(term.get("clip_low", 0.2)), float(term.get("clip_high", 0.28)))
    against = () if case.updates > 1 else ("with one update a batch nothing is clipped",)
    observation = f"ratios may move by {widest:g} before they are clipped"
    test = ("objective.policy_term.clip_low=0.2", "objective.policy_term.clip_high=0.28")
    more = {"contradicts": against, "test": test}
    return _suspect(
        "clip range", "objective.policy_term", observation, widest, SAFE_CLIP, 0.0 if against else 1.0, **more
    )


def staleness(case: Case) -> Suspect | None:
    """Responses sampled from old weights."""
    ages = case.values("rollout/staleness_mean")
    steps = float(case.setting("rollout.max_staleness", max(ages, default=0)))
    measured = max(ages, default=steps)
    observation = f"responses are sampled from weights up to {steps:g} steps old ({measured:.2g} on average at most)"
    rho = case.first("mismatch/rho_std")
    supports = (f"mismatch/rho_std is {rho:.2g} in the first steps",) if rho is not None and rho > SAFE_RHO else ()
    more = {"supports": supports, "test": ("rollout.max_staleness=0",)}
    return _suspect("staleness", "rollout.max_staleness", observation, steps, SAFE_STALENESS, **more)


def rounding(case: Case) -> Suspect | None:
    """Mismatch before anything was learned: of the first step."""
    rho = next(iter(case.values("mismatch/rho_std")), None)
    if rho is None or case.setting("exact.noise") or mismatch_has_updates(case.recipe):
        return None
    weights = case.setting("rollout.quantization.weights")
    cache = case.setting("rollout.quantization.kv_cache")
    types = f"learner {case.setting('learner.dtype', '?')}, engine {case.setting('rollout.dtype', '?')}"
    rounded = ", ".join(f"{what} in {name}" for what, name in (("weights", weights), ("cache", cache)) if name)
    types += f", {rounded}" if rounded else ""
    observation = f"mismatch/rho_std is {rho:.2g} in the first step, with the same weights ({types})"
    later = max(case.values("mismatch/rho_std", case.collapse)[1:], default=rho)
    against = (f"later it is {later:.2g}: most of it came with learning",) if later > 3 * rho else ()
    test = ["rollout.quantization.weights=null"] * bool(weights) + ["rollout.quantization.kv_cache=null"] * bool(cache)
    keys = "rollout.quantization learner.dtype rollout.dtype"
    more = {"contradicts": against, "test": tuple(test or ("learner.dtype=fp32", "rollout.dtype=fp32"))}
    return _suspect("rounding", keys, observation, rho, SAFE_RHO, **more)


def dose(case: Case) -> Suspect | None:
    """Mismatch that the recipe asks for."""
    noise, rho = case.setting("exact.noise"), case.first("mismatch/rho_std")
    if not isinstance(noise, Mapping) or rho is None:
        return None
    observation = f"mismatch/rho_std is {rho:.2g} in the first steps, by a dose of the kind {noise.get('kind')}"
    return _suspect("dose of mismatch", "exact.noise", observation, rho, SAFE_RHO, test=("exact.noise=null",))


def overflow(case: Case) -> Suspect | None:
    """Updates that are skipped."""
    skipped = case.values("actor/update_skipped")
    share = sum(skipped) / len(skipped) if skipped else 0.0
    observation = f"{share:.0%} of the updates were skipped for infinite gradients"
    test = ("learner.dtype=bf16", "rollout.dtype=bf16")
    return _suspect("overflow", "learner.dtype learner.loss_scale", observation, share, SAFE_SKIPPED, test=test)


def reward(case: Case) -> Suspect | None:
    """A reward that changes while the policy does not, or that is the same for every response."""
    signal = case.values("groups/no_signal_frac")[:3]
    if signal and median(signal) > 0.9:
        observation = f"from the start all rewards are equal in {median(signal):.0%} of the groups"
        return _suspect("reward", "reward.name data.train", observation, median(signal), 0.1, test=("reward.name=…",))
    rows = [r for r in case.records if math.isfinite(r.get("critic/rewards/mean", math.nan))]
    fall, at = _largest_fall([float(r["critic/rewards/mean"]) for r in rows])
    if fall <= 0:
        return None
    entropy = [float(r.get("actor/entropy", math.nan)) for r in rows]
    moved = abs(sum(entropy[at : at + 3]) / max(sum(entropy[at - 3 : at]), 1e-9) - 1)  # NaN where it was not measured
    observation = f"{fall:.0%} of the reward is lost at step {rows[at]['step']}, from one step to the next"
    supports = (f"entropy moves by {moved:.0%} there: the policy is the same",) if moved < 0.1 else ()
    against = (f"entropy moves by {moved:.0%} there: the policy moves too",) if moved >= 0.25 else ()
    factor = (2.0 if supports else 1.0) * (0.25 if against else 1.0) * (1.0 if fall > 0.5 else 0.5)
    more = {"supports": supports, "contradicts": against, "test": ("reward.name=…",)}
    return _suspect("reward", "reward.name", observation, fall, SAFE_FALL, factor, **more)


def _largest_fall(means: Sequence[float]) -> tuple[float, int]:
    """The largest fall between two neighbouring stretches of three, as a share of the best one so far; its place."""
    best, largest, place = 0.0, 0.0, 0
    for at in range(3, len(means) - 2):
        before, after = sum(means[at - 3 : at]) / 3, sum(means[at : at + 3]) / 3
        best = max(best, before)
        if best > 0 and (before - after) / best > largest:
            largest, place = (before - after) / best, at
    return largest, place


def data(case: Case) -> Suspect | None:
    """Training answers that are harder to meet than the held-out ones, by the same policy."""
    held_out, trained = case.values("val/reward/mean")[:1], case.values("critic/score/mean")[:3]
    trained = trained or case.values("critic/rewards/mean")[:3]
    if not held_out or not trained:
        return None
    gap = held_out[0] / max(sum(trained) / len(trained), 1e-3)
    observation = (
        f"the first policy earns {held_out[0]:.2g} on held-out prompts and {median(trained):.2g} on training prompts"
    )
    return _suspect("data", "data.train", observation, gap, SAFE_GAP, gap / SAFE_GAP, test=("data.train=…",))


def length(case: Case) -> Suspect | None:
    """Responses that grow, or end at the limit."""
    lengths, cut = case.values("response_length/mean"), case.values("response_length/clip_ratio")
    if len(lengths) < FIRST:
        return None
    start, most = median(lengths[:3]), max(median(lengths[i : i + 5]) for i in range(len(lengths) - 4))
    growth = most / max(start, 1e-9)
    truncated = max((median(cut[i : i + 5]) for i in range(len(cut) - 4)), default=0.0)
    observation = f"responses grew to {growth:.2g} times their first length; {truncated:.0%} were cut at the limit"
    excess = max(growth / SAFE_LENGTH, truncated / SAFE_TRUNCATED)
    at = case.changes.get("response_length/mean")
    follows = at is not None and case.collapse is not None and at > case.collapse
    against = (f"they grew from step {at} on, after the reward fell",) if follows else ()
    keys = ("rollout.max_response_length", "reward.overlong", "reward.name")
    test = ("reward.overlong={buffer: 4}",)
    return Suspect(
        "length", keys, observation, growth, SAFE_LENGTH, excess * (0.5 if follows else 1.0), (), against, test
    )


def temperature(case: Case) -> Suspect | None:
    """Sampling far from the policy's own distribution."""
    value = float(case.setting("rollout.temperature", 1.0))
    off = max(value, 1 / value)
    entropy = case.first("actor/entropy")
    supports = () if entropy is None else (f"actor/entropy is {entropy:.2g} in the first steps",)
    observation = f"responses are sampled at temperature {value:g}"
    more = {"supports": supports, "test": ("rollout.temperature=1",)}
    return _suspect("temperature", "rollout.temperature", observation, off, SAFE_TEMPERATURE, off, **more)


def routing(case: Case) -> Suspect | None:
    """Rows that both engines route differently."""
    agreed = case.first("router/agree_frac")
    if agreed is None:
        return None
    observation = f"both engines choose other experts in {1 - agreed:.1%} of the rows"
    return _suspect("routing", "routing.replay", observation, 1 - agreed, SAFE_FLIPS, test=("routing.replay=r3",))


LOOKS: tuple[Callable[[Case], Suspect | None], ...] = (
    learning_rate,
    several_updates,
    clipping,
    staleness,
    rounding,
    dose,
    overflow,
    reward,
    data,
    length,
    temperature,
    routing,
)


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

    @property
    def first_sign(self) -> int | None:
        """The step of the first sign of harm, or where there is none of a risk; None for a healthy run."""
        harm = [sign.step for sign in self.signs if sign.name not in RISKS]
        return min(harm or [sign.step for sign in self.signs], default=None)

    @property
    def onset(self) -> int | None:
        """The step at which the trouble began; None for a healthy run.

        It began with the first metric that left its baseline within `AHEAD` steps before the first sign. What changed
        earlier is taken for learning.
        """
        sign = self.first_sign
        if sign is None:
            return None
        return min([sign, *(change.step for change in self.changes if sign - AHEAD <= change.step)])

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"healthy": self.is_healthy}


def find(name: str, records: Sequence[Mapping[str, float]], recipe: Mapping[str, Any]) -> Finding:
    """What happened to a run, from its ``records`` and its ``recipe`` as plain values."""
    collapse = first_collapse(records, CollapseRule())
    seen = Finding(name, len(records), collapse, _signs(records, recipe, collapse), (), ())
    onset = seen.first_sign
    if onset is None:
        return seen
    changes = _changes(records, onset + AFTERWARDS)
    case = Case(records, recipe, onset, collapse, {change.metric: change.step for change in changes})
    return replace(seen, changes=changes, suspects=tuple(suspects(case)))


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
    changes = []
    for metric, direction in TELLING.items():
        pairs = [(int(r["step"]), float(r[metric])) for r in records if metric in r and r["step"] <= until]
        if not pairs:
            continue
        change = first_change(metric, *zip(*pairs, strict=True))
        if change is not None and _tells(change, direction):
            changes.append(change)
    return tuple(sorted(changes, key=lambda change: change.step))


def _tells(change: Change, direction: int) -> bool:
    if direction and (direction > 0) != change.goes_up:
        return False
    low, high = sorted((abs(change.before), abs(change.after)))
    return high >= LEAST * low


def _two(value: float) -> str:
    """Return two digits of a number: 250, where `.2g` has 2.5e+02."""
    return f"{float(f'{value:.2g}'):g}"


def page(finding: Finding, run: Path | None, from_start: bool = False) -> str:
    """The finding as text. ``run``: its directory; None for a log of another project, which has no recipe.

    ``from_start``: no checkpoint is early enough for `run branch`, which then begins where the run began.
    """
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
        command = f"megatron-rl run branch {run}{' --from 0' if from_start else ''}"
        decides = f"`{command}` undoes each of them over several seeds, and decides."
        if from_start:
            decides += " No checkpoint is as early as the onset, so its arms begin at step 0."
    lines += ["", f"These are suspects. {decides}"]
    return "\n".join(lines)


def begins_at_start(finding: Finding, run: Path) -> bool:
    """Return whether no complete checkpoint of the run is at or before the onset: `run branch` starts at step 0."""
    onset = finding.onset
    return onset is not None and newest_checkpoint(RunDirectory(run).checkpoints, onset) is None


def _told(rank: int, suspect: Suspect, run: Path | None) -> list[str]:
    lines = [f"  {rank}. {suspect.name} ({_two(suspect.excess)}×): {suspect.observation}; safe: {suspect.safe:g}"]
    lines += [f"       for: {text}" for text in suspect.supports]
    lines += [f"       against: {text}" for text in suspect.contradicts]
    lines.append(f"       keys: {', '.join(suspect.keys)}")
    if suspect.test and run is None:
        lines.append(f"       test: the same run with {', '.join(suspect.test)} (docs/coming-from.json has your names)")
    elif suspect.test:
        name = f"{run.name}-{suspect.name.replace(' ', '-')}"
        sets = " ".join(f"--set {shlex.quote(change)}" for change in suspect.test)
        lines.append(f"       test: megatron-rl train {run / 'recipe.resolved.yaml'} --set name={name} {sets}")
    return lines
