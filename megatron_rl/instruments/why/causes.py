"""The causes that metrics can tell apart, as one table: what would be seen of each, and the test that decides.

A cause is suspected for one of two reasons. Its own measure departed from the run's healthy stretch (`departures`), at
or before the sign and among the first that did. Or its number is above a constant that is known to be safe, in a run
of which nothing was changed: the constants are from tiny models, and a number that was as high while the run was well
speaks against its cause.

One rule ranks them. A departure that another one comes before (`Case.upstream`) is an effect, and stands last. So does
what was there before the policy, its engine or its judge departed at once, but where updates are large. What metrics
do not tell apart is one line: departures of one stage of a step, or one by and by and what was there from the start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean, median

from megatron_rl.config.monitor import level_rules, mismatch_has_updates
from megatron_rl.instruments.why.case import (
    CUT,
    DOWN,
    ENTROPY,
    FIRST,
    KL,
    LENGTH,
    RATE,
    RHO,
    SAFE_KL,
    SAFE_UPDATE,
    UP,
    UPDATE,
    Case,
    Suspect,
    highest,
    largest_fall,
    sharpest,
    two,
)
from megatron_rl.instruments.why.departures import AFTER, FAILURES, FOREIGN, JUMP, WATCHED, Change
from megatron_rl.monitor.alarms import HELD_OUT, REWARD, learned_by_heart

DIRECTIONS = {metric: watched.direction >= 0 for metric, watched in WATCHED.items()}
STRONGEST = 10.0  # a departure counts no more than this many times the least one
STRONG = 2.4  # a constant this many times above what is safe is no tie: above the rounding of all healthy runs
OPEN = 1.6  # weight of a cause that is seen only by what is not
FALLS = WATCHED[REWARD].stage

# Constants of tiny models, for a run that was never well: above all of the healthy runs, rounded up.
SAFE_STEP = 2.0  # root mean square of a weight's step, in rates: Adam's first ones have 1
SAFE_RHO = 0.03  # before anything was learned: bf16
SAFE_FALL = 0.25  # share of the reward that is lost from one step to the next
SAFE_LENGTH = 1.6  # times the length of the first steps
SAFE_TRUNCATED = 0.25  # share of responses at the length limit
SAFE_GAP = 1.5  # held-out over training reward, of the same policy
SILENT = 5  # records up to the sign without any signal
SAFE_COPIES = 0.05  # share of the groups that earn all, and of those that earn nothing, where no group earns a part
SAFE = {
    "updates a batch": 4,  # what the recipes and the papers use
    "clip range": 0.4,  # widest of a policy term
    "staleness": 1,  # steps
    "overflow": 0.05,  # share of updates that are skipped
    "temperature": 1.25,  # and its inverse
    "routing": 0.05,  # share of rows that both engines route differently
    "dose of mismatch": SAFE_RHO,
}


def _numbers(case: Case) -> dict[str, tuple[float, str]]:
    """The numbers of a run that are held against those of `SAFE`, and how they are told."""
    updates, kl = int(case.setting("batch.minibatches", 1)), case.first(KL) or 0.0
    used = updates * math.sqrt(max(kl / SAFE_KL, 1.0)) if updates > 1 else 0.0
    widest, term = 0.0, case.setting("objective.policy_term", {})
    if isinstance(term, Mapping) and term.get("name") == "ppo_clip" and updates > 1:  # with one nothing is clipped
        widest = max(float(term.get("clip_low", 0.2)), float(term.get("clip_high", 0.28)))
    ages, skipped = case.values("rollout/staleness_mean"), case.values("actor/update_skipped")
    steps, share = float(case.setting("rollout.max_staleness", max(ages, default=0))), fmean(skipped or [0.0])
    measured = f"{max(ages):.2g} on average at most" if ages else "not measured"
    heat, flips = float(case.setting("rollout.temperature", 1.0)), 1 - (case.first("router/agree_frac") or 1.0)
    off = max(heat, 1 / heat) if heat > 0 else math.inf
    dose, rho = case.setting("exact.noise"), case.first(RHO) or 0.0
    kind = dose.get("kind") if isinstance(dose, Mapping) else None
    return {
        "updates a batch": (used, f"a batch is used for {updates} updates, and {KL} is {kl:.2g} in the first steps"),
        "clip range": (widest, f"ratios may move by {widest:g} before they are clipped"),
        "staleness": (steps, f"responses are sampled from weights up to {steps:g} steps old ({measured})"),
        "overflow": (share, f"{share:.0%} of the updates were skipped for infinite gradients"),
        "temperature": (off * off, f"responses are sampled at temperature {heat:g}"),
        "routing": (flips, f"both engines choose other experts in {flips:.1%} of the rows"),
        "dose of mismatch": (rho * bool(kind), f"{RHO} is {rho:.2g} in the first steps, by a dose of the kind {kind}"),
    }


def _over_adam(case: Case) -> tuple[float, str]:
    """How far weights move beyond what Adam's step can be, and that as text."""
    rows = [(r.get("noise/update_rms", 0.0), r.get(RATE, 0.0)) for r in case.up_to(case.sign)]
    ratios = sorted(moved / rate for moved, rate in rows if rate > 0 and 0 < moved < math.inf)
    first, second = (float(case.setting(f"learner.optimizer.beta{n}", usual)) for n, usual in ((1, 0.9), (2, 0.95)))
    bound = max(1.0, (1 - first) / math.sqrt(max(1 - second, 1e-9)))  # of a gradient that is there in one step only
    ratio = min(ratios[-2:], default=0.0)
    text = f"a weight moves by {two(ratio)} times the rate in an update, and Adam's step is {two(bound)} at most"
    return ratio / bound / SAFE_STEP, f"{text}: weight decay, or moments that are not kept"


