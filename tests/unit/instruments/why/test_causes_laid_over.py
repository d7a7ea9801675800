"""Faults laid over the curves of healthy runs: which suspect stands first.

`python -m tests.unit.instruments.why.test_causes_laid_over` has every second healthy run at three steps.
"""

from __future__ import annotations

from collections import Counter

from megatron_rl.instruments.why.onset import find
from megatron_rl.monitor.alarms import RecordedRun, read_packed
from tests.support.tiny import REPOSITORY

NAMES = {
    "reward": ("critic/rewards/mean", "critic/score/mean", "val/reward/mean"),
    "trained": ("critic/rewards/mean", "critic/score/mean"),
    "entropy": ("actor/entropy",),
    "length": ("response_length/mean",),
    "gradient": ("actor/grad_norm",),
    "size": ("noise/relative_update",),
}


def later(steps, by, least):
    """A factor that goes down by so much a step."""
    return max(least, 1 - max(0, steps) * by)


# What a metric is multiplied by ``k`` steps after the fault, or "=": what it is; and the suspect that should be first.
FAULTS = {
    "engine": (lambda k: {"reward": later(k - 6, 0.07, 0.3), "=mismatch/rho_std": 0.08 + 0.01 * (k % 3)}, "mismatch"),
    "engine at once": (
        lambda k: {"reward": 0.4, "entropy": 1.5, "=mismatch/rho_std": 0.3 + 0.01 * (k % 3)},
        "mismatch",
    ),
    "prompts": (lambda k: {"trained": 0.4, "entropy": 1.7, "gradient": 2.5, "signal": 0.3}, "prompts"),
    "weights": (lambda k: {"reward": 0.2, "entropy": 2.5, "length": 1.3, "gradient": 2.5, "signal": 0.4}, "weights"),
    "judge": (lambda k: {"reward": 0.4, "gradient": 1.5, "signal": 0.2}, "reward"),
    "judge says no": (lambda k: {"reward": 0.02, "gradient": 0.2, "signal": 0.9}, "reward"),
    "limit": (lambda k: {"reward": 0.15, "length": 0.6, "signal": 0.5, "=response_length/clip_ratio": 0.8}, "length"),
    "objective": (lambda k: {"reward": later(k, 0.05, 0.25), "entropy": 1.04**k, "length": 1.02**k}, "objective"),
    "gradient": (lambda k: {"reward": later(k - 4, 0.05, 0.25), "gradient": 20, "entropy": 1.04**k}, "objective"),
    "rate": (
        lambda k: {"reward": later(k, 0.2, 0.2), "size": 12, "entropy": 1.06**k, "gradient": 1.5, "=actor/lr": 3e-3},
        "learning rate",
    ),
    "signal": (lambda k: {"=groups/no_signal_frac": 1.0, "=actor/grad_norm": 0.0}, "no signal"),
}


def faulty(record, after, fault):
    """A record of a step ``after`` the fault."""
    record = dict(record) | {"actor/lr": 2e-4}
    for name, value in fault(min(after, 30)).items() if after >= 0 else ():
        if name == "signal":
            record["groups/no_signal_frac"] = min(1.0, record.get("groups/no_signal_frac", 0.0) + value)
        elif name.startswith("="):
            record[name[1:]] = value
        else:
            record |= {metric: record[metric] * value for metric in NAMES[name] if metric in record}
    return record


def places(runs: list[RecordedRun], steps: tuple[int, ...]) -> Counter:
    """How often the cause is "first", "second", or "false" is what stands first; by fault."""
    found: Counter = Counter()
    for name, (fault, cause) in FAULTS.items():
        for run, at in ((run, at) for run in runs for at in steps):
            rows = [faulty(record, int(record["step"]) - at, fault) for record in run.records]
            named = [suspect.name for suspect in find(run.name, rows, run.recipe).suspects]
            place = next((p for p, told in zip(("first", "second"), named, strict=False) if cause in told), "false")
            found[name, place] += 1
    return found


def healthy() -> list[RecordedRun]:
    return [run for run in read_packed(REPOSITORY / "docs" / "lab" / "unstable.jsonl.xz") if not run.cause]


def test_a_fault_laid_over_a_healthy_run_is_named_first():
    """Where it is not, rounding is that was there from the start, or curves that were not calm before."""
    found = places(healthy()[::4], (33,))
    num_false = sum(count for (_, place), count in found.items() if place == "false")
    first = sum(count for (_, place), count in found.items() if place == "first")
    assert (first >= 0.85 * found.total(), num_false <= 0.1 * found.total()) == (True, True), found


if __name__ == "__main__":
    everything = places(healthy()[::2], (20, 33, 45))
    print(f"{everything.total()} curves")
    print("\n".join(f"{fault}: {place} {count}" for (fault, place), count in sorted(everything.items())))
