"""What may have made a run unstable, each with a number that is held against a value known to be safe.

The numbers come from the run's own metrics where they can, and from its recipe else. `Suspect.excess` is the number
over the safe value, weighed by what speaks for and against: above 1 it is a suspect, and suspects stand in that order.
It is no probability: an experiment that undoes one of them decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

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
    said: str
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
    found = [suspect for look in LOOKS if (suspect := look(case)) is not None and suspect.excess > 1]
    return sorted(found, key=lambda suspect: -suspect.excess)


def _suspect(name: str, keys: str, said: str, value: float, safe: float, factor: float = 1.0, **more: Any) -> Suspect:
    return Suspect(name, tuple(keys.split()), said, float(value), safe, value / safe * factor, **more)


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
        supports.append(f"actor/grad_norm rose from {median(norms[:3]):.2g} to {max(norms):.2g}")
    if size is not None:
        said = f"one update changes the weights by {size:.2%} of their size"
        against = () if size > SAFE_UPDATE else ("the updates are small",)
        more = {"supports": tuple(supports), "contradicts": against, "test": test}
        return _suspect("learning rate", "learner.optimizer.lr schedule", said, size, SAFE_UPDATE, **more)
    if clipped <= 0:
        return None
    said = f"the updates of one batch move the policy by a KL of {clipped:.2g}"
    return _suspect("learning rate", "learner.optimizer.lr schedule", said, clipped, SAFE_KL, test=test)


def several_updates(case: Case) -> Suspect | None:
    """More updates a batch than the papers make."""
    kl = case.first("actor/ppo_kl") or 0.0
    supports = (f"actor/ppo_kl is {kl:.2g} in the first steps",) if kl > SAFE_KL else ()
    against = (f"actor/ppo_kl is only {kl:.2g} in the first steps",) if kl <= SAFE_KL / 10 else ()
    factor = math.sqrt(max(kl / SAFE_KL, 1.0)) if case.updates > 1 else 0.0
    said = f"a batch is used for {case.updates} updates"
    more = {"supports": supports, "contradicts": against, "test": ("batch.minibatches=1",)}
    return _suspect("updates a batch", "batch.minibatches", said, case.updates, SAFE_UPDATES, factor, **more)


def clipping(case: Case) -> Suspect | None:
    """A clip range that holds nothing back."""
    term = case.setting("objective.policy_term", {})
    if not isinstance(term, Mapping) or term.get("name") != "ppo_clip":
        return None
    widest = max(float(term.get("clip_low", 0.2)), float(term.get("clip_high", 0.28)))
    against = () if case.updates > 1 else ("with one update a batch nothing is clipped",)
    said = f"ratios may move by {widest:g} before they are clipped"
    test = ("objective.policy_term.clip_low=0.2", "objective.policy_term.clip_high=0.28")
    more = {"contradicts": against, "test": test}
    return _suspect("clip range", "objective.policy_term", said, widest, SAFE_CLIP, 0.0 if against else 1.0, **more)


def staleness(case: Case) -> Suspect | None:
    """Responses sampled from old weights."""
    ages = case.values("rollout/staleness_mean")
    steps = float(case.setting("rollout.max_staleness", max(ages, default=0)))
    measured = max(ages, default=steps)
    said = f"responses are sampled from weights up to {steps:g} steps old ({measured:.2g} on average at most)"
    rho = case.first("mismatch/rho_std")
    supports = (f"mismatch/rho_std is {rho:.2g} in the first steps",) if rho is not None and rho > SAFE_RHO else ()
    more = {"supports": supports, "test": ("rollout.max_staleness=0",)}
    return _suspect("staleness", "rollout.max_staleness", said, steps, SAFE_STALENESS, **more)


def rounding(case: Case) -> Suspect | None:
    """Mismatch before anything was learned: of the first step."""
    rho = next(iter(case.values("mismatch/rho_std")), None)
    if rho is None or case.setting("exact.noise"):
        return None
    weights = case.setting("rollout.quantization.weights")
    cache = case.setting("rollout.quantization.kv_cache")
    types = f"learner {case.setting('learner.dtype', '?')}, engine {case.setting('rollout.dtype', '?')}"
    rounded = ", ".join(f"{what} in {name}" for what, name in (("weights", weights), ("cache", cache)) if name)
    types += f", {rounded}" if rounded else ""
    said = f"mismatch/rho_std is {rho:.2g} in the first step, with the same weights ({types})"
    later = max(case.values("mismatch/rho_std", case.collapse)[1:], default=rho)
    against = (f"later it is {later:.2g}: most of it came with learning",) if later > 3 * rho else ()
    test = ["rollout.quantization.weights=null"] * bool(weights) + ["rollout.quantization.kv_cache=null"] * bool(cache)
    keys = "rollout.quantization learner.dtype rollout.dtype"
    more = {"contradicts": against, "test": tuple(test or ("learner.dtype=fp32", "rollout.dtype=fp32"))}
    return _suspect("rounding", keys, said, rho, SAFE_RHO, **more)


def dose(case: Case) -> Suspect | None:
    """Mismatch that the recipe asks for."""
    noise, rho = case.setting("exact.noise"), case.first("mismatch/rho_std")
    if not isinstance(noise, Mapping) or rho is None:
        return None
    said = f"mismatch/rho_std is {rho:.2g} in the first steps, by a dose of the kind {noise.get('kind')}"
    return _suspect("dose of mismatch", "exact.noise", said, rho, SAFE_RHO, test=("exact.noise=null",))


def overflow(case: Case) -> Suspect | None:
    """Updates that are skipped."""
    skipped = case.values("actor/update_skipped")
    share = sum(skipped) / len(skipped) if skipped else 0.0
    said = f"{share:.0%} of the updates were skipped for infinite gradients"
    test = ("learner.dtype=bf16", "rollout.dtype=bf16")
    return _suspect("overflow", "learner.dtype learner.loss_scale", said, share, SAFE_SKIPPED, test=test)


def reward(case: Case) -> Suspect | None:
    """A reward that changes while the policy does not, or that is the same for every response."""
    signal = case.values("groups/no_signal_frac")[:3]
    if signal and median(signal) > 0.9:
        said = f"from the start all rewards are equal in {median(signal):.0%} of the groups"
        return _suspect("reward", "reward.name data.train", said, median(signal), 0.1, test=("reward.name=…",))
    rows = [r for r in case.records if math.isfinite(r.get("critic/rewards/mean", math.nan))]
    fall, at = _largest_fall([float(r["critic/rewards/mean"]) for r in rows])
    if fall <= 0:
        return None
    entropy = [float(r.get("actor/entropy", math.nan)) for r in rows]
    moved = abs(sum(entropy[at : at + 3]) / max(sum(entropy[at - 3 : at]), 1e-9) - 1)  # NaN where it was not measured
    said = f"{fall:.0%} of the reward is lost at step {rows[at]['step']}, from one step to the next"
    supports = (f"entropy moves by {moved:.0%} there: the policy is the same",) if moved < 0.1 else ()
    against = (f"entropy moves by {moved:.0%} there: the policy moves too",) if moved >= 0.25 else ()
    factor = (2.0 if supports else 1.0) * (0.25 if against else 1.0) * (1.0 if fall > 0.5 else 0.5)
    more = {"supports": supports, "contradicts": against, "test": ("reward.name=…",)}
    return _suspect("reward", "reward.name", said, fall, SAFE_FALL, factor, **more)


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
    said = f"the first policy earns {held_out[0]:.2g} on held-out prompts and {median(trained):.2g} on training prompts"
    return _suspect("data", "data.train", said, gap, SAFE_GAP, gap / SAFE_GAP, test=("data.train=…",))


def length(case: Case) -> Suspect | None:
    """Responses that grow, or end at the limit."""
    lengths, cut = case.values("response_length/mean"), case.values("response_length/clip_ratio")
    if len(lengths) < FIRST:
        return None
    start, most = median(lengths[:3]), max(median(lengths[i : i + 5]) for i in range(len(lengths) - 4))
    growth = most / max(start, 1e-9)
    truncated = max((median(cut[i : i + 5]) for i in range(len(cut) - 4)), default=0.0)
    said = f"responses grew to {growth:.2g} times their first length; {truncated:.0%} were cut at the limit"
    excess = max(growth / SAFE_LENGTH, truncated / SAFE_TRUNCATED)
    at = case.changes.get("response_length/mean")
    follows = at is not None and case.collapse is not None and at > case.collapse
    against = (f"they grew from step {at} on, after the reward fell",) if follows else ()
    keys = ("rollout.max_response_length", "reward.overlong", "reward.name")
    test = ("reward.overlong={buffer: 4}",)
    return Suspect("length", keys, said, growth, SAFE_LENGTH, excess * (0.5 if follows else 1.0), (), against, test)


def temperature(case: Case) -> Suspect | None:
    """Sampling far from the policy's own distribution."""
    value = float(case.setting("rollout.temperature", 1.0))
    off = max(value, 1 / value)
    entropy = case.first("actor/entropy")
    supports = () if entropy is None else (f"actor/entropy is {entropy:.2g} in the first steps",)
    said = f"responses are sampled at temperature {value:g}"
    more = {"supports": supports, "test": ("rollout.temperature=1",)}
    return _suspect("temperature", "rollout.temperature", said, off, SAFE_TEMPERATURE, off, **more)


def routing(case: Case) -> Suspect | None:
    """Rows that both engines route differently."""
    agreed = case.first("router/agree_frac")
    if agreed is None:
        return None
    said = f"both engines choose other experts in {1 - agreed:.1%} of the rows"
    return _suspect("routing", "routing.replay", said, 1 - agreed, SAFE_FLIPS, test=("routing.replay=r3",))


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