def _optimizer(case: Case) -> Suspect | None:
    """Weights that move further than Adam's step can be, or than they did at the same rate."""
    (excess, text), own = _over_adam(case), case.departed(UPDATE, UP)
    is_known = case.is_explained or case.departed(RATE) or not case.values(RATE)
    if excess <= 1 and own and not (is_known or case.upstream(own)):
        excess, text = OPEN, f"{_goes(own)}, at the same rate: gradients that add up, moments that are not kept"
    return Suspect(excess, text, always=True, own=own)


def _rate(case: Case) -> Suspect | None:
    kl, size = case.at_the_highest_rate(KL) or 0.0, case.at_the_highest_rate(UPDATE)
    if _over_adam(case)[0] > 1:
        return None
    if size is None:
        return Suspect(kl / SAFE_KL, f"the updates of one batch move the policy by a KL of {kl:.2g}")
    # Only what is too large by itself is weighed.
    weight = math.sqrt(max(kl / SAFE_KL, 1.0)) if size > SAFE_UPDATE else 1.0
    supports = (f"{KL} is {kl:.2g}",) if kl > SAFE_KL else ()
    return Suspect(size / SAFE_UPDATE * weight, f"one update changes the weights by {size:.2%} of their size", supports)


def _third(case: Case) -> str:
    """A third of the rate."""
    rate = case.setting("learner.optimizer.lr", max(case.values(RATE), default=None))
    return "" if rate is None else f"learner.optimizer.lr={rate / 3:.3g}"


def _mismatch(case: Case) -> Suspect | None:
    """Mismatch above what the types explain."""
    bound = next((rule.above for rule in level_rules(case.recipe) if rule.name == "mismatch-contract"), None)
    rho = case.first(RHO)
    if not bound or rho is None:
        return None
    text = f"{RHO} is {rho:.2g} in the first steps, and the types of both engines explain {bound:g}: other weights or "
    return Suspect(min(rho / bound, STRONGEST), f"{text}log-probs that are made another way", always=True)


def _rounding(case: Case) -> Suspect | None:
    """Mismatch before anything was learned: of the first step."""
    rho = next(iter(case.values(RHO)), None)
    is_beyond = (other := _mismatch(case)) and other.excess > 1
    if rho is None or is_beyond or case.setting("exact.noise") or mismatch_has_updates(case.recipe):
        return None
    rounded = {f"rollout.quantization.{what}": what for what in ("weights", "kv_cache")}
    rounded = {key: f"{what} in {case.setting(key)}" for key, what in rounded.items() if case.setting(key)}
    types = f"learner {case.setting('learner.dtype', '?')}, engine {case.setting('rollout.dtype', '?')}"
    text = f"{RHO} is {rho:.2g} in the first step, with the same weights ({', '.join([types, *rounded.values()])})"
    test = tuple(f"{key}=null" for key in rounded) or ("learner.dtype=fp32", "rollout.dtype=fp32")
    return Suspect(rho / SAFE_RHO, text, test=test)


