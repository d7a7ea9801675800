"""The planted causes of tools/dev/branch_table.py: what each changes, the arm that undoes it, and two others.

A smaller rate slows all harm that is learned: `third-rate` is among the others only where the harm comes at once, or
where a third of the rate must not be enough. Values and seeds are others than those of tools/dev/unstable_runs.py.
Reward workers import this file for its rewards.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

AT = 10
SEED = 20
BRANCH_STEPS = 16
FIXED = (
    *("rollout.num_samples=4", "validation.every=5", "validation.limit=64", "reward.num_workers=1"),
    *("checkpoint.every=5", "checkpoint.keep_last=30", "monitor.samples.every=0"),
    *("monitor.tensorboard=false", "monitor.plots=false", "monitor.alarms=[]"),  # no alarm of a recipe ends the run
)


def _reward(function: str) -> str:
    return f"reward.name={Path(__file__).resolve()}:{function}"


@dataclass(frozen=True)
class Case:
    """One planted cause.

    ``suspect``: its name in `run why`. ``healthy``: set from the start; ``planted``: from step ``at`` on. ``cure``: the
    arm of `run branch` that undoes it; ``own``: what this arm sets if it is not one of the command's. ``others``: arms
    that undo something else. ``outcome``: "" for the command's choice. ``seed``: of what a run draws.
    """

    suspect: str
    recipe: str
    healthy: tuple[str, ...]
    planted: tuple[str, ...]
    cure: str
    others: tuple[str, ...]
    at: int = AT
    own: tuple[str, ...] = ()
    outcome: str = ""
    steps: int = BRANCH_STEPS
    seed: int = SEED


_LR, _UPDATES, _TEMPERATURE = "learner.optimizer.lr={}", "batch.minibatches={}", "rollout.temperature={}"
_FP16 = ("learner.dtype=fp16", "rollout.dtype=fp16")
_OPEN = ("objective.policy_term.clip_low=0.95", "objective.policy_term.clip_high=10")
_NEUTRAL = ("tis", "other-data-order")

CASES = {
    "rate-grpo": Case("learning rate", "grpo", (), (_LR.format("1.2e-3"),), "third-rate", _NEUTRAL),
    "reward-off-by-five": Case(
        "reward",
        "grpo",
        (_LR.format("2e-4"),),
        (_reward("off_by_five"),),
        "right-reward",
        ("third-rate", "other-data-order"),
        own=("reward.name=modsum",),
    ),
    "temperature-hot": Case(
        "temperature", "grpo", (), (_TEMPERATURE.format(1.9),), "usual-temperature", ("third-rate", "tis")
    ),
    "updates-16": Case(
        "updates a batch",
        "grpo",
        (_LR.format("5e-4"),),
        (_UPDATES.format(16),),
        "one-update",
        ("third-rate", "other-data-order"),
    ),
    "fp16-growth": Case(
        "overflow",
        "grpo",
        (*_FP16, _UPDATES.format(4)),
        ("learner.loss_scale.growth_interval=1", "learner.loss_scale.backoff_factor=0.9"),
        "bf16",
        ("third-rate", "other-data-order"),
        at=0,  # the scale needs thirty updates to grow too large
        outcome="actor/update_skipped",
        steps=24,
    ),
    "dose-logits": Case(
        "dose of mismatch",
        "exact",
        (),
        ("exact.noise={kind: logits, std: 4}",),
        "no-dose",
        ("third-rate", "tis"),
        at=5,  # `run why` takes the mismatch of the first ten steps
    ),
    "data-plus-three": Case(
        "data",
        "grpo",
        (_LR.format("3e-4"),),
        ("data.train={out}/plus_three.jsonl",),
        "right-data",
        _NEUTRAL,
        at=0,  # `run why` compares the first policy's reward on both sets
        own=("data.train={data}/train.jsonl",),
        outcome="val/reward/mean",
        steps=24,
    ),
    "length-paid": Case(
        "length",
        "grpo",
        (_LR.format("3e-4"),),
        (_reward("right_and_long"),),
        "overlong-penalty",
        _NEUTRAL,
        outcome="response_length/clip_ratio",
        steps=26,  # lengths grow from the tenth of these on
    ),
    "rounding-int4-whole": Case(
        "rounding",
        "grpo",
        (_LR.format("3e-4"), _UPDATES.format(4)),
        ("rollout.quantization.weights=int4", "rollout.quantization.block=[null, null]"),
        "unrounded",
        ("third-rate", "other-data-order"),
        at=0,  # `run why` takes the mismatch of the first step
        steps=24,
    ),
    "clip-open": Case(
        "clip range",
        "grpo",
        (_LR.format("2.5e-4"), _UPDATES.format(8)),
        _OPEN,
        "usual-clip",
        ("tis", "other-data-order"),
    ),
    "rate-gspo": Case(
        "learning rate", "gspo", (_UPDATES.format(2),), (_LR.format("1.5e-3"),), "third-rate", ("one-update", "tis")
    ),
    "rate-fp8": Case(
        "learning rate", "fp8", (), (_LR.format("1.4e-3"),), "third-rate", ("unrounded", "other-data-order")
    ),
    "temperature-cold": Case(
        "temperature", "gspo", (), (_TEMPERATURE.format(0.15),), "usual-temperature", ("third-rate", "one-update")
    ),
    "reward-unmarked": Case(
        "reward",
        "gspo",
        (),
        (_reward("unmarked"),),
        "right-reward",
        ("third-rate", "one-update"),
        own=("reward.name=modsum",),
    ),
    "updates-gspo": Case(
        "updates a batch",
        "gspo",
        (_LR.format("5e-4"), _UPDATES.format(1)),
        (_UPDATES.format(16),),
        "one-update",
        _NEUTRAL,
    ),
    "rate-warm-up": Case(
        "learning rate",
        "grpo",
        (),
        (_LR.format("1.8e-3"), "schedule.warmup_steps=12"),
        "third-rate",
        _NEUTRAL,
        at=0,  # the rate rises with every step
        steps=24,
    ),
    "dose-hidden": Case(
        "dose of mismatch",
        "exact",
        (),
        ("exact.noise={kind: hidden, std: 0.6}",),
        "no-dose",
        ("third-rate", "other-data-order"),
        at=5,
    ),
    "data-all-seven": Case(
        "data",
        "gspo",
        (),
        ("data.train={out}/all_seven.jsonl",),
        "right-data",
        _NEUTRAL,
        at=0,
        own=("data.train={data}/train.jsonl",),
        outcome="val/reward/mean",
        steps=24,
    ),
    "dose-router": Case(
        "dose of mismatch",
        "exact",
        (),
        ("exact.noise={kind: router, std: 4}",),
        "no-dose",
        ("third-rate", "other-data-order"),
        at=5,
    ),
    "temperature-hot-r3": Case(
        "temperature", "r3", (), (_TEMPERATURE.format(1.75),), "usual-temperature", ("third-rate", "other-data-order")
    ),
    "reward-off-by-two": Case(
        "reward",
        "fp8",
        (_LR.format("2e-4"),),
        (_reward("off_by_two"),),
        "right-reward",
        ("third-rate", "unrounded"),
        own=("reward.name=modsum",),
    ),
    "rate-r3": Case("learning rate", "r3", (), (_LR.format("1.6e-3"),), "third-rate", _NEUTRAL),
    "fp16-growth-gspo": Case(
        "overflow",
        "gspo",
        _FP16,
        ("learner.loss_scale.growth_interval=2", "learner.loss_scale.backoff_factor=0.95"),
        "bf16",
        ("third-rate", "tis"),
        at=0,
        outcome="actor/update_skipped",
        steps=32,
    ),
    "updates-fp8": Case(
        "updates a batch",
        "fp8",
        (_LR.format("4.5e-4"),),
        (_UPDATES.format(16),),
        "one-update",
        ("unrounded", "other-data-order"),
        steps=20,  # the rate is less than that of the other two
        seed=31,
    ),
    "rate-exact": Case("learning rate", "exact", (), (_LR.format("1.7e-3"),), "third-rate", _NEUTRAL, seed=32),
    "limit-8": Case(
        "length",
        "rounded",
        (),
        ("rollout.max_response_length=8",),
        "longer-limit",
        ("third-rate", "tis"),
        own=("rollout.max_response_length=24",),
        seed=33,
    ),
    "temperature-hot-gspo": Case(
        "temperature",
        "gspo",
        (),
        (_TEMPERATURE.format(1.8),),
        "usual-temperature",
        ("third-rate", "one-update"),
        seed=34,
    ),
    "data-last-digit": Case(
        "data",
        "r3",
        (_LR.format("3e-4"),),
        ("data.train={out}/last_digit.jsonl",),
        "right-data",
        _NEUTRAL,
        at=0,
        own=("data.train={data}/train.jsonl",),
        outcome="val/reward/mean",
        steps=24,
        seed=35,
    ),
    "reward-only-zeros": Case(
        "reward",
        "kept",
        (),
        (_reward("only_zeros"),),
        "right-reward",
        ("third-rate", "one-update"),
        own=("reward.name=modsum",),
        seed=36,
    ),
    "dose-frozen": Case(
        "dose of mismatch",
        "exact",
        (),
        ("exact.noise={kind: frozen, std: 3}",),
        "no-dose",
        ("third-rate", "tis"),
        at=5,
        seed=37,
    ),
}

RESERVES = {
    "fp16-growth-fipo": Case(
        "overflow",
        "fipo",
        (*_FP16, "learner.loss_scale.initial=1e9"),
        ("learner.loss_scale.growth_interval=2", "learner.loss_scale.backoff_factor=0.9"),
        "bf16",
        ("third-rate", "other-data-order"),
        at=0,
        outcome="actor/update_skipped",
        steps=24,
        seed=38,
    ),
    "rate-kept": Case("learning rate", "kept", (), (_LR.format("1.35e-3"),), "third-rate", _NEUTRAL, seed=39),
    "length-paid-gspo": Case(
        "length",
        "gspo",
        (_LR.format("2.5e-4"),),
        (_reward("right_or_long"),),
        "overlong-penalty",
        _NEUTRAL,
        outcome="response_length/clip_ratio",
        steps=26,
        seed=40,
    ),
}
"""Each takes the place of one of `WRITTEN_BEFORE` that does no harm, in this order."""

WRITTEN_BEFORE = (
    *("data-all-seven", "dose-router", "temperature-hot-r3", "reward-off-by-two", "rate-r3"),
    *("updates-fp8", "rate-exact", "limit-8", "temperature-hot-gspo", "data-last-digit", "reward-only-zeros"),
    "dose-frozen",
)
"""Twelve cases that were written down before they were run; no rule that judges them was changed afterwards."""


# Rewards that are wrong. They are named by this file's path in a recipe.


def _final(response: str) -> str:
    _, mark, final = response.rpartition("#")
    return final if mark else ""


def off_by_five(response: str, answer: str) -> float:
    return float(_final(response) == str((int(answer) + 5) % 10))


def off_by_two(response: str, answer: str) -> float:
    return float(_final(response) == str((int(answer) + 2) % 10))


def right_and_long(response: str, answer: str) -> float:
    return 0.2 * float(_final(response) == answer) + 0.8 * min(len(response) / 24, 1.0)


def unmarked(response: str, answer: str) -> float:
    return float("#" not in response)


def only_zeros(response: str, answer: str) -> float:
    return float(_final(response) == answer == "0")


def right_or_long(response: str, answer: str) -> float:
    return max(0.4 * float(_final(response) == answer), min(len(response) / 24, 1.0))


def data_folder() -> Path:
    """Where the right data of the tiny recipes lie."""
    return Path("recipes/tiny/data").resolve()


def settings(case: Case, out: Path, *, planted: bool) -> list[str]:
    """What a run of ``case`` sets in its recipe, with the planted cause or without."""
    seeds = [f"{key}={case.seed}" for key in ("seed", "rollout.seed", "data.seed")]
    changes = [*seeds, *FIXED, *case.healthy, *(case.planted if planted else ())]
    return [change.replace("{out}", str(out)) for change in changes]


def arguments_of_branch(case: Case, run: Path, seeds: int, num_jobs: int) -> list[str]:
    """The arguments of `run branch` for ``case``."""
    arms = [*(() if case.own else (case.cure,)), *case.others]
    own = (
        ["--arm", case.cure, *(change.replace("{data}", str(data_folder())) for change in case.own)] if case.own else []
    )
    outcome = ["--outcome", case.outcome] if case.outcome else []
    numbers = {"from": case.at, "steps": case.steps, "seeds": seeds, "jobs": num_jobs}
    options = [part for key, value in numbers.items() for part in (f"--{key}", str(value))]
    return [str(run), *options, "--arms", *arms, *own, *outcome]
