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
from statistics import median

from megatron_rl.config.monitor import level_rules, mismatch_has_updates
from megatron_rl.instruments.why.case import (
    CUT,
    DOWN,
    ENTROPY,
    FIRST,
    KL,
    LENGTH,
    RHO,
    SAFE_KL,
    SAFE_UPDATE,
    UP,
    UPDATE,
    Case,
    Seen,
    Suspect,
    highest,
    largest_fall,
    share_moved,
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
SAFE_UPDATES = 4  # updates a batch: what the recipes and the papers use
SAFE_STALENESS = 1  # steps
SAFE_RHO = 0.03  # before anything was learned: bf16
SAFE_FALL = 0.25  # share of the reward that is lost from one step to the next
SAFE_SKIPPED = 0.05  # share of updates that are skipped
SAFE_LENGTH = 1.6  # times the length of the first steps
SAFE_TRUNCATED = 0.25  # share of responses at the length limit
SAFE_CLIP = 0.4  # widest clip range of a policy term
SAFE_GAP = 1.5  # held-out over training reward, of the same policy
SAFE_FLIPS = 0.05  # share of rows that both engines route differently
SILENT = 5  # records up to the sign without any signal
SAFE_COPIES = 0.05  # share of the groups that earn all, and of those that earn nothing, where no group earns a part
SAFE_TEMPERATURE = 1.25  # and its inverse


def _over_adam(case: Case) -> tuple[float, str]:
    """How far weights move beyond what Adam's step can be, and that as text."""
    rows = [(r.get("noise/update_rms", 0.0), r.get("actor/lr", 0.0)) for r in case.up_to(case.sign)]
    ratios = sorted(moved / rate for moved, rate in rows if rate > 0 and 0 < moved < math.inf)
    first, second = (float(case.setting(f"learner.optimizer.beta{n}", usual)) for n, usual in ((1, 0.9), (2, 0.95)))
    bound = max(1.0, (1 - first) / math.sqrt(max(1 - second, 1e-9)))  # of a gradient that is there in one step only
    ratio = min(ratios[-2:], default=0.0)
    text = f"a weight moves by {two(ratio)} times the rate in an update, and Adam's step is {two(bound)} at most"
    return ratio / bound / SAFE_STEP, f"{text}: weight decay, or moments that are not kept"


def _optimizer(case: Case) -> Seen | None:
    """Weights that move further than Adam's step can be, or than they did at the same rate."""
    (excess, text), own = _over_adam(case), case.departed(UPDATE, UP)
    is_known = case.is_explained or case.departed("actor/lr") or not case.values("actor/lr")
    if excess <= 1 and own and not (is_known or case.upstream(own)):
        excess, text = OPEN, f"{_goes(own)}, at the same rate: gradients that add up, moments that are not kept"
    return Seen(excess, text, always=True, own=own)


def _rate(case: Case) -> Seen | None:
    if _over_adam(case)[0] > 1:
        return None
    kl, size = case.at_the_highest_rate(KL) or 0.0, case.at_the_highest_rate(UPDATE)
    supports = (f"{KL} is {kl:.2g}",) if kl > SAFE_KL else ()
    if size is not None:
        # Only what is too large by itself is weighed.
        weight = math.sqrt(max(kl / SAFE_KL, 1.0)) if size > SAFE_UPDATE else 1.0
        return Seen(
            size / SAFE_UPDATE * weight, f"one update changes the weights by {size:.2%} of their size", supports
        )
    return Seen(kl / SAFE_KL, f"the updates of one batch move the policy by a KL of {kl:.2g}", supports)


def _third_of_the_rate(case: Case) -> tuple[str, ...]:
    rate = case.setting("learner.optimizer.lr", max(case.values("actor/lr"), default=None))
    return () if rate is None else (f"learner.optimizer.lr={rate / 3:.3g}",)


def _updates(case: Case) -> Seen | None:
    updates, kl = int(case.setting("batch.minibatches", 1)), case.first(KL) or 0.0
    weight = math.sqrt(max(kl / SAFE_KL, 1.0)) if updates > 1 else 0.0
    supports = (f"{KL} is {kl:.2g} in the first steps",)
    return Seen(updates / SAFE_UPDATES * weight, f"a batch is used for {updates} updates", supports)


def _clip(case: Case) -> Seen | None:
    term = case.setting("objective.policy_term", {})
    if not isinstance(term, Mapping) or term.get("name") != "ppo_clip" or case.setting("batch.minibatches", 1) == 1:
        return None  # with one update a batch nothing is clipped
    widest = max(float(term.get("clip_low", 0.2)), float(term.get("clip_high", 0.28)))
    return Seen(widest / SAFE_CLIP, f"ratios may move by {widest:g} before they are clipped")


def _staleness(case: Case) -> Seen | None:
    ages = case.values("rollout/staleness_mean")
    steps = float(case.setting("rollout.max_staleness", max(ages, default=0)))
    measured = f"{max(ages):.2g} on average at most" if ages else "not measured"
    text = f"responses are sampled from weights up to {steps:g} steps old ({measured})"
    return Seen(steps / SAFE_STALENESS, text)


def _mismatch(case: Case) -> Seen | None:
    """Mismatch above what the types explain."""
    bound = next((rule.above for rule in level_rules(case.recipe) if rule.name == "mismatch-contract"), None)
    rho = case.first(RHO)
    if not bound or rho is None:
        return None
    text = f"{RHO} is {rho:.2g} in the first steps, and the types of both engines explain {bound:g}: other weights or "
    return Seen(min(rho / bound, STRONGEST), f"{text}log-probs that are made another way", always=True)


def _rounding(case: Case) -> Seen | None:
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
    return Seen(rho / SAFE_RHO, text, test=test)


def _dose(case: Case) -> Seen | None:
    noise, rho = case.setting("exact.noise"), case.first(RHO)
    if not isinstance(noise, Mapping) or rho is None:
        return None
    return Seen(rho / SAFE_RHO, f"{RHO} is {rho:.2g} in the first steps, by a dose of the kind {noise.get('kind')}")


def _overflow(case: Case) -> Seen | None:
    skipped = case.values("actor/update_skipped")
    share = sum(skipped) / len(skipped) if skipped else 0.0
    return Seen(share / SAFE_SKIPPED, f"{share:.0%} of the updates were skipped for infinite gradients")


def _reward(case: Case) -> Seen | None:
    """A reward that changes while the policy does not, or that is the same for every response."""
    signal = case.values("groups/no_signal_frac")[:3]
    if signal and median(signal) > 0.9 and not _copies(case):
        return Seen(median(signal) / 0.1, f"from the start all rewards are equal in {median(signal):.0%} of the groups")
    if not case.is_explained and (first := case.first_step) and first.metric in (REWARD, HELD_OUT):
        return Seen(JUMP * JUMP, f"{_in_both(first)}: judge or answers", always=True, own=first)
    rows = [r for r in case.until_sign if math.isfinite(r.get(REWARD, math.nan))]
    fall, at = largest_fall([float(r[REWARD]) for r in rows])
    if fall <= 0:
        return None
    moved = {name: share_moved(rows, at, name) for name in (ENTROPY, LENGTH)}
    most = max(moved.values())  # NaN where it was not measured
    said = ", ".join(f"{name} by {share:.0%}" for name, share in moved.items() if math.isfinite(share))
    supports = (f"the policy is the same there: {said} from one step to the next",) if most < 0.1 else ()
    against = ("updates are large: these may lose it as fast",) * case.updates_are_large
    weight = (2.0 if supports else 1.0) * 0.25 ** len(against) * (1.0 if fall > 0.5 else 0.5)
    step = int(rows[at]["step"])
    levels = (median(float(r[REWARD]) for r in part) for part in (rows[at - 3 : at], rows[at:]))
    own = Change(REWARD, step, *levels, fall / SAFE_FALL)
    if (left := case.departed(REWARD, DOWN)) is not None and left.at_once:
        own, weight = max(own, left, key=lambda change: change.margin), max(weight, OPEN * SAFE_FALL / fall)
    text = f"{fall:.0%} of the reward is lost at step {step}, from one step to the next"
    name, same = (
        ("reward or prompts", ", by the same policy: judge, answers or prompts are others") if supports else ("", "")
    )
    return Seen(fall / SAFE_FALL * weight, text + same, supports, against, always=True, own=own, name=name)


def _copies(case: Case) -> Seen | None:
    """Groups that differ in what they earn, while all responses of each earn the same from the first step on."""
    silent = case.values("groups/no_signal_frac", case.sign)
    if case.sign is not None and silent and median(silent[:3]) <= 0.9 and min(silent[-SILENT:]) > 0.999:
        return Seen(OPEN, f"all rewards are equal in each of the groups of the last {SILENT} records", always=True)
    parts = [case.values(f"groups/{name}_frac")[:3] for name in ("all_solved", "none_solved")]
    solved, unsolved = (median(part) if part else 0.0 for part in parts)
    if min(solved, unsolved) < SAFE_COPIES or solved + unsolved < 0.999:
        return None
    text = f"from the start all responses earn in {solved:.0%} of the groups, and none in the others: responses of a "
    text += "group are copies (seed, temperature), or the reward is one of prompts"
    return Seen(min(solved, unsolved) / SAFE_COPIES, text, always=True)


def _goes(change: Change) -> str:
    return f"{change.metric} goes from {two(change.before)} to {two(change.after)} at step {change.step}"


def _in_both(first: Change) -> str:
    both = f"{first.metric} is {two(first.after)} in the first step, and {two(first.before)} in the other run"
    return f"{both}, before anything was learned"


def _data(case: Case) -> Seen | None:
    """Training answers that are harder to meet than the held-out ones, by the same policy, or that teach other ones."""
    step, fell = learned_by_heart(case.until_sign), case.departed(HELD_OUT, DOWN)
    own = fell or (None if step is None else Change(HELD_OUT, step, 1.0, 0.0))
    if own is not None and (step is not None or not case.departed(REWARD, DOWN)):
        text = f"from step {own.step} on the held-out reward falls, and the training reward does not: the training set "
        text += "is learned by heart or has other answers, or validation is another"
        return Seen(OPEN, text, always=True, own=own, name="data or validation")
    held_out = case.values("val/reward/mean")[:1]
    trained = (case.values("critic/score/mean") or case.values(REWARD))[:3]
    if not held_out or not trained or min(*held_out, *trained) < 0:  # two scales: a ratio means nothing
        return None
    gap = (held_out[0] + 0.01) / (sum(trained) / len(trained) + 0.01)
    text = f"the first policy earns {held_out[0]:.2g} on held-out prompts and {median(trained):.2g} on training prompts"
    return Seen((gap / SAFE_GAP) ** 2, text)


def _objective(case: Case) -> Seen | None:
    """A policy or reward that goes elsewhere by and by, or an update that is another."""
    moved = [case.departed(REWARD, DOWN), case.departed(HELD_OUT, DOWN), case.departed(ENTROPY)]
    moved += [case.departed(metric, UP) for metric in ("actor/grad_norm", UPDATE, KL)]
    at_once = {REWARD: moved[0] and moved[0].is_jump, ENTROPY: moved[2] and moved[2].at_once and case.samples_moved}
    own = (change for change in moved if change is not None and (case.is_sparse or not at_once.get(change.metric)))
    first = min(own, key=lambda change: (change.step, change.stage), default=None)
    is_large = (case.at_the_highest_rate(UPDATE) or 0.0) > SAFE_UPDATE
    if first is None or case.is_explained or (is_large and first.metric != UPDATE) or case.upstream(first):
        return None
    if first.metric == UPDATE and _over_adam(case)[0] > 1:
        return None
    text = f"{_goes(first)}: updates push elsewhere or are larger at the same rate "
    text += "(loss, advantages, optimizer, answers, a judge that drifts)"
    return Seen(OPEN, text, always=True, own=first)


def _length(case: Case) -> Seen | None:
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
    left = [change for change in case.changes if change.metric in (CUT, LENGTH)]
    own = next((change for change in left if change.is_jump), next(iter(left), None))
    return Seen(excess, text, test=test, always=True, own=own)


def _temperature(case: Case) -> Seen | None:
    value = float(case.setting("rollout.temperature", 1.0))
    off = max(value, 1 / value) if value > 0 else math.inf
    return Seen(off * off / SAFE_TEMPERATURE, f"responses are sampled at temperature {value:g}")


def _routing(case: Case) -> Seen | None:
    flips = 1 - (case.first("router/agree_frac") or 1.0)
    return Seen(flips / SAFE_FLIPS, f"both engines choose other experts in {flips:.1%} of the rows")


def _jump(case: Case) -> Seen | None:
    """A policy that is another from one step to the next, though its updates are small, or before any update."""
    if not case.is_explained and (first := case.first_step):
        return Seen(JUMP * JUMP, f"{_in_both(first)}: weights or prompts", always=True, own=first)
    moved = (case.departed(ENTROPY), None if case.departed(CUT) else case.departed(LENGTH))
    change = next((change for change in moved if change is not None and change.at_once), None)
    fell = _reward(case)
    if change is None and fell and fell.own and fell.excess > 1 and not (fell.supports or case.upstream(fell.own)):
        change = fell.own  # the policy is not quite the same
    is_large = (case.first(UPDATE) or 0.0) > SAFE_UPDATE
    if change is None or is_large or case.is_explained:
        return None
    text = f"the policy may be another: {_goes(change)}, with updates as before: weights that were loaded, "
    text += "restored or damaged, or prompts"
    return Seen(max(change.margin, OPEN), text, always=True, own=change)


PARITY = (
    "`rollout.verify_refit: true` compares the engine's weights after each refit; `megatron-rl parity RUN` its "
    "operators with the learner's; `megatron-rl batch attribute RUN --step {step}` the scores of a recorded batch. "
    "Weights that are no longer sent make it grow with every update; a wrong tensor or wrong scoring comes at once"
)


@dataclass(frozen=True)
class Cause:
    """A row of the table. ``measures``: metrics whose departure is this cause's own, ``told`` with it. ``hides``: the
    cause that looks the same where its measures are not in the log. ``setting``: the measure that somebody sets: the
    others follow other causes, too, where it is known to be as before.
    """

    name: str
    keys: str
    constant: Callable[[Case], Seen | None] | None
    test: tuple[str, ...] | Callable[[Case], tuple[str, ...]] = ()
    measures: tuple[str, ...] = ()
    told: str = ""
    apart: str = ""
    hides: str = ""
    setting: str = ""


BF16, SKIPPED = ("learner.dtype=bf16", "rollout.dtype=bf16"), "updates are skipped for infinite gradients"
RATES = ((UPDATE, "actor/lr", KL), "updates are too large")
# What is seen of a cause, what speaks for it, and what undoes it or tells it from its neighbours.
CAUSES = (
    Cause("learning rate", "learner.optimizer.lr schedule", _rate, _third_of_the_rate, *RATES, setting="actor/lr"),
    Cause(
        "optimizer",
        "learner.optimizer",
        _optimizer,
        lambda case: ("learner.optimizer.weight_decay=0",) if case.setting("learner.optimizer.weight_decay") else (),
        apart="`megatron-rl batch replay RUN --step {step}` makes this update again, from an older optimizer state",
    ),
    Cause("updates a batch", "batch.minibatches", _updates, ("batch.minibatches=1",)),
    Cause("clip range", "objective.policy_term", _clip, ("objective.policy_term=ppo_clip",)),
    Cause(
        "staleness",
        "rollout.max_staleness",
        _staleness,
        ("rollout.max_staleness=0",),
        ("rollout/staleness_mean",),
        "older weights sample",
    ),
    Cause(
        "mismatch",
        "rollout precision routing",
        _mismatch,
        ("rollout.engine=exact",),
        (RHO,),
        "engine and learner no longer agree: the engine has other weights (old, or a wrong tensor), or its "
        "log-probs are made another way than the samples (temperature, top-p), or responses stand under other prompts",
        PARITY,
    ),
    Cause("rounding", "rollout.quantization learner.dtype rollout.dtype", _rounding),
    Cause("dose of mismatch", "exact.noise", _dose, ("exact.noise=null",)),
    Cause("overflow", "learner.dtype learner.loss_scale", _overflow, BF16, ("actor/update_skipped",), SKIPPED),
    Cause(
        "reward",
        "reward.name data.train data.prompt",
        _reward,
        ("reward.name=…",),
        FAILURES,
        "its function or judge fails",
        apart="`megatron-rl run samples RUN` shows prompts, responses and what they earned: right answers that earn "
        "nothing, or questions that nobody asked. Where `val/reward/mean` stays, it is answers or prompts of training",
        hides="mismatch",
    ),
    Cause(
        "objective or reward",
        "objective reward.name data.train",
        _objective,
        apart="`megatron-rl run samples RUN` shows whether right answers earn more (judge, answers); `megatron-rl "
        "batch replay RUN --step {step}` makes the update again: the right answers of its batch must become likelier",
        hides="mismatch",
    ),
    Cause("data", "data validation", _data, ("data.train=…",)),
    Cause("length", "rollout.max_response_length rollout.stop_token_ids reward", _length),
    Cause("temperature", "rollout.temperature", _temperature, ("rollout.temperature=1",)),
    Cause("routing", "routing.replay", _routing, ("routing.replay=r3",), ("router/agree_frac",), "engines route apart"),
    Cause(
        "other weights or prompts",
        "model.path data.prompt data.train",
        _jump,
        apart="`megatron-rl eval RECIPE --checkpoint` before and after it: lower means weights, equal prompts",
    ),
    Cause(
        "no signal",
        "data.train batch.filter_groups rollout.num_samples rollout.seed reward.name",
        _copies,
        ("batch.filter_groups=true",),
        ("groups/no_signal_frac",),
        "all responses to a prompt earn the same: nothing is left to learn from",
    ),
)


def suspects(case: Case) -> list[Suspect]:
    """The causes that the run suspects, the likeliest first: see the head of this file for the rule."""
    found = [suspect for cause in CAUSES if (suspect := _suspect(cause, case)) is not None]
    found = [_placed(suspect, suspect.own and case.upstream(suspect.own)) for suspect in found]
    firsts = [suspect.own for suspect in found if suspect.own and not suspect.is_last and suspect.own.at_once]
    may_jump = case.updates_are_large
    others = (c for c in firsts if not may_jump and (c.is_jump or FOREIGN < c.stage < FALLS))
    first = next((c for c in firsts if c.is_foreign), next(others, None))
    lines: list[Suspect] = []
    for suspect in by_rank(suspect if suspect.own else _placed(suspect, first) for suspect in found):
        twin = next((line for line in lines if _are_one(case, line, suspect)), None)
        lines = [line for line in lines if line is not twin] + [together(twin, suspect) if twin else suspect]
    ranked = by_rank(lines)
    one, other = (*ranked, None, None)[:2]
    if other and not (other.is_last or may_jump) and (one.own is None) != (other.own is None):
        is_alone = one.excess > STRONG and (one.own or other.own).stage > FOREIGN
        ranked[:2] = [one, other] if is_alone else [together(one, other)]
    return ranked


def _are_one(case: Case, one: Suspect, other: Suspect) -> bool:
    """Whether metrics do not tell two suspects apart: they depart together, in one stage of a step."""
    if one.is_last or other.is_last or not (one.own and other.own):
        return False
    return one.own.stage == other.own.stage and abs(case.between(one.own, other.own)) <= AFTER


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


def _suspect(cause: Cause, case: Case) -> Suspect | None:
    seen, keys = cause.constant and cause.constant(case), tuple(cause.keys.split())
    test = cause.test(case) if callable(cause.test) else cause.test
    is_changed = any(key.startswith(own) or own.startswith(key) for key in case.changed for own in keys)
    # What was as high before a change of something else did no harm then.
    if seen is not None and not (seen.excess > 1 and (seen.always or is_changed or not case.changed)):
        seen = None
    moved = [c for measure in cause.measures if (c := case.departed(measure, DIRECTIONS[measure])) is not None]
    if cause.setting and case.values(cause.setting) and cause.setting not in {change.metric for change in moved}:
        moved = []
    if moved:
        first = min(moved, key=lambda change: change.step)
        text = f"{cause.told}: {_goes(first)}"
        supports = tuple(f"{c.metric}: {two(c.before)} → {two(c.after)} at step {c.step}" for c in moved if c != first)
        excess = max(min(first.margin, STRONGEST), seen.excess if seen else 0.0)
        supports += seen.supports if seen else ()
        apart = cause.apart.replace("{step}", str(first.step))
        own = min(moved, key=lambda change: change.stage)
        return Suspect(cause.name, keys, text, excess, supports, (), test, apart, own, causes=(cause.name,))
    if seen is None:
        return None
    causes, supports = (cause.name,), seen.supports if seen.always else (*seen.supports, "by a constant of tiny models")
    for other in CAUSES:
        if other.name == cause.hides and not any(map(case.values, other.measures)):
            causes, keys = (cause.name, other.name), (*keys, *other.keys.split())
            supports += (f"{' and '.join(other.measures)} is not measured, and {other.told} would look the same",)
    apart = cause.apart.replace("{step}", str(seen.own.step if seen.own else case.sign))
    told = (seen.text, seen.excess, supports, seen.contradicts, seen.test or test, apart, seen.own)
    return Suspect(" or ".join((seen.name or cause.name, *causes[1:])), keys, *told, causes=causes)