def _reward(case: Case) -> Suspect | None:
    """A reward that changes while the policy does not, or that is the same for every response."""
    signal = case.values("groups/no_signal_frac")[:3]
    if signal and median(signal) > 0.9 and not _copies(case):
        return Suspect(9.0, f"from the start all rewards are equal in {median(signal):.0%} of the groups")
    if (first := case.first_step) and first.metric in (REWARD, HELD_OUT):
        return Suspect(JUMP * JUMP, f"{_in_both(first)}: judge or answers", always=True, own=first)
    rows = [r for r in case.until_sign if math.isfinite(r.get(REWARD, math.nan))]
    fall, at = largest_fall([float(r[REWARD]) for r in rows])
    if fall <= 0:
        return None
    before, after = rows[at - 3 : at], rows[at : at + 3]
    sums = {n: [sum(r.get(n, math.nan) for r in part) for part in (before, after)] for n in (ENTROPY, LENGTH)}
    moved = {name: abs(there / max(here, 1e-9) - 1) for name, (here, there) in sums.items()}
    most = max(moved.values())  # NaN where it was not measured
    said = ", ".join(f"{name} by {share:.0%}" for name, share in moved.items() if math.isfinite(share))
    supports = (f"the policy is the same there: {said} from one step to the next",) if most < 0.1 else ()
    against = ("updates are large: these may lose it as fast",) * case.updates_are_large
    weight = (2.0 if supports else 1.0) * 0.25 ** len(against) * (1.0 if fall > 0.5 else 0.5)
    step = int(rows[at]["step"])
    levels = (median(float(r[REWARD]) for r in part) for part in (before, rows[at:]))
    own = Change(REWARD, step, *levels, fall / SAFE_FALL)
    if (left := case.departed(REWARD, DOWN)) is not None and left.at_once:
        own, weight = max(own, left, key=lambda change: change.margin), max(weight, OPEN * SAFE_FALL / fall)
    text = f"{fall:.0%} of the reward is lost at step {step}, from one step to the next"
    text += ", by the same policy: judge, answers or prompts are others" * bool(supports)
    name = "reward or prompts" * bool(supports)
    return Suspect(fall / SAFE_FALL * weight, text, supports, against, always=True, own=own, name=name)


def _copies(case: Case) -> Suspect | None:
    """Groups that differ in what they earn, while all responses of each earn the same from the first step on."""
    silent = case.values("groups/no_signal_frac", case.sign)
    if case.sign is not None and silent and median(silent[:3]) <= 0.9 and min(silent[-SILENT:]) > 0.999:
        return Suspect(OPEN, f"all rewards are equal in each of the groups of the last {SILENT} records", always=True)
    parts = [case.values(f"groups/{name}_frac")[:3] for name in ("all_solved", "none_solved")]
    solved, unsolved = (median(part) if part else 0.0 for part in parts)
    if min(solved, unsolved) < SAFE_COPIES or solved + unsolved < 0.999:
        return None
    text = f"from the start all responses earn in {solved:.0%} of the groups, and none in the others: responses of a "
    text += "group are copies (seed, temperature), or the reward is one of prompts"
    return Suspect(min(solved, unsolved) / SAFE_COPIES, text, always=True)


def _goes(change: Change) -> str:
    return f"{change.metric} goes from {two(change.before)} to {two(change.after)} at step {change.step}"


def _in_both(first: Change) -> str:
    both = f"{first.metric} is {two(first.after)} in the first step, and {two(first.before)} in the other run"
    return f"{both}, before anything was learned"


def _data(case: Case) -> Suspect | None:
    """Training answers that are harder to meet than the held-out ones, by the same policy, or that teach other ones."""
    step, fell = learned_by_heart(case.until_sign), case.departed(HELD_OUT, DOWN)
    own = fell or (None if step is None else Change(HELD_OUT, step, 1.0, 0.0))
    if own is not None and (step is not None or not case.departed(REWARD, DOWN)):
        text = f"from step {own.step} on the held-out reward falls, and the training reward does not: the training set "
        text += "is learned by heart or has other answers, or validation is another"
        return Suspect(OPEN, text, always=True, own=own, name="data or validation")
    held_out = case.values("val/reward/mean")[:1]
    trained = (case.values("critic/score/mean") or case.values(REWARD))[:3]
    if not held_out or not trained or min(*held_out, *trained) < 0:  # two scales: a ratio means nothing
        return None
    gap = (held_out[0] + 0.01) / (sum(trained) / len(trained) + 0.01)
    text = f"the first policy earns {held_out[0]:.2g} on held-out prompts and {median(trained):.2g} on training prompts"
    return Suspect((gap / SAFE_GAP) ** 2, text)


