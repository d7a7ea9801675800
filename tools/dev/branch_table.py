"""Whether `run why` and `run branch` find a cause that was planted in a run: the table in docs/lab/causes.md.

    python -m tools.dev.branch_table make OUT [CASE …]   # four minutes of one core a case; finished ones are kept
    python -m tools.dev.branch_table pack OUT docs/lab/branch.json
    python -m tools.dev.branch_table table docs/lab/branch.json

A case is a run of a tiny recipe that is healthy until step `Case.at`, where one thing is changed. `run branch` starts
at that step. Its arms are the one that undoes the change, and others that undo something else. A smaller rate slows
all harm that is learned: `third-rate` is among the others only where the harm comes at once, or where a third of the
rate must not be enough.

Values and seeds are others than those of tools/dev/unstable_runs.py. Reward workers import this file for its rewards.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEPS = 30
AT = 10
SEED = 20
SEEDS = (3, 5, 8)  # the next number where the command is undecided: then it asks for more
BRANCH_STEPS = 16
LEVEL = 0.05
FIXED = (
    *(f"{key}={SEED}" for key in ("seed", "rollout.seed", "data.seed")),
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
    that undo something else. ``outcome``: "" for the command's choice.
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
}


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


def make(out: Path, names: list[str], num_jobs: int) -> None:
    """Run the cases of ``names`` (all where it is empty); what is finished stays as it is."""
    out.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in (_data() / "train.jsonl").read_text().splitlines()]
    plus_three = [row | {"answer": str((int(row["answer"]) + 3) % 10)} for row in rows]
    for file, wrong in (("plus_three", plus_three), ("all_seven", [row | {"answer": "7"} for row in rows])):
        (out / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in wrong))
    for name in names or CASES:
        noted = out / f"{name}.json"
        if not noted.exists():
            result = _run(out, name, CASES[name], num_jobs)
            noted.write_text(json.dumps(result, indent=1) + "\n")
            print(_row(name, _short(result)), flush=True)


def _data() -> Path:
    return Path("recipes/tiny/data").resolve()


def settings(case: Case, out: Path, *, planted: bool) -> list[str]:
    """What a run of ``case`` sets in its recipe, with the planted cause or without."""
    changes = [*FIXED, *case.healthy, *(case.planted if planted else ())]
    return [change.replace("{out}", str(out)) for change in changes]


def arguments_of_branch(case: Case, run: Path, seeds: int, num_jobs: int) -> list[str]:
    """The arguments of `run branch` for ``case``."""
    arms = [*(() if case.own else (case.cure,)), *case.others]
    own = ["--arm", case.cure, *(change.replace("{data}", str(_data())) for change in case.own)] if case.own else []
    outcome = ["--outcome", case.outcome] if case.outcome else []
    numbers = {"from": case.at, "steps": case.steps, "seeds": seeds, "jobs": num_jobs}
    options = [part for key, value in numbers.items() for part in (f"--{key}", str(value))]
    return [str(run), *options, "--arms", *arms, *own, *outcome]


def _run(out: Path, name: str, case: Case, num_jobs: int) -> dict[str, Any]:
    run = out / name
    base = [f"recipes/tiny/{case.recipe}.yaml", "--set", f"run_root={out}", "--set", f"name={name}"]
    phases = [(case.at, False)] if case.at and not (run / f"checkpoints/step_{case.at:08}").is_dir() else []
    for steps, planted in (*phases, (max(STEPS, case.at + case.steps), True)):
        sets = [part for change in settings(case, out, planted=planted) for part in ("--set", change)]
        allowed = ["--allow-changes"] if planted else []
        _command(out / f"{name}.log", "train", *base, "--set", f"num_steps={steps}", *sets, *allowed)
    why = json.loads(_command(out / f"{name}.log", "run", "why", str(run), "--json"))
    if why["healthy"]:
        return {"why": why, "branch": None}
    branch = None
    for seeds in SEEDS:
        arguments = arguments_of_branch(case, run, seeds, num_jobs)
        said = _command(out / f"{name}.log", "run", "branch", *arguments, "--json", allowed=(2,))
        if not said:  # nothing is worse, the log says
            break
        branch = json.loads(said)
        if all(arm["verdict"] != "undecided" for arm in branch["arms"]):
            break
    return {"why": why, "branch": branch}


def _command(log: Path, *arguments: str, allowed: tuple[int, ...] = ()) -> str:
    with log.open("a") as errors:
        command = [sys.executable, "-m", "megatron_rl", *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    if done.returncode not in (0, 3, *allowed):  # done, or ended by a limit
        raise SystemExit(f"status {done.returncode}, see {log}: {' '.join(arguments)}")
    return done.stdout


def pack(out: Path, file: Path) -> int:
    """Write what the table needs of all finished cases to ``file``, beside those that it has; the number of all."""
    results = json.loads(file.read_text()) if file.exists() else {}
    noted = {name: out / f"{name}.json" for name in CASES}
    results |= {name: _short(json.loads(path.read_text())) for name, path in noted.items() if path.exists()}
    lines = [f"{json.dumps(name)}: {json.dumps(results[name])}" for name in CASES if name in results]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return len(lines)


def _short(result: Mapping[str, Any]) -> dict[str, Any]:
    """The first two suspects; what was lost; arm → verdict and the share of the loss that it restores; the seeds.

    And where several arms bring it back, those that surely restore less than the best one → p.
    """
    if result["why"]["healthy"]:
        return {"healthy": True}
    branch = result["branch"] or {"outcome": None, "arms": [], "seeds": 0}  # None: nothing was lost
    outcome = branch["outcome"] and {key: _rounded(branch["outcome"][key]) for key in ("metric", "before", "after")}
    arms = {arm["name"]: [arm["verdict"], _rounded(arm["restored"])] for arm in branch["arms"]}
    suspects = [suspect["name"] for suspect in result["why"]["suspects"][:2]]
    short = {"healthy": False, "suspects": suspects, "outcome": outcome, "arms": arms, "seeds": branch["seeds"]}
    pairs = branch.get("contrasts", ())
    less = {pair["other"]: _rounded(pair["p"]) for pair in pairs if pair["p"] < LEVEL and pair["effect"] > 0}
    return short | ({"less": [pairs[0]["arm"], less]} if less else {})


def _rounded(value: Any) -> Any:
    return float(f"{value:.2g}") if isinstance(value, float) else value


def table(file: Path) -> list[str]:
    """A Markdown table of the cases in ``file``, and in the last line how many are right."""
    results = json.loads(file.read_text())
    harmed = {name: result for name, result in results.items() if not result["healthy"]}
    right = [sum(is_right(CASES[name], result)[which] for name, result in harmed.items()) for which in (0, 1, 2)]
    lines = ["| planted | lost | first two suspects | `why` | arms and what they restore | `branch` |"]
    lines += ["|---|---|---|---|---|---|", *(_row(name, result) for name, result in results.items())]
    said = f"`why` is right in {right[0]}, `branch` in {right[1]}, and in {right[2]} if it may restore most"
    return [*lines, "", f"{len(harmed)} became unstable: {said}"]


def is_right(case: Case, result: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    """Whether `run why` has the planted cause among its first two suspects, and whether `run branch` decides for it.

    A decision: the arm that undoes it brings the outcome back, and every other arm does not. "undecided" is none. The
    last value counts one as well where another arm brings back surely less.
    """
    verdicts = {name: verdict for name, (verdict, _) in result["arms"].items()}
    best, less = result.get("less", ("", {}))
    decided = verdicts.get(case.cure) == "brings it back"
    against = [verdicts.get(name) in ("does not", "makes it worse") for name in case.others]
    beaten = [best == case.cure and name in less for name in case.others]
    most = all(either or other for either, other in zip(against, beaten, strict=True))
    return case.suspect in result["suspects"], decided and all(against), decided and most


def _row(name: str, result: Mapping[str, Any]) -> str:
    case = CASES[name]
    at = f" from step {case.at}" if case.at else ""
    planted = f"{case.suspect}: " + ", ".join(f"`{_told(change)}`" for change in case.planted) + at
    if result["healthy"]:
        return f"| {planted} | nothing | none | unharmed | | |"
    suspected, decided, most = is_right(case, result)
    lost, word = result["outcome"], "yes" if decided else "restores most" if most else "no"
    outcome = "nothing" if lost is None else f"`{lost['metric']}` {lost['before']:g} → {lost['after']:g}"
    arms = "; ".join(_arm(arm, verdict, restored) for arm, (verdict, restored) in result["arms"].items())
    best, less = result.get("less", ("", {}))
    arms += "".join(f"; `{best}` more than `{other}`, p {p:g}" for other, p in less.items())
    arms += f"; {result['seeds']} seeds" if result["seeds"] > SEEDS[0] else ""
    suspects = ", ".join(result["suspects"]) or "none"
    return f"| {planted} | {outcome} | {suspects} | {'yes' if suspected else 'no'} | {arms} | {word} |"


def _arm(name: str, verdict: str, restored: float | None) -> str:
    share = "" if restored is None else f" {round(restored, 2) + 0.0:.0%}"
    told = f"`{name}`{share}" + (", undecided" if verdict == "undecided" else "")
    return f"**{told}**" if verdict == "brings it back" else told


def _told(change: str) -> str:
    key, _, value = change.partition("=")
    short = value.rpartition(":")[2] if key == "reward.name" else value.rpartition("/")[2]
    return f"{key}={short}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("out", type=Path)
    making.add_argument("names", nargs="*", metavar="CASE", choices=[[], *CASES])
    making.add_argument("--jobs", type=int, default=2, metavar="N", help="arms at a time")
    packing = commands.add_parser("pack")
    packing.add_argument("out", type=Path)
    packing.add_argument("file", type=Path)
    showing = commands.add_parser("table")
    showing.add_argument("file", type=Path)
    options = parser.parse_args()
    if options.command == "make":
        make(options.out.resolve(), options.names, options.jobs)
    elif options.command == "table":
        print("\n".join(table(options.file)))
    else:
        print(f"{pack(options.out, options.file)} cases in {options.file}")


if __name__ == "__main__":
    main()
