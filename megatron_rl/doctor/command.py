"""The command `doctor`: whether this machine can train."""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.arguments import COUNT, POSITIVE, add_overrides, output_file, output_or_dash
from megatron_rl.doctor.checks import CHECKS, QUICK_S, RATES, Check, Result
from megatron_rl.errors import EXIT_DONE, EXIT_FAULT, InputError

if TYPE_CHECKING:
    from megatron_rl.doctor.checks import Setting

MINUTES, QUICK_MINUTES = 10.0, 2.0


def add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", help="Test what this recipe needs as well.")
    add_overrides(parser)
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="Run this check alone. Give the option again, or commas, for several.",
    )
    parser.add_argument("--list", action="store_true", help="Print the checks and end.")
    parser.add_argument(
        "--quick", action="store_true", help=f"Leave out learner and engines; take {QUICK_MINUTES:g} minutes."
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        type=output_or_dash,
        metavar="FILE",
        help="Write the report to this file as JSON, anew before each check. Without FILE: print it at the end.",
    )
    parser.add_argument(
        "--page", type=output_file, metavar="FILE", help="Write the report as an HTML page that loads nothing."
    )
    parser.add_argument(
        "--shared", metavar="DIR", help="Test this folder, which all nodes see (default: the recipe's run_root)."
    )
    parser.add_argument(
        "--ranks",
        type=COUNT,
        help="Start this number of processes for checks between ranks (default: the node's GPUs).",
    )
    parser.add_argument(
        "--minutes",
        type=POSITIVE,
        help=f"End after this number of minutes, dealt to the checks (default: {MINUTES:g}).",
    )
    parser.add_argument(
        "--job", action="store_true", help="Run as one rank of a job, and test only what is between nodes."
    )
    parser.add_argument(
        "--merge", nargs="+", type=Path, metavar="FILE", help="Make one report of these. No check runs."
    )
    parser.add_argument(
        "--measure",
        type=output_file,
        metavar="FILE",
        help="Measure rates and links alone, and write them to this file for `megatron-rl plan --gpu FILE`. With "
        "--job: links alone, added to the file.",
    )
    parser.add_argument(
        "--expect", default="", metavar="NODE,NODE", help="Fail where the merged report lacks one of these nodes."
    )


def run_doctor(options: argparse.Namespace) -> int:
    """Check that this node can run training: packages, patches, driver, network, learner, engines, memory.

        megatron-rl doctor [RECIPE] [--json FILE] [--page FILE]     every check, in ten minutes; --quick: in two
        megatron-rl doctor --only NAME,NAME …                       some of them; --list says which there are
        megatron-rl doctor --job --json FILE                        as every rank of a job, under torchrun or srun:
                                                                    what is between nodes
        megatron-rl doctor --merge FILE … --page FILE               one page of several nodes' reports
        megatron-rl doctor [RECIPE] --measure FILE                  write this node's rates for `plan --gpu FILE`

    Each check runs in its own processes and has a budget of seconds, so that one that hangs or crashes does not stop
    the others. Its result is `pass`, `fail` with the likely fix, or `not run` with the reason. With a RECIPE checks ask
    for what it needs: the host's memory, and attention with its heads. `slurm/doctor.sbatch` runs all checks on the
    nodes of a job.

    Exit status: 0 no check failed, 1 one did, 2 bad arguments.
    """
    from megatron_rl.doctor import report

    if options.list:
        width = max(len(check.name) for check in CHECKS)
        print("\n".join(f"{check.name:{width}} {check.budget_s:4g} s  {check.question}" for check in CHECKS))
        return EXIT_DONE
    if options.measure and (options.only or options.merge):
        raise InputError("--measure runs its own checks; leave out --only and --merge")
    if options.merge:
        merged = report.merge(options.merge, [name for name in options.expect.split(",") if name])
    else:
        merged = examine(options)
    if merged is None:  # a rank of a job whose first rank reports
        return EXIT_DONE
    report.write(merged, options.json, options.page)
    if options.json != "-":
        print(report.summary(merged))
    return EXIT_FAULT if report.failures(merged) else EXIT_DONE


def examine(options: argparse.Namespace) -> dict[str, Any] | None:
    """Run the checks; return the report of this node, or of the job on its first rank (None on the others)."""
    from megatron_rl.doctor import report
    from megatron_rl.doctor.frame import run_checks

    checks, setting = choose(options.only, options.job, options.quick), make_setting(options)
    minutes = options.minutes or (QUICK_MINUTES if options.quick else MINUTES)
    if options.measure:
        links = [check for check in CHECKS if check.name == "collectives"]
        checks = links if options.job else [RATES, *links]
    is_main = not options.job or int(os.environ["RANK"]) == 0
    out = sys.stderr if options.json == "-" else sys.stdout

    def say(result: Result) -> None:
        if is_main:
            print(report.line(result), file=out, flush=True)

    def begin(results: list[Result], check: Check) -> None:
        """What is known so far, for the case that the doctor is ended while ``check`` runs."""
        if is_main and options.json not in (None, "-"):
            report.write(report.make([*results, report.unended(check)], setting, start), options.json, None)

    start = time.time()
    results = run_checks(checks, setting, 60 * minutes, say, begin)
    if options.measure and is_main:
        from megatron_rl.doctor.rates import write_measured

        print(write_measured(options.measure, {result.check.name: result.outcome for result in results}), file=out)
    return report.make(results, setting, start) if is_main else None


def choose(only: list[str] | None, job: bool, quick: bool = False) -> list[Check]:
    """Return the selected checks in order. Raises `InputError` for an unknown name."""
    names = [name.strip() for text in only or [] for name in text.split(",")]
    all_names = [check.name for check in CHECKS]
    if unknown := [name for name in names if name not in all_names]:
        raise InputError(f"--only: no check {', '.join(map(repr, unknown))}; there are: {', '.join(all_names)}")
    chosen = [check for check in CHECKS if not names or check.name in names]
    chosen = [check for check in chosen if not quick or check.budget_s <= QUICK_S]
    return [check for check in chosen if not job or check.ranks == "job"]


def make_setting(options: argparse.Namespace) -> Setting:
    from megatron_rl.doctor.checks import CPU_RANKS, Setting, planned
    from megatron_rl.process.devices import default_device

    if options.job and not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise InputError("--job: start it under torchrun or slurm/lib/rank.sh; RANK, WORLD_SIZE, MASTER_… are not set")
    device = default_device()
    if options.ranks is None and device == "cpu":
        options.ranks = CPU_RANKS
    elif options.ranks is None:
        import torch

        options.ranks = torch.cuda.device_count()
    setting = Setting(device, options.ranks, "", options.recipe, options.overrides, in_job=options.job)
    try:
        recipe = planned(setting)  # an invalid recipe raises here, before any check
    except ModuleNotFoundError:  # a package that recipes need is missing
        recipe = None
    shared = Path(options.shared or (recipe.run_root if recipe else "runs"))
    return replace(setting, shared=str(shared.absolute()))
