"""The command `run branch`: the cause of an unstable run, by experiment."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.arguments import COUNT, INDEX, output
from megatron_rl.errors import EXIT_DONE, InputError, printable
from megatron_rl.monitor import RunDirectory

if TYPE_CHECKING:
    from megatron_rl.instruments.branch.plan import Branch


EXIT_INCOMPLETE = 1


def add_branch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="Branch from this run directory.")
    text = "Start the arms at this step's checkpoint (default: the newest up to the onset; 0: the run's start)."
    parser.add_argument("--from", type=INDEX, dest="from_step", metavar="STEP", help=text)
    text = "Give each arm this number of steps (default: until 20 steps after the first sign)."
    parser.add_argument("--steps", type=COUNT, metavar="N", help=text)
    text = "Repeat each arm this number of times (default: 4)."
    parser.add_argument("--seeds", type=COUNT, default=4, metavar="N", help=text)
    text = "Run these arms, or all that apply to the recipe (default: of the suspects, third-rate and one-update)."
    parser.add_argument("--arms", nargs="+", metavar="ARM", help=text)
    parser.add_argument(
        "--arm",
        nargs="+",
        action="append",
        default=[],
        dest="own",
        metavar=("NAME", "KEY=VALUE"),
        help="Add an arm of your own that sets these keys. The option may be given several times.",
    )
    text = "Compare the arms by this (default: the first of the three that is clearly worse after the onset)."
    parser.add_argument("--outcome", metavar="reward|mismatch|gradient|METRIC", help=text)
    text = "Run this number at a time (default: one per core, or one where there is a GPU)."
    parser.add_argument("--jobs", type=COUNT, metavar="N", help=text)
    parser.add_argument("--out", type=output, metavar="DIR", help="Keep the arms' runs in this folder.")
    parser.add_argument("--dry-run", action="store_true", help="Print arms, steps and cost, and start nothing.")
    text = "Print the command that submits each missing arm, and start nothing."
    parser.add_argument("--print-jobs", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="Print the verdict as JSON instead of a page.")


def run_branch(options: argparse.Namespace) -> int:
    """Find the cause of an unstable run by experiment: short arms from a checkpoint before the onset, one change each.

        megatron-rl run branch RUN --dry-run                              arms, steps and cost; no engine
        megatron-rl run branch RUN [--seeds 4] [--steps N] [--jobs N]     run what is missing, then say the verdict
        megatron-rl run branch RUN --print-jobs                           a command of Slurm for each missing arm

    `run why` gives the onset and the suspects. Each arm undoes one suspect and goes on from the checkpoint with its
    optimizer, data position and step; the control changes nothing. The verdict is on the outcome in the arms' second
    half: paired differences from the control over the seeds, with 95% intervals and Holm's correction over the arms.
    Seed 0 has the run's own random numbers, so that its control repeats the run.

    Finished arms are not run again, and interrupted ones go on. Runs are in RUN/branch/step_… (--out: another folder).

    Exit status: 0 all arms are finished, 1 some failed or were interrupted, 2 bad input, or a run without a cause to
    find.
    """
    from megatron_rl.instruments.branch.plan import plan_branch, ranks_of
    from megatron_rl.instruments.branch.verdict import plan_page
    from megatron_rl.instruments.lab.jobs import FINISHED, state_of

    asked = {name: getattr(options, name) for name in ("from_step", "steps", "seeds", "outcome")}
    folder = options.run.parent if options.run.is_file() else options.run
    branch = plan_branch(folder, wanted=options.arms, own=_own_arms(options.own), **asked)
    root = (options.out or branch.root).resolve()
    if options.dry_run:
        ranks, _ = ranks_of(RunDirectory(branch.parent))
        print(printable(plan_page(branch, _parallel(branch, options.jobs), ranks)))
    elif options.print_jobs:
        missing = [job for job in branch.jobs(root) if state_of(root / job.name) not in FINISHED]
        print(*(f"{shlex.join(branch.submission(job))}\n" for job in missing), sep="", end="")
    else:
        return _run(branch, root, options)
    return EXIT_DONE


def _own_arms(given: list[list[str]]) -> list:
    from megatron_rl.instruments.branch.arms import own_arm

    names = [name for name, *_ in given]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise InputError(f"--arm {repeated[0]}: given twice; put all KEY=VALUE of an arm behind one --arm")
    return [own_arm(name, settings) for name, *settings in given]


def _parallel(branch: Branch, jobs: int | None) -> int:
    from megatron_rl.process.devices import default_device

    if jobs is not None:
        return jobs
    device = branch.recipe_of_run.runtime.device
    return (os.cpu_count() or 1) if (default_device() if device == "auto" else device) == "cpu" else 1


def _run(branch: Branch, root: Path, options: argparse.Namespace) -> int:
    from megatron_rl.instruments.branch.verdict import count_look, judge, page
    from megatron_rl.instruments.lab.jobs import FINISHED
    from megatron_rl.instruments.lab.runner import StudyRunner
    from megatron_rl.process.host import outlasting_readers
    from megatron_rl.run.control import SIGNALS, taking

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    branch.command(branch.jobs(root)[0], root)  # refuses a run that cannot go on here
    runner = StudyRunner(
        branch, root, _parallel(branch, options.jobs), command=lambda job: branch.command(job, root), say=say
    )
    with outlasting_readers(f"{root} has the runs' logs"), taking(SIGNALS, lambda *_: runner.stop()):
        states = runner.run(branch.jobs(root))
    if not any(state in FINISHED for state in states.values()):
        say(f"no arm is finished: nothing can be compared; {root} has their logs")
        return EXIT_INCOMPLETE
    judgement = judge(branch, root, count_look(root, len(branch.study.seeds)))
    print(json.dumps(judgement.as_json(), indent=2) if options.json else printable(page(judgement)))
    return EXIT_DONE if all(state in FINISHED for state in states.values()) else EXIT_INCOMPLETE