def _objective(case: Case) -> Suspect | None:
    """A policy or reward that goes elsewhere by and by, or an update that is another."""
    moved = [case.departed(REWARD, DOWN), case.departed(HELD_OUT, DOWN), case.departed(ENTROPY)]
    moved += [case.departed(metric, UP) for metric in ("actor/grad_norm", UPDATE, KL)]
    moves_samples = any(case.departed(metric) for metric in (REWARD, LENGTH, CUT))
    at_once = {REWARD: moved[0] and moved[0].is_jump, ENTROPY: moved[2] and moved[2].at_once and moves_samples}
    own = (change for change in moved if change is not None and (case.is_sparse or not at_once.get(change.metric)))
    first = min(own, key=lambda change: (change.step, change.stage), default=None)
    if first is None or case.is_explained or case.upstream(first):
        return None
    if _over_adam(case)[0] > 1 if first.metric == UPDATE else case.updates_are_large:
        return None
    text = f"{_goes(first)}: updates push elsewhere or are larger at the same rate "
    text += "(loss, advantages, optimizer, answers, a judge that drifts)"
    return Suspect(OPEN, text, always=True, own=first)


def _length(case: Case) -> Suspect | None:
    """Responses that grow, or that are cut at a limit, before the reward falls."""
    fell = case.departed(REWARD, DOWN)
    before = [r for r in case.until_sign if fell is None or r["step"] < fell.step]
    near = Case(case.until_sign[: len(before) + AFTER], {})
    lengths, cut = near.values(LENGTH), near.values(CUT)
    if len(lengths) < FIRST:
        return None
    growth, share = highest(lengths) / max(median(lengths[:3]), 1e-9), highest(cut)
    shares = f"{share:.0%} were cut at the limit" if cut else "how many were cut is not known"
    excess = max(growth / SAFE_LENGTH, share / SAFE_TRUNCATED)
    if growth >= SAFE_LENGTH:
        text = f"responses grew to {growth:.2g} times their first length; {shares}"
        buffer = max(1, int(case.setting("rollout.max_response_length", 16)) // 4)
        test: tuple[str, ...] = (f"reward.overlong={{buffer: {buffer}}}",)
    else:
        text = f"responses do not end by themselves; {shares}: a shorter limit, or an end token that is lost"
        test = ("rollout.max_response_length=…", "rollout.stop_token_ids=null")
    own = sharpest([change for change in case.changes if change.metric in (CUT, LENGTH)])
    return Suspect(excess, text, test=test, always=True, own=own)


def _jump(case: Case) -> Suspect | None:
    """A policy that is another from one step to the next, though its updates are small, or before any update."""
    if first := case.first_step:
        return Suspect(JUMP * JUMP, f"{_in_both(first)}: weights or prompts", always=True, own=first)
    moved = (case.departed(ENTROPY), None if case.departed(CUT) else case.departed(LENGTH))
    change = next((change for change in moved if change is not None and change.at_once), None)
    fell = _reward(case)
    if change is None and fell and fell.own and fell.excess > 1 and not (fell.supports or case.upstream(fell.own)):
        change = fell.own  # the policy is not quite the same
    if change is None or case.updates_are_large or case.is_explained:
        return None
    text = f"the policy may be another: {_goes(change)}, with updates as before: weights that were loaded, "
    text += "restored or damaged, or prompts"
    return Suspect(max(change.margin, OPEN), text, always=True, own=change)


PARITY = (
    "`rollout.verify_refit: true` compares the engine's weights after each refit; `megatron-rl parity RUN` its "
    "operators with the learner's; `megatron-rl batch attribute RUN --step {step}` the scores of a recorded batch. "
    "Weights that are no longer sent make it grow with every update; a wrong tensor or wrong scoring comes at once"
)


@dataclass(frozen=True)
class Cause:
    """A row of the table. ``keys``: of the recipe; ``test``: overrides that undo it; ``apart``: what tells it from its
    neighbours. ``measures``: metrics whose departure is this cause's own, ``told`` with it. ``seen``: what else speaks
    for it; a number of `SAFE` without. ``hides``: the cause that looks the same where its measures are not in the log.
    """

    name: str
    keys: str
    test: str | Callable[[Case], str] = ""
    measures: str = ""
    told: str = ""
    seen: Callable[[Case], Suspect | None] | None = None
    apart: str = ""
    hides: str = ""


REPLAY = "`megatron-rl batch replay RUN --step {step}` makes"
SAMPLES = "`megatron-rl run samples RUN` shows"
LARGE, OLDER = "updates are too large", "older weights sample"
CAUSES = (
    Cause("learning rate", "learner.optimizer.lr schedule", _third, f"{UPDATE} {RATE} {KL}", LARGE, _rate),
    Cause(
        "optimizer",
        "learner.optimizer",
        lambda case: "learner.optimizer.weight_decay=0" * bool(case.setting("learner.optimizer.weight_decay")),
        seen=_optimizer,
        apart=f"{REPLAY} this update again, from an older optimizer state",
    ),
    Cause("updates a batch", "batch.minibatches", "batch.minibatches=1"),
    Cause("clip range", "objective.policy_term", "objective.policy_term=ppo_clip"),
    Cause("staleness", "rollout.max_staleness", "rollout.max_staleness=0", "rollout/staleness_mean", OLDER),
    Cause(
        "mismatch",
        "rollout precision routing",
        "rollout.engine=exact",
        RHO,
        "engine and learner no longer agree: the engine has other weights (old, or a wrong tensor), or its "
        "log-probs are made another way than the samples (temperature, top-p), or responses stand under other prompts",
        _mismatch,
        PARITY,
    ),
    Cause("rounding", "rollout.quantization learner.dtype rollout.dtype", seen=_rounding),
    Cause("dose of mismatch", "exact.noise", "exact.noise=null"),
    Cause(
        "overflow",
        "learner.dtype learner.loss_scale",
        "learner.dtype=bf16 rollout.dtype=bf16",
        "actor/update_skipped",
        "updates are skipped for infinite gradients",
    ),
    Cause(
        "reward",
        "reward.name data.train data.prompt",
        "reward.name=…",
        " ".join(FAILURES),
        "its function or judge fails",
        _reward,
        f"{SAMPLES} prompts, responses and what they earned: right answers that earn nothing, or questions that nobody "
        "asked. Where `val/reward/mean` stays, it is answers or prompts of training",
        hides="mismatch",
    ),
    Cause(
        "objective or reward",
        "objective reward.name data.train",
        seen=_objective,
        apart=f"{SAMPLES} whether right answers earn more (judge, answers); {REPLAY} the update again: the right "
        "answers of its batch must become likelier",
        hides="mismatch",
    ),
    Cause("data", "data validation", "data.train=…", seen=_data),
    Cause("length", "rollout.max_response_length rollout.stop_token_ids reward", seen=_length),
    Cause("temperature", "rollout.temperature", "rollout.temperature=1"),
    Cause("routing", "routing.replay", "routing.replay=r3", "router/agree_frac", "engines route apart"),
    Cause(
        "other weights or prompts",
        "model.path data.prompt data.train",
        seen=_jump,
        apart="`megatron-rl eval RECIPE --checkpoint` before and after it: lower means weights, equal prompts",
    ),
    Cause(
        "no signal",
        "data.train batch.filter_groups rollout.num_samples rollout.seed reward.name",
        "batch.filter_groups=true",
        "groups/no_signal_frac",
        "all responses to a prompt earn the same: nothing is left to learn from",
        _copies,
    ),
)


def suspects(case: Case) -> list[Suspect]:
    """The causes that the run suspects, the likeliest first: see the head of this file for the rule."""

    def are_one(one: Suspect, other: Suspect) -> bool:  # they depart together, in one stage of a step
        if one.is_last or other.is_last or not (one.own and other.own):
            return False
        return one.own.stage == other.own.stage and abs(case.between(one.own, other.own)) <= AFTER

    numbers, may_jump = _numbers(case), case.updates_are_large
    found = [suspect for cause in CAUSES if (suspect := _suspect(cause, case, numbers)) is not None]
    found = [_placed(suspect, suspect.own and case.upstream(suspect.own)) for suspect in found]
    firsts = [suspect.own for suspect in found if suspect.own and not suspect.is_last and suspect.own.at_once]
    others = (c for c in firsts if not may_jump and (c.is_jump or FOREIGN < c.stage < FALLS))
    first = next((c for c in firsts if c.is_foreign), next(others, None))
    lines: list[Suspect] = []
    for suspect in by_rank(suspect if suspect.own else _placed(suspect, first) for suspect in found):
        twin = next((line for line in lines if are_one(line, suspect)), None)
        lines = [line for line in lines if line is not twin] + [together(twin, suspect) if twin else suspect]
    ranked = by_rank(lines)
    one, other = (*ranked, None, None)[:2]
    if other and not (other.is_last or may_jump) and (one.own is None) != (other.own is None):
        is_alone = one.excess > STRONG and (one.own or other.own).stage > FOREIGN
        ranked[:2] = [one, other] if is_alone else [together(one, other)]
    return ranked


def _placed(suspect: Suspect, before: Change | None) -> Suspect:
    """The suspect, and what stands before it."""
    if before is None:
        return suspect
    how = f"which comes before {suspect.own.metric}" if suspect.own else "and this was there before"
    text = f"{before.metric} departed at step {before.step}, {how}"
    return replace(suspect, is_last=True, contradicts=(*suspect.contradicts, text))


def by_rank(suspects: Iterable[Suspect]) -> list[Suspect]:
    """The likeliest first."""
    return sorted(suspects, key=lambda suspect: (suspect.is_last, -suspect.excess))


def together(one: Suspect, other: Suspect) -> Suspect:
    """Two causes that metrics do not tell apart as one line; the test is that of the first."""
    causes = (*one.causes, *other.causes)
    return replace(
        one,
        causes=causes,
        name=" or ".join(dict.fromkeys(f"{one.name} or {other.name}".split(" or "))),
        keys=tuple(dict.fromkeys((*one.keys, *other.keys))),
        observation=f"{one.observation}; {other.observation}",
        supports=tuple(dict.fromkeys((*one.supports, *other.supports, "metrics do not tell these apart"))),
        contradicts=(*one.contradicts, *other.contradicts),
        apart="; ".join(filter(None, (one.apart, other.apart))),
    )


def _suspect(cause: Cause, case: Case, numbers: Mapping[str, tuple[float, str]]) -> Suspect | None:
    """The suspect of a row: for its own measure, or else for what is ``seen`` of it."""
    keys, test, names = cause.keys.split(), cause.test(case) if callable(cause.test) else cause.test, (cause.name,)
    number, text = numbers.get(cause.name, (0.0, ""))
    seen = cause.seen(case) if cause.seen else Suspect(number / SAFE[cause.name], text)
    is_changed = any(key.startswith(own) or own.startswith(key) for key in case.changed for own in keys)
    # What was as high before a change of something else did no harm then.
    if seen is None or not (seen.excess > 1 and (seen.always or is_changed or not case.changed)):
        seen = Suspect(0.0, "")
    moved = [c for name in cause.measures.split() if (c := case.departed(name, DIRECTIONS[name])) is not None]
    if cause.name == "learning rate" and case.values(RATE) and RATE not in {change.metric for change in moved}:
        moved = []  # somebody sets it: the others follow other causes, too, where it is known to be as before
    if moved:
        first, own = min(moved, key=lambda change: change.step), min(moved, key=lambda change: change.stage)
        told = [f"{c.metric}: {two(c.before)} → {two(c.after)} at step {c.step}" for c in moved if c != first]
        excess = max(min(first.margin, STRONGEST), seen.excess)
        seen = Suspect(excess, f"{cause.told}: {_goes(first)}", (*told, *seen.supports), own=own)
    elif not seen.excess:
        return None
    elif not seen.always:
        seen = replace(seen, supports=(*seen.supports, "by a constant of tiny models"))
    for other in CAUSES:
        if not moved and other.name == cause.hides and not any(map(case.values, other.measures.split())):
            names, keys = (cause.name, other.name), [*keys, *other.keys.split()]
            text = f"{other.measures} is not measured, and {other.told} would look the same"
            seen = replace(seen, supports=(*seen.supports, text))
    apart = cause.apart.replace("{step}", str(seen.own.step if seen.own else case.sign))
    name, test = " or ".join((seen.name or cause.name, *names[1:])), seen.test or tuple(test.split())
    return replace(seen, name=name, keys=tuple(keys), test=test, apart=apart, causes=names)
