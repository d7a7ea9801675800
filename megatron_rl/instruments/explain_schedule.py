"""The command `run explain-schedule`.

Replays a schedule on a recorded run: the schedule's inputs, action and reason at each step.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from megatron_rl.config.explain import explain
from megatron_rl.config.learner import OptimizerConfig, ScheduleConfig
from megatron_rl.config.loader import read_yaml
from megatron_rl.config.recipe import without_removed
from megatron_rl.config.yaml12 import parse
from megatron_rl.errors import EXIT_DONE, InputError
from megatron_rl.monitor import RunDirectory
from megatron_rl.schedule import LearningRateSchedule

if TYPE_CHECKING:
    from megatron_rl.instruments.foreign.read import Run


@dataclass(frozen=True)
class ReplayedStep:
    """One recorded step with the schedule's values. None: not recorded, or not known yet."""

    step: int  # rollout step, as in metrics.jsonl
    t: int  # optimizer step that the schedule counts
    length: float | None
    lr: float  # rate of the replayed schedule
    recorded_lr: float | None
    event: str  # "" if nothing happened


def replay(
    records: Sequence[Mapping[str, float]], config: ScheduleConfig, lr: float, total_steps: int
) -> list[ReplayedStep]:
    """Replay the schedule ``config`` on ``records`` (lines of a metrics.jsonl) and return its steps.

    The length is `lr_sched/length` (the detector's input), else `response_length/mean`; t is `lr_sched/step`, else the
    rollout step (equal for one update per step and none skipped). ``lr`` is the peak rate.
    """
    schedule, steps, previous = LearningRateSchedule(config, lr, total_steps), [], None
    for record in records:
        t = int(record.get("lr_sched/step", record["step"]))
        length = record.get("lr_sched/length", record.get("response_length/mean"))
        decay = schedule.length_decay
        streak = decay.detector.streak if decay else 0
        surge = schedule.observe_length(t, length) if length is not None else None
        halvings = int(record.get("lr_sched/extra_halvings", 0))
        rate = schedule.lr(t)
        if halvings:
            rate = max(rate * 2.0**-halvings, min(rate, schedule.min_lr))
        event = ""
        if surge is not None:
            event = f"{decay.detector.explain()}: T_decay = {decay.planned_period}"
        elif decay and decay.detector.surge_step is None and decay.detector.streak > streak:
            event = decay.detector.explain()
        if previous is not None and rate != previous and t > config.warmup_steps:
            event = "; ".join(filter(None, [event, f"lr {previous:.4g} -> {rate:.4g}"]))
        previous = rate
        steps.append(
            ReplayedStep(
                step=int(record["step"]),
                t=t,
                length=length,
                lr=rate,
                recorded_lr=record.get("lr_sched/lr", record.get("actor/lr")),
                event=event,
            )
        )
    return steps


def add_explain_schedule(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="Read this run directory, or another project's log.")
    parser.add_argument(
        "--as", dest="changes", default="", metavar="KEY=VALUE,...", help="Reckon with these keys of another schedule."
    )


def run_explain_schedule(options: argparse.Namespace) -> int:
    """Explain why the learning rate of a run was what it was: print length, baseline, trigger and rate.

        megatron-rl run explain-schedule RUN [--as KEY=VALUE,...]

    RUN is a run directory, or a log of verl, slime, miles, NeMo-RL, prime-rl or TRL (docs/coming-from.md): then the
    command says what the length-decay rate would have done with its response lengths, from the highest rate of the log
    on.

    The command replays the schedule of its recipe.resolved.yaml on the recorded response lengths. It prints each step
    at which the schedule acted, with the numbers behind the decision, and compares the rates with the recorded ones.
    --as replaces keys of the schedule section (`mode=auto,detector.surge_ratio=2.5`) to show what another schedule
    would have done with the same lengths. A run with another style is explained in mode shadow.
    """
    from megatron_rl.instruments.foreign.read import read_run

    directory = RunDirectory(options.run)
    run = read_run(options.run)
    records = run.records
    if not records:
        raise InputError(f"{directory.metrics}: no step was recorded")
    if run.is_own:
        recipe, source = read_yaml(directory.recipe, "recipe"), str(directory.recipe)
    else:
        print("\n".join(run.source_lines()))
        recipe, source = recipe_of(run), str(run.path)
    config, lr, is_own = schedule_of(recipe, source, options.changes)
    check_order(records, directory.metrics)
    steps = replay(records, config, lr, total_steps=int(records[-1]["step"]) + 1)
    print_story(steps, config, lr, is_own and run.is_own)
    return EXIT_DONE


