"""Short runs of which the cause is known: collapses of one planted cause each, and healthy runs.

    python -m tools.dev.unstable_runs make OUT [NAME …]     # about a minute of one core each; finished ones are kept
    python -m tools.dev.unstable_runs pack OUT docs/lab/unstable.jsonl.xz
    python -m tools.dev.unstable_runs table docs/lab/unstable.jsonl.xz      # what alarms and `why` say of each

`megatron-rl run score-alarms` reads the packed file. It has recipes, and the metrics of `KEPT` to four digits. The
rules on levels were set and judged on the lab's runs, which are longer and lack most of these metrics.

Reward workers import this file for its rewards: what only the commands need is imported by them.
"""

from __future__ import annotations

import argparse
import json
import lzma
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_rl.instruments.why import Finding
    from megatron_rl.monitor.alarms import RecordedRun

FORMAT = 1
DIGITS = 4
STEPS = 60
KEPT = frozenset(
    {
        "step",
        "critic/rewards/mean",
        "critic/score/mean",
        "val/reward/mean",
        "response_length/mean",
        "response_length/clip_ratio",
        "response/repetition_frac",
        "groups/no_signal_frac",
        "reward/errors",
        "actor/pg_loss",
        "actor/ppo_kl",
        "actor/pg_clipfrac",
        "actor/entropy",
        "actor/grad_norm",
        "actor/update_skipped",
        "rollout_corr/k3_kl",
        "training/rollout_probs_diff_mean",
        "mismatch/rho_std",
        "noise/relative_update",
        "router/agree_frac",
        "rollout/staleness_mean",
    }
)


@dataclass(frozen=True)
class Arm:
    """One run: what was planted ("" for a healthy one), the tiny recipe, and what is set in it."""

    cause: str
    recipe: str
    changes: tuple[str, ...] = ()


def _reward(function: str) -> str:
    return f"reward.name={Path(__file__).resolve()}:{function}"


_LR, _UPDATES, _BITS = "learner.optimizer.lr={}", "batch.minibatches={}", "rollout.quantization.weights={}"
_OPEN = ("objective.policy_term.clip_low=0.99", "objective.policy_term.clip_high=100")
_FP16 = ("learner.dtype=fp16", "rollout.dtype=fp16")
_HEALTHY_RATE = _LR.format("2e-4")
# All recipes of recipes/tiny but base (grpo.yaml is the same), and rollback, whose rate is meant to do harm.
TINY = (
    *("a3po", "acceptance", "calculator", "context", "demo", "effective_sample", "exact", "fipo", "fp8", "grpo"),
    *("gspo", "kept", "length_decay", "min_variance", "r3", "rounded", "router_shift", "servers", "unstable", "vespo"),
)


def _arms() -> dict[str, Arm]:
    healthy = {f"healthy-{name}": Arm("", name) for name in TINY}
    healthy |= {
        "healthy-lr2": Arm("", "grpo", (_HEALTHY_RATE,)),
        "healthy-two-updates": Arm("", "grpo", (_UPDATES.format(2),)),
        "healthy-bf16": Arm("", "grpo", ("learner.dtype=bf16", "rollout.dtype=bf16")),
        "healthy-fp16": Arm("", "grpo", _FP16),
    }
    rates = {
        f"rate-{recipe}-{lr}": Arm("rate", recipe, (_LR.format(lr),))
        for recipe, lr in (
            ("grpo", "5e-4"),
            ("grpo", "1e-3"),
            ("grpo", "2e-3"),
            ("grpo", "4e-3"),
            ("gspo", "1e-3"),
            ("gspo", "3e-3"),
            ("fp8", "1e-3"),
            ("r3", "2e-3"),
        )
    }
    return (
        healthy
        | rates
        | {
            "updates-8": Arm("updates", "grpo", (_HEALTHY_RATE, _UPDATES.format(8))),
            "updates-16": Arm("updates", "grpo", (_HEALTHY_RATE, _UPDATES.format(16))),
            "updates-16-gspo": Arm("updates", "gspo", (_HEALTHY_RATE, _UPDATES.format(16))),
            "rounding-int4": Arm("rounding", "grpo", (_HEALTHY_RATE, _UPDATES.format(4), _BITS.format("int4"))),
            "rounding-int4-gspo": Arm("rounding", "gspo", (_HEALTHY_RATE, _BITS.format("int4"))),
            "clip-open": Arm("clip", "grpo", (_HEALTHY_RATE, _UPDATES.format(8), *_OPEN)),
            "reward-zero": Arm("reward", "grpo", (_reward("zero_after_a_while"),)),
            "reward-noise": Arm("reward", "grpo", (_HEALTHY_RATE, _reward("noise_after_a_while"))),
            "reward-inverted": Arm("reward", "grpo", (_HEALTHY_RATE, _reward("inverted_after_a_while"))),
            "reward-constant": Arm("reward", "grpo", (_reward("always_one"),)),
            "length-rewarded": Arm("length", "grpo", (_HEALTHY_RATE, _reward("longer"))),
            "length-rewarded-gspo": Arm("length", "gspo", (_HEALTHY_RATE, _reward("longer"))),
            "entropy-cold": Arm("entropy", "grpo", (_HEALTHY_RATE, "rollout.temperature=0.25")),
            "entropy-hot": Arm("entropy", "grpo", (_HEALTHY_RATE, "rollout.temperature=2.0")),
            "fp16-scale": Arm(
                "fp16", "grpo", (*_FP16, "learner.loss_scale.initial=1e12", "learner.loss_scale.minimum=1e12")
            ),
            "data-one-answer": Arm("data", "grpo", (_HEALTHY_RATE, "data.train={answers}/one.jsonl")),
            "data-shuffled": Arm("data", "grpo", (_HEALTHY_RATE, "data.train={answers}/shuffled.jsonl")),
            "staleness-8": Arm(
                "staleness",
                "servers",
                (_HEALTHY_RATE, _UPDATES.format(4), "rollout.servers.launch=1", "rollout.max_staleness=8"),
            ),
        }
    )


