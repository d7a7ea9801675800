"""Pilots of the lab's studies: what sets the values that a study file lists under ``pending``.

    python -m tools.dev.lab_pilots dose STUDY ARM --like int4 --out DIR   # the std at which ARM has the dose of int4
    python -m tools.dev.lab_pilots low STUDY ARM --out DIR                # share of improbable tokens, and the σ of δ
    python -m tools.dev.lab_pilots clock STUDY ARM --out DIR              # rate, surge ratio and period of length-decay
    python -m tools.dev.lab_pilots runs STUDY ARM … --seeds 101 … --out DIR --jobs 2   # rewards and outcomes

Seeds of pilots are none of the study's. Runs that are finished below DIR are read again and not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config import Recipe
from megatron_rl.config.objective import Distortion
from megatron_rl.config.yaml12 import parse
from megatron_rl.errors import EXIT_DONE
from megatron_rl.instruments.lab.jobs import FINISHED, LoadedStudy, load_study, outcome_of
from megatron_rl.instruments.lab.runner import StudyRunner
from megatron_rl.instruments.lab.study import Study
from megatron_rl.monitor.run_directory import RunDirectory, read_metrics
from megatron_rl.run.recorded_batches import batch_path, load_batch
from megatron_rl.schedule import LengthDecay

SEED = 100
DOSE, COLLAPSE = "dose", "collapse step"  # the outcomes of a study that measure them
STEPS = 2  # of a pilot of a dose: the first policy and the one after it
MOST_TRIES = 8
RATES = (3e-4, 2e-4, 1.5e-4, 1e-4)
SURGE_RATIOS = (1.15, 1.12, 1.1, 1.08, 1.05)
HELD = 0.95  # of the best held-out reward: a run that ends below has lost some


def pilot_runs(
    study: LoadedStudy, root: Path, arms: Sequence[str], seeds: Sequence[int], extra: Sequence[str] = (), jobs: int = 1
) -> list[RunDirectory]:
    """Runs of ``arms`` with seeds of their own, ``extra`` overrides added; those that are finished are taken as they
    are. SystemExit where one fails."""
    pilot = replace(study, study=study.study.model_copy(update={"seeds": list(seeds), "pending": []}))
    pilot_jobs = [replace(job, overrides=(*job.overrides, *extra)) for job in pilot.jobs(root, arms=arms)]
    states = StudyRunner(pilot, root, jobs).run(pilot_jobs)
    if failed := [name for name, state in states.items() if state not in FINISHED]:
        raise SystemExit(f"{root}: not finished: {', '.join(failed)}")
    return [RunDirectory(root / job.name) for job in pilot_jobs]


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
    """Return a pilot run's figures for the rules of study files: held-out reward and the study's outcomes."""
    records = read_metrics(run.metrics)
    rewards = [record["val/reward/mean"] for record in records if "val/reward/mean" in record]
    figures: dict[str, Any] = {"start": rewards[0], "best": max(rewards), "end": rewards[-1]}
    return figures | {name: outcome_of(records, how) for name, how in study.outcomes.items()}


@dataclass(frozen=True)
class Clock:
    """What length-decay in mode auto would make of a run at a constant rate. Steps and periods are in updates."""

    surge: int
    period: int
    collapse: int | None  # the update of the collapse, None for a run that keeps its reward
    mean_rate: float  # over all updates of the run

    @property
    def is_early(self) -> bool:
        """Whether the first halving comes before the reward is lost."""
        return self.collapse is not None and max(self.surge, self.period) < self.collapse


def clock_of(study: Study, run: RunDirectory, surge_ratio: float) -> Clock | None:
    """The clock of a ``run`` of mode shadow with another ``surge_ratio``; None without a surge."""
    recipe, records = Recipe.model_validate(parse(run.recipe.read_text())[0]), read_metrics(run.metrics)
    detector = recipe.schedule.detector.model_copy(update={"surge_ratio": surge_ratio})
    schedule = LengthDecay(recipe.schedule.model_copy(update={"mode": "auto", "detector": detector}))
    trained = {record["step"]: record for record in records if "lr_sched/lr" in record}
    rates = []
    for record in trained.values():
        updates = int(record["lr_sched/step"])
        schedule.observe(updates, record["response_length/mean"])
        bounds = record["lr_sched/lr"], recipe.schedule.floor(record["lr_sched/lr"])
        rates += [schedule.lr(updates + done, *bounds) for done in range(recipe.batch.minibatches)]
    if schedule.decay_period is None:
        return None
    collapse = trained.get(outcome_of(records, study.outcomes[COLLAPSE]))  # a run that kept its reward: beyond the last
    return Clock(
        surge=schedule.detector.surge_step,
        period=schedule.decay_period,
        collapse=None if collapse is None else int(collapse["lr_sched/step"]),
        mean_rate=float(np.mean(rates)),
    )


def chosen(clocks: Mapping[tuple[float, float], Clock | None], loses: Mapping[float, bool]) -> tuple[float, float]:
    """The largest surge ratio, then the largest rate, whose clock is early in a run that loses reward.

    ``clocks``: by (surge ratio, rate); ``loses``: by rate. SystemExit where there is none.
    """
    fit = [(ratio, rate) for (ratio, rate), clock in clocks.items() if loses[rate] and clock and clock.is_early]
    if not fit:
        raise SystemExit("no ratio and rate at which the first halving comes before the reward is lost")
    return max(fit)


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


def _clock(args: argparse.Namespace) -> None:
    study = load_study(args.study)
    runs = {}
    for rate in RATES:
        overrides = [f"learner.optimizer.lr={rate}"]
        (runs[rate],) = pilot_runs(study, args.out / f"{args.arm}-{rate:g}", [args.arm], [args.seed], overrides)
    loses = {}
    for rate, run in runs.items():
        figures = summary(study.study, run)
        loses[rate] = figures["end"] < HELD * figures["best"]
        print(f"rate {rate:g}: {json.dumps(figures)}")
    clocks = {(ratio, rate): clock_of(study.study, run, ratio) for ratio in SURGE_RATIOS for rate, run in runs.items()}
    for (ratio, rate), clock in clocks.items():
        print(f"surge ratio {ratio:g}, rate {rate:g}: {clock or 'no surge'}")
    ratio, rate = chosen(clocks, loses)
    clock = clocks[ratio, rate]
    phase = np.random.default_rng(args.seed).integers(1, clock.period)
    print(f"surge ratio {ratio:g}, rate {rate:g}: mean rate {clock.mean_rate:.3g}, another phase {phase}")


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

    dose, low, clock = add("dose", _dose, None), add("low", _low, None), add("clock", _clock, None)
    runs = add("runs", _runs, "+")
    for command in (dose, low, clock):
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
