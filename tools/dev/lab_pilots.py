"""Pilots of the lab's studies: what sets the values that a study file lists under ``pending``.

    python -m tools.dev.lab_pilots dose STUDY ARM --like int4 --out DIR   # the std at which ARM has the dose of int4
    python -m tools.dev.lab_pilots low STUDY ARM --out DIR                # share of improbable tokens, and the σ of δ
    python -m tools.dev.lab_pilots runs STUDY ARM … --seeds 101 … --out DIR --jobs 2   # rewards, outcomes, surge

Seeds of pilots are none of the study's. Runs that are finished below DIR are read again and not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.objective import Distortion
from megatron_rl.errors import EXIT_DONE
from megatron_rl.lab.outcomes import outcome_of
from megatron_rl.lab.runner import FINISHED, StudyRunner
from megatron_rl.lab.study import LoadedStudy, Study, load_study
from megatron_rl.monitor.jsonl import read_metrics
from megatron_rl.monitor.run_directory import RunDirectory
from megatron_rl.stored.batches import batch_path, load_batch

SEED = 100
DOSE = "dose"  # the outcome of a study that measures it
STEPS = 2  # of a pilot of a dose: the first policy and the one after it
MOST_TRIES = 8


def pilot_runs(
    study: LoadedStudy, root: Path, arms: Sequence[str], seeds: Sequence[int], extra: Sequence[str] = (), jobs: int = 1
) -> list[RunDirectory]:
    """Runs of ``arms`` with seeds of their own, ``extra`` overrides added; those that are finished are taken as they
    are. SystemExit where one fails."""
    own = replace(study, study=study.study.model_copy(update={"seeds": list(seeds), "pending": []}))
    wanted = [replace(job, overrides=(*job.overrides, *extra)) for job in own.jobs(root, arms=arms)]
    states = StudyRunner(own, root, jobs).run(wanted)
    if failed := [name for name, state in states.items() if state not in FINISHED]:
        raise SystemExit(f"{root}: not finished: {', '.join(failed)}")
    return [RunDirectory(root / job.name) for job in wanted]


def matched(dose_of: Callable[[float], float], target: float, start: float, tolerance: float) -> tuple[float, float]:
    """(std, dose) with a dose within a factor 1 + ``tolerance`` of ``target``; the nearest of `MOST_TRIES` else.

    The dose is taken as proportional to the std until it was found below and above, then as a power of it between the
    nearest on either side.
    """
    seen: dict[float, float] = {}
    std = start
    while len(seen) < MOST_TRIES and (std := float(f"{std:.3g}")) not in seen:
        seen[std] = dose_of(std)
        if abs(math.log(seen[std] / target)) <= math.log1p(tolerance):
            break
        below = max((pair for pair in seen.items() if pair[1] < target), key=lambda pair: pair[1], default=None)
        above = min((pair for pair in seen.items() if pair[1] >= target), key=lambda pair: pair[1], default=None)
        if below and above:
            power = math.log(target / below[1]) / math.log(above[1] / below[1])
            std = below[0] * (above[0] / below[0]) ** power
        else:
            std *= target / seen[std]
    return min(seen.items(), key=lambda pair: abs(math.log(pair[1] / target)))


def share_of_low(run: RunDirectory, low_prob: float) -> float:
    """Share of the trained response tokens of the first `STEPS` steps whose old probability is below ``low_prob``."""
    low, total = 0, 0
    for step in range(STEPS):
        for sequence in load_batch(batch_path(run.batches, step)).batch.sequences:
            counted = np.asarray(sequence.loss_mask, dtype=bool)
            low += int((np.asarray(sequence.old_logprobs)[counted] < math.log(low_prob)).sum())
            total += int(counted.sum())
    return low / total


def summary(study: Study, run: RunDirectory) -> dict[str, Any]:
    """What the rules of the study files ask of a pilot run: held-out reward, the study's outcomes, and the schedule."""
    records = read_metrics(run.metrics)
    rewards = [record["val/reward/mean"] for record in records if "val/reward/mean" in record]
    found: dict[str, Any] = {"start": rewards[0], "best": max(rewards), "end": rewards[-1]}
    found |= {name: outcome_of(records, how) for name, how in study.outcomes.items()}
    shadow = [record for record in records if "lr_sched/shadow_lr" in record]  # the last record may be of validation
    if shadow:
        found |= {
            "surge step": shadow[-1]["lr_sched/surge_step"],
            "decay period": shadow[-1]["lr_sched/decay_period"],
            "mean shadow rate": float(np.mean([record["lr_sched/shadow_lr"] for record in shadow])),
        }
    return found


def main() -> int:
    args = _parser().parse_args()
    args.run(args)
    return EXIT_DONE


def _dose(args: argparse.Namespace) -> None:
    study = load_study(args.study)

    def dose_of(arm: str, folder: str, *extra: str) -> float:
        (run,) = pilot_runs(study, args.out / folder, [arm], [args.seed], [f"num_steps={STEPS}", *extra])
        dose = summary(study.study, run)[DOSE]
        print(f"{folder}: dose {dose:.4f}", flush=True)
        return dose

    def at(std: float) -> float:
        return dose_of(args.arm, f"{args.arm}-{std:g}", f"exact.noise={json.dumps(noise | {'std': std})}")

    noise = study.study.arms[args.arm].set["exact.noise"]
    target = dose_of(args.like, args.like)
    std, dose = matched(at, target, noise["std"], args.tolerance)
    print(f"{args.arm}: std {std:g} has {dose / target:.3f} times the dose of {args.like}")


def _low(args: argparse.Namespace) -> None:
    extra = [f"num_steps={STEPS}", "recorder.record_batches=all"]
    (run,) = pilot_runs(load_study(args.study), args.out, [args.arm], [args.seed], extra)
    reference = Distortion(delta=args.delta)
    share = share_of_low(run, reference.low_prob)
    deviation = math.sqrt(share * (1 - share)) * abs(args.delta - 1)
    print(f"share of tokens below {reference.low_prob:g}: {share:.4f}")
    print(f"deviation of the weights of δ = {args.delta:g}: {deviation:.4f}")


def _runs(args: argparse.Namespace) -> None:
    study = load_study(args.study)
    for run in pilot_runs(study, args.out, args.arms, args.seeds, args.set, args.jobs):
        print(f"{run.root.name}: {json.dumps(summary(study.study, run))}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="PILOT")

    def add(name: str, run: Callable[[argparse.Namespace], None], number: str | None) -> argparse.ArgumentParser:
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        command.add_argument("study", metavar="STUDY")
        command.add_argument("arms" if number else "arm", nargs=number, metavar="ARM")
        command.add_argument("--out", type=Path, required=True, help="folder of the pilots' runs")
        return command

    dose, low, runs = add("dose", _dose, None), add("low", _low, None), add("runs", _runs, "+")
    for command in (dose, low):
        command.add_argument("--seed", type=int, default=SEED)
    dose.add_argument("--like", required=True, metavar="ARM", help="the arm whose dose is matched")
    dose.add_argument("--tolerance", type=float, default=0.02, help="relative (default: 0.02)")
    low.add_argument("--delta", type=float, default=3.0)
    runs.add_argument("--seeds", type=int, nargs="+", default=[SEED])
    runs.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    runs.add_argument("--jobs", type=int, default=1)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