ARMS = _arms()


# Rewards that break: one worker counts what it has scored. They are named by this file's path in a recipe.

_scored = 0
_WORKING = 1152  # responses before the break: those of 15 steps of 16 × 4 and of three validations of 64


def _counted() -> bool:
    """Whether this response comes after the break."""
    global _scored
    _scored += 1
    return _scored > _WORKING


def _right(response: str, answer: str) -> float:
    _, mark, final = response.rpartition("#")
    return float(bool(mark) and final == answer)


def zero_after_a_while(response: str, answer: str) -> float:
    return 0.0 if _counted() else _right(response, answer)


def noise_after_a_while(response: str, answer: str) -> float:
    return float(hash((response, answer, _scored)) % 2) if _counted() else _right(response, answer)


def inverted_after_a_while(response: str, answer: str) -> float:
    return 1.0 - _right(response, answer) if _counted() else _right(response, answer)


def always_one(response: str, answer: str) -> float:
    return 1.0


def longer(response: str, answer: str) -> float:
    return len(response) / 24


def make(out: Path, names: list[str], seeds: list[int]) -> None:
    """Run the arms of ``names`` (all where it is empty) once for each seed; what is finished stays as it is."""
    out.mkdir(parents=True, exist_ok=True)
    _write_answers(out)
    for seed in seeds:
        for name in names or ARMS:
            _run(out, f"{name}-seed{seed}", ARMS[name], seed)


def _run(out: Path, name: str, arm: Arm, seed: int) -> None:
    noted = out / f"{name}.json"
    if noted.exists():
        return
    changes = [change.format(answers=out.resolve()) for change in arm.changes]
    seeds = [f"{key}={seed}" for key in ("seed", "rollout.seed", "data.seed")]
    quiet = ["monitor.tensorboard=false", "monitor.plots=false", "monitor.samples.every=0", "checkpoint.every=0"]
    fixed = [f"run_root={out}", f"name={name}", f"num_steps={STEPS}", "reward.num_workers=1", *quiet]
    # Alarms of a recipe may end a run; here it goes on.
    fixed += ["rollout.num_samples=4", "validation.every=5", "validation.limit=64", "monitor.alarms=[]"]
    sets = [part for change in (*fixed, *seeds, *changes) for part in ("--set", change)]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if arm.recipe == "context" else []
    command = [sys.executable, *launch, "-m", "megatron_rl", "train", f"recipes/tiny/{arm.recipe}.yaml", *sets]
    with (out / f"{name}.out").open("w") as log:
        status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    print(f"{name}: exit status {status}", flush=True)
    if status in (0, 3):  # done, or ended by a limit
        noted.write_text(json.dumps({"status": status}) + "\n")


def _write_answers(out: Path) -> None:
    """Training data whose answers are wrong: all the same, and each the next row's."""
    rows = [json.loads(line) for line in Path("recipes/tiny/data/train.jsonl").read_text().splitlines()]
    rotated = [row["answer"] for row in rows[1:] + rows[:1]]
    for name, answers in (("one", ["0"] * len(rows)), ("shuffled", rotated)):
        lines = [json.dumps(row | {"answer": answer}) + "\n" for row, answer in zip(rows, answers, strict=True)]
        (out / f"{name}.jsonl").write_text("".join(lines))