def check_order(records: list[dict[str, float]], file: Path) -> None:
    """Raise `InputError` if steps do not increase or a count of optimizer steps is not a number."""
    last, last_t = -1, -1.0
    for record in records:
        step, t = record["step"], record.get("lr_sched/step", record["step"])
        if step <= last or not last_t <= t < math.inf:
            raise InputError(
                f"{file}: step {step} (lr_sched/step {t}) comes after step {last} ({last_t:g}), but a run writes its "
                "steps in order; if the file was edited by hand, sort or repair its lines"
            )
        last, last_t = step, t


def recipe_of(run: Run) -> dict[str, Any]:
    """Return a recipe for another project's log: length-decay in mode shadow, from its highest rate."""
    if not any("response_length/mean" in record for record in run.records):
        raise InputError(f"{run.path}: no response_length/mean; docs/coming-from.json has the names that are read")
    rates = [record["actor/lr"] for record in run.records if math.isfinite(record.get("actor/lr", math.nan))]
    if not rates:
        print("the log has no learning rate; that of the schema is reckoned with")
    optimizer = {"lr": max(rates)} if rates and max(rates) > 0 else {}
    return {"learner": {"optimizer": optimizer}, "schedule": {"style": "length-decay", "mode": "shadow"}}


def schedule_of(recipe: Mapping[str, Any], source: str, changes: str) -> tuple[ScheduleConfig, float, bool]:
    """Return the schedule to explain, the peak rate, and whether it is the own one of ``recipe``, in plain values.

    ``source`` is named in errors.
    """
    recipe = without_removed(dict(recipe))
    section: dict[str, Any] = dict(recipe.get("schedule") or {})
    is_own = not changes and section.get("style") == "length-decay"
    if not changes and not is_own:
        section = {"style": "length-decay", "mode": "shadow", "warmup_steps": section.get("warmup_steps", 0)}
    for change in filter(None, changes.split(",")):
        key, _, value = change.partition("=")
        *parents, leaf = key.split(".")
        target = section
        for parent in parents:
            target[parent] = dict(target.get(parent) or {})
            target = target[parent]
        try:
            target[leaf], _ = parse(value)
        except yaml.YAMLError as error:
            raise InputError(f"--as {change}: the value is not valid YAML: {error}") from error
    try:
        optimizer = OptimizerConfig.model_validate((recipe.get("learner") or {}).get("optimizer") or {})
        return ScheduleConfig.model_validate(section), optimizer.lr, is_own
    except ValidationError as error:
        raise InputError(f"schedule of {source} (with --as {changes!r}):\n{explain(error, ScheduleConfig)}") from error


def print_story(steps: list[ReplayedStep], config: ScheduleConfig, lr: float, is_own: bool) -> None:
    print(f"schedule: {' '.join(f'{k}={v}' for k, v in config.model_dump(exclude={'detector'}).items())}")
    print(f"detector: {' '.join(f'{k}={v}' for k, v in config.detector.model_dump().items())}")
    print(f"peak {lr:g}, floor {config.floor(lr):g}, {len(steps)} recorded steps")
    for step in steps:
        if step.event:
            print(f"step {step.step} (t = {step.t}, length {step.length or float('nan'):.0f}): {step.event}")
    if not any(step.event for step in steps):
        print("nothing happened: no surge, no change of the rate")
    if not is_own:
        print("not the run's own schedule: recorded rates are not compared")
        return
    compared = [step for step in steps if step.recorded_lr is not None]
    different = [step for step in compared if step.recorded_lr != step.lr]
    print(f"recorded rate equals the formula at {len(compared) - len(different)} of {len(compared)} steps")
    for step in different[:5]:
        print(f"  step {step.step}: recorded {step.recorded_lr!r}, formula {step.lr!r}")
