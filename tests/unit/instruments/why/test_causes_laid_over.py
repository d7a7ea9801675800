"""Faults laid over the curves of healthy runs: which suspect stands first.

`python -m tests.unit.instruments.why.test_causes_laid_over` has every second healthy run, in all `CONTEXTS`. The
constants of `why` were set on the half "set"; the other half has other runs, sizes and steps.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

from megatron_rl.instruments.why.changed import Event
from megatron_rl.instruments.why.onset import Finding, find
from megatron_rl.monitor.alarms import RecordedRun, read_packed
from tests.support.tiny import REPOSITORY

NAMES = {
    "reward": ("critic/rewards/mean", "critic/score/mean", "val/reward/mean"),
    "trained": ("critic/rewards/mean", "critic/score/mean"),
    "held out": ("val/reward/mean",),
    "entropy": ("actor/entropy",),
    "length": ("response_length/mean",),
    "gradient": ("actor/grad_norm",),
    "size": ("noise/relative_update", "noise/update_rms"),
    "rate": ("actor/lr",),
}
SHARES = {
    "rho": "mismatch/rho_std",
    "cut": "response_length/clip_ratio",
    "signal": "groups/no_signal_frac",
    "skipped": "actor/update_skipped",
    "unscored": "reward/unscored_frac",
    "flips": "router/agree_frac",
}
RATE = 2e-4
OBJECTIVE, REWARD, WEIGHTS, JUDGED = (
    ("objective",),
    ("reward",),
    ("other weights", "prompts"),
    ("reward", "other weights"),
)


def down(k, by, least=0.2):
    """A factor that goes down by so much a step."""
    return max(least, 1 - max(0, k) * by)


# ``k`` steps after the fault, of size ``s`` (about 1): what a metric is multiplied by (`NAMES`), or what is added to it
# (`SHARES`); and the suspects of which one should be named. "start": from the first step on, against the healthy run.
FAULTS = {
    # engine, learner
    "engine drifts": (lambda k, s: {"reward": down(k - 6, 0.07 * s, 0.3), "rho": 0.05 * s * k}, ("mismatch",)),
    "engine at once": (lambda k, s: {"reward": 1 - 0.6 * s, "entropy": 1 + s, "rho": s}, ("mismatch",)),
    "engine, late harm": (lambda k, s: {"reward": down(k - 12, 0.06), "rho": 0.6 * s}, ("mismatch",)),
    "engine, every third server": (lambda k, s: {"reward": 1 - 0.2 * s, "rho": 0.7 * s * (k % 3 == 0)}, ("mismatch",)),
    "engine, a quarter of rows": (lambda k, s: {"reward": 1 - 0.15 * s, "rho": 0.4 * s}, ("mismatch",)),
    "learner": (lambda k, s: {"entropy": 1 + 3 * s, "gradient": 1 + 4 * s, "rho": 2 * s}, ("mismatch",)),
    "routes": (lambda k, s: {"reward": down(k - 4, 0.04), "flips": -0.2 * s, "rho": 0.5 * s}, ("mismatch", "routing")),
    "engine from the start": (lambda k, s: {"reward": down(k, 0.04, 0.4), "rho": 1.5 * s}, ("mismatch", "rounding")),
    # prompts, weights
    "prompts": (lambda k, s: {"trained": 1 - 0.6 * s, "entropy": 1 + 0.7 * s, "gradient": 2.5, "signal": 0.3}, WEIGHTS),
    "prompts of all": (lambda k, s: {"reward": 1 - 0.65 * s, "entropy": 1.02, "length": 1.01}, JUDGED),
    "prompts, a quarter": (lambda k, s: {"trained": 1 - 0.35 * s, "entropy": 1 + 0.5 * s}, JUDGED),
    "weights": (
        lambda k, s: {"reward": 1 - 0.8 * s, "entropy": 1 + 1.5 * s, "length": 1.3, "gradient": 2.5, "signal": 0.4},
        WEIGHTS,
    ),
    "weights, back to the start": (
        lambda k, s: {"reward": min(1, 0.5 + 0.02 * k / s), "entropy": max(1, 2.2 - 0.05 * k)},
        WEIGHTS,
    ),
    "harder problems": (
        lambda k, s: {"trained": 1 - 0.6 * s, "entropy": 1.25, "length": 1.15, "signal": 0.2},
        (*JUDGED, "data"),
    ),
    # judge
    "judge": (lambda k, s: {"reward": 1 - 0.6 * s, "gradient": 1.5, "signal": 0.2}, REWARD),
    "judge says no": (lambda k, s: {"reward": 0.02 * s, "gradient": 0.2, "signal": 0.9}, REWARD),
    "judge, a quarter": (lambda k, s: {"reward": 1 - 0.3 * s, "signal": -0.1}, REWARD),
    "judge, every second step": (lambda k, s: {"trained": 1 if k % 2 else 0.3 / s}, REWARD),
    "judge drifts": (lambda k, s: {"reward": down(k, 0.04 * s)}, ("reward", "objective")),
    "judge, later the policy": (
        lambda k, s: {"reward": 1 - 0.55 * s, "entropy": 1.05 ** max(0, k - 5), "gradient": 1.3},
        REWARD,
    ),
    "judge times out": (lambda k, s: {"reward": 1 - 0.5 * s, "unscored": 0.5 * s}, REWARD),
    "answers learned": (
        lambda k, s: {"trained": min(1, 0.4 + 0.03 * k / s), "held out": down(k, 0.05)},
        (*REWARD, "data"),
    ),
    # held-out alone
    "validation": (lambda k, s: {"held out": 1 - 0.5 * s}, ("validation", "data")),
    "validation drifts": (lambda k, s: {"held out": down(k, 0.03 * s)}, ("validation", "data")),
    # cut off
    "limit": (lambda k, s: {"reward": 1 - 0.8 * s, "length": 0.6, "signal": 0.5, "cut": 0.8}, ("length",)),
    "stop token lost": (lambda k, s: {"reward": 1 - 0.85 * s, "length": 1.8, "signal": 0.5, "cut": 0.9}, ("length",)),
    "length paid": (
        lambda k, s: {"reward": down(k - 10, 0.04), "length": min(2, 1 + 0.05 * s * k), "cut": min(0.7, 0.03 * k)},
        ("length",),
    ),
    # updates
    "objective": (
        lambda k, s: {"reward": down(k, 0.05 * s), "entropy": 1 + 0.04 * s * k, "length": 1.02**k},
        OBJECTIVE,
    ),
    "objective, late": (
        lambda k, s: {"reward": down(k - 10, 0.06), "entropy": 1 + 0.03 * s * max(0, k - 8)},
        OBJECTIVE,
    ),
    "objective, entropy falls": (lambda k, s: {"reward": down(k - 8, 0.04), "entropy": 0.9 ** (s * k)}, OBJECTIVE),
    "gradient": (lambda k, s: {"reward": down(k - 4, 0.05), "gradient": 20 * s, "entropy": 1.04**k}, OBJECTIVE),
    "gradient adds up": (
        lambda k, s: {"reward": down(k - 8, 0.05), "gradient": 1 + 0.3 * s * k, "size": min(2, 1 + 0.15 * k)},
        (*OBJECTIVE, "optimizer"),
    ),
    "moments lost": (
        lambda k, s: {"reward": down(k - 1, 0.9, 0.01), "size": 300 * s, "entropy": 1 if k == 0 else 5},
        ("optimizer",),
    ),
    "weight decay": (
        lambda k, s: {"reward": down(k - 3, 0.1), "size": 5 * s, "entropy": 1.06**k},
        ("optimizer",),
    ),
    "rate": (
        lambda k, s: {"reward": down(k, 0.2), "size": 12 * s, "rate": 12 * s, "entropy": 1.06**k, "gradient": 1.5},
        ("learning rate",),
    ),
    "rate by and by": (
        lambda k, s: {"reward": down(k - 12, 0.1), "size": 1 + s * k, "rate": 1 + s * k, "entropy": 1.03**k},
        ("learning rate",),
    ),
    "skipped": (lambda k, s: {"skipped": k % 4 != 0, "size": 0.4, "reward": down(k - 5, 0.04)}, ("overflow",)),
    "signal": (lambda k, s: {"signal": 1.0, "gradient": 0.0}, ("no signal",)),
    # two at once: either, better both
    "engine and judge": (lambda k, s: {"reward": 1 - 0.7 * s, "rho": 0.6 * s}, ("mismatch", "reward")),
    "judge, then engine": (lambda k, s: {"reward": 1 - 0.5 * s, "rho": 0.6 * s * (k > 8)}, ("mismatch", "reward")),
    "a drift, then a judge": (lambda k, s: {"reward": 1 - 0.6 * s, "gradient": 1.6}, REWARD),
    "a drift, then moments": (
        lambda k, s: {"gradient": 1.7, "reward": down(k - 1, 0.9, 0.01), "size": 300, "entropy": 1 if k < 1 else 5},
        ("optimizer",),
    ),
    "a drift, then weights": (
        lambda k, s: {"reward": 1 - 0.7 * s, "entropy": 2.5 if k >= 0 else 1 - 0.012 * (k + 12), "gradient": 1.8},
        WEIGHTS,
    ),
}
CONTEXTS = ("plain", "every ten", "resumed", "harmless")  # "harmless": a recipe change nine steps before the fault
PLACES = ("first", "second", "none", "false", "well")  # "well": no rule went off, "false": another one stands first


def faulty(record, after, fault, size, drifts):
    """A record of a step ``after`` the fault. ``drifts``: its gradient or entropy does so in the 12 steps before."""
    record = dict(record) | {"actor/lr": RATE}
    if "noise/relative_update" in record:
        record["noise/update_rms"] = record["noise/relative_update"] * RATE / 2e-3
    values = fault(min(after, 30), size) if after >= -12 * drifts else {}
    if after < 0:
        values = {name: value for name, value in values.items() if name in ("gradient", "entropy")}
    for name, value in values.items():
        if name in SHARES:
            metric, added = SHARES[name], value * (1 + 0.1 * (after % 3))
            old = record.get(metric, float(name == "flips"))
            record[metric] = math.hypot(old, added) if name == "rho" else min(1.0, max(0.0, old + value))
        else:
            record |= {metric: record[metric] * value for metric in NAMES[name] if metric in record}
    return record


def laid(run: RecordedRun, at: int, name: str, size: float, context: str) -> Finding:
    """What `why` finds in a run with a fault."""
    factor = 10 if context == "every ten" else 1
    fault, drifts = FAULTS[name][0], name.startswith("a drift")
    rows = [
        faulty(record, (int(record["step"]) - at) * factor, fault, size, drifts) | {"step": record["step"] * factor}
        for record in run.records
    ]
    history = {
        "resumed": [
            Event(at - 4, "resume", "resumed", weight="none"),
            Event(at - 4, "environment", "hardware.host", "a", "b", "weak"),
        ],
        "harmless": [Event(at - 9, "recipe", "objective.entropy_bonus", 0.0, 1e-5)],
    }
    return find(run.name, rows, run.recipe, history.get(context, ()))


def place(finding: Finding, causes: tuple[str, ...]) -> str:
    """Where one of the causes stands in it."""
    if finding.is_healthy or not finding.suspects:
        return "well" if finding.is_healthy else "none"
    named = [set(suspect.name.split(" or ")) for suspect in finding.suspects[:2]]
    fits = [not line.isdisjoint(causes) for line in named]
    return "first" if fits[0] else "second" if fits[-1] else "false"


def places(half: str, contexts: tuple[str, ...] = CONTEXTS, every: int = 1) -> Counter:
    """How often the cause has which of `PLACES`; by fault and context."""
    runs = [run for run in healthy() if run.half == half][::every]
    sizes = ((20, 1.0), (33, 1.0)) if half == "set" else ((26, 0.75), (40, 1.2))
    return Counter(
        (name, context, place(laid(run, at, name, size, context), FAULTS[name][1]))
        for name, run, (at, size), context in product(FAULTS, runs, sizes, contexts)
    )


def healthy() -> list[RecordedRun]:
    return [run for run in read_packed(REPOSITORY / "docs" / "lab" / "unstable.jsonl.xz") if not run.cause]


def counts(found: Counter, **wanted: str) -> list[int]:
    """The numbers of `PLACES` of a fault, or in a context."""
    rows = [(dict(zip(("fault", "context", "place"), key, strict=True)), count) for key, count in found.items()]
    rows = [(row["place"], count) for row, count in rows if wanted.items() <= row.items()]
    return [sum(count for place, count in rows if place == name) for name in PLACES]


def test_a_fault_laid_over_a_healthy_run_is_named_first():
    first, second, none, false, _ = counts(places("set", every=13))
    sick = first + second + none + false
    assert (first >= 0.9 * sick, second + false <= 0.1 * sick) == (True, True), (first, second, none, false)


if __name__ == "__main__":
    for half in ("set", "judge"):
        found = places(half, every=2)
        print(f"{half:28}", *(f"{name:>6}" for name in PLACES))
        wanted = [{"fault": name} for name in FAULTS] + [{"context": name} for name in CONTEXTS] + [{}]
        for row in wanted:
            print(f"{next(iter(row.values()), 'all'):28}", *(f"{num:6}" for num in counts(found, **row)))