def pack(out: Path, file: Path) -> int:
    """Write all finished runs to ``file``, beside those that it has; the number of all."""
    from megatron_rl.config.yaml12 import parse
    from megatron_rl.instruments.lab.jobs import without_folders
    from megatron_rl.monitor.run_directory import RunDirectory, encode_record, read_metrics

    lines = lzma.decompress(file.read_bytes()).decode().splitlines() if file.exists() else []
    runs = {line["run"]: line for line in map(json.loads, lines[1:])}
    for noted in out.glob("*.json"):
        name = noted.stem
        run = RunDirectory(out / name)
        recipe = without_folders(parse(run.recipe.read_text())[0])
        records = [{key: _short(row[key]) for key in row if key in KEPT} for row in read_metrics(run.metrics)]
        told = {"run": name, "cause": ARMS[name.rpartition("-seed")[0]].cause, "recipe": recipe}
        runs[name] = told | {"records": [encode_record(record) for record in records]}
    head = {"format": FORMAT, "study": "unstable"}
    text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in [head, *(runs[name] for name in sorted(runs))])
    file.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    return len(runs)


# Name of a planted cause → the suspect that `why` should name.
SUSPECTS = {
    "rate": "learning rate",
    "updates": "updates a batch",
    "rounding": "rounding",
    "clip": "clip range",
    "reward": "reward",
    "length": "length",
    "entropy": "temperature",
    "fp16": "overflow",
    "data": "data",
    "staleness": "staleness",
}


def judged(file: Path) -> list[tuple[RecordedRun, Finding, str]]:
    """Return each run in ``file`` with what `why` finds, and whether that is right.

    "yes": a planted cause is among the first two suspects, a healthy run has none. "unharmed": a planted cause, no
    sign. Else "no".
    """
    from megatron_rl.instruments.why import find
    from megatron_rl.monitor.alarms import read_packed

    rows = []
    for run in read_packed(file):
        finding = find(run.name, run.records, run.recipe)
        named = [suspect.name for suspect in finding.suspects[:2]]
        right = "yes" if (SUSPECTS[run.cause] in named if run.cause else finding.is_healthy) else "no"
        rows.append((run, finding, "unharmed" if run.cause and finding.is_healthy else right))
    return rows


def table(rows: list[tuple[RecordedRun, Finding, str]]) -> list[str]:
    """Return a Markdown table with a line for each run that `judged` returned."""
    lines = ["| run | first alarm | collapse | first two suspects | right |", "|---|---|---|---|---|"]
    for run, finding, right in rows:
        alarms = [sign for sign in finding.signs if sign.name != "collapse"]
        first = f"{alarms[0].name}, step {alarms[0].step}" if alarms else "none"
        named = [suspect.name for suspect in finding.suspects[:2]]
        collapse = "none" if finding.collapse is None else str(finding.collapse)
        name = run.name.partition("/")[2]
        lines.append(f"| `{name}` | {first} | {collapse} | {', '.join(named) or 'none'} | {right} |")
    return lines


def summary(rows: list[tuple[RecordedRun, Finding, str]]) -> list[str]:
    """Return a Markdown table with a line for each planted cause, and one for the healthy runs."""
    lines = ["| planted | runs | harmed | `why` right |", "|---|---|---|---|"]
    for cause, name in [*SUSPECTS.items(), ("", "nothing")]:
        rights = [right for run, _, right in rows if run.cause == cause]
        harmed = sum(right != "unharmed" for right in rights) if cause else "–"
        lines.append(f"| {name} | {len(rights)} | {harmed} | {rights.count('yes')} |")
    return lines


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("out", type=Path)
    making.add_argument("names", nargs="*", metavar="NAME")
    making.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    packing = commands.add_parser("pack")
    packing.add_argument("out", type=Path)
    packing.add_argument("file", type=Path)
    showing = commands.add_parser("table")
    showing.add_argument("file", type=Path)
    options = parser.parse_args()
    if options.command == "make":
        make(options.out.resolve(), options.names, options.seeds)
    elif options.command == "table":
        rows = judged(options.file)
        print("\n".join([*table(rows), "", *summary(rows)]))
    else:
        print(f"{pack(options.out, options.file)} runs in {options.file}")


if __name__ == "__main__":
    main()
