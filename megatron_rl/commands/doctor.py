"""Does this node do what a run relies on? Packages, patches, driver, network, learner, engines, memory: pass or fail.

    megatron-rl doctor [RECIPE] [--json FILE] [--page FILE]     every check, in under ten minutes
    megatron-rl doctor --only NAME,NAME …                       some of them; --list says which there are
    megatron-rl doctor --job --json FILE                        as every rank of a job, under torchrun or srun: what is
                                                                between nodes
    megatron-rl doctor --merge FILE … --page FILE               one page of several nodes' reports

Each check runs in processes of its own with a deadline: one that hangs or crashes leaves the others alone. It finds
`pass`, `fail` with the likely fix, or `not run` with the reason. A RECIPE adds what its size asks for: the host's
memory, the attention of its heads. `slurm/doctor.sbatch` does all of it over the nodes of a job.

Exit status: 0 no check failed, 1 one did, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.doctor.checks import CHECKS, Check
from megatron_rl.doctor.outcome import Result
from megatron_rl.errors import EXIT_DONE, EXIT_FAULT, InputError

if TYPE_CHECKING:
    from megatron_rl.doctor.setting import Setting

MINUTES = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", help="what is to be run here; default: nothing in particular")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY.PATH=VALUE", dest="overrides", help="override one key"
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="this check (several: again, or with commas)")
    parser.add_argument("--list", action="store_true", help="print the checks and end")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="the report as JSON; without FILE: print it"
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="the report as an HTML page that loads nothing")
    parser.add_argument("--shared", metavar="DIR", help="a folder that all nodes see (default: the recipe's run_root)")
    parser.add_argument("--ranks", type=int, help="processes of checks between ranks (default: GPUs of the node)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for all checks (default {MINUTES:g})")
    parser.add_argument("--job", action="store_true", help="this process is a rank: only what is between nodes")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="reports to make one of; runs no check")
    parser.add_argument("--expect", default="", metavar="NODE,NODE", help="nodes that must be in the merged report")


def run(options: argparse.Namespace) -> int:
    from megatron_rl.doctor import report

    if options.list:
        width = max(len(check.name) for check in CHECKS)
        print("\n".join(f"{check.name:{width}}  {check.question}" for check in CHECKS))
        return EXIT_DONE
    if options.merge:
        found = report.merge(options.merge, [name for name in options.expect.split(",") if name])
    else:
        found = examine(options)
    if found is None:  # a rank of a job whose first rank reports
        return EXIT_DONE
    report.write(found, options.json, options.page)
    if options.json != "-":
        print(report.summary(found))
    return EXIT_FAULT if report.failures(found) else EXIT_DONE


def examine(options: argparse.Namespace) -> dict[str, Any] | None:
    """The report of this node, or of the job's first rank."""
    from megatron_rl.doctor import report
    from megatron_rl.doctor.frame import run_checks

    checks, setting = choose(options.only, options.job), make_setting(options)
    is_main = not options.job or int(os.environ["RANK"]) == 0
    out = sys.stderr if options.json == "-" else sys.stdout

    def say(result: Result) -> None:
        if is_main:
            print(report.line(result), file=out, flush=True)

    start = time.time()
    results = run_checks(checks, setting, 60 * options.minutes, say)
    return report.make(results, setting, start) if is_main else None


def choose(only: list[str] | None, job: bool) -> list[Check]:
    """The checks that are wanted, in their order. Raises `InputError` on a name that none has."""
    names = [name.strip() for text in only or [] for name in text.split(",")]
    known = [check.name for check in CHECKS]
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"--only: no check {', '.join(map(repr, unknown))}; there are: {', '.join(known)}")
    if job:
        return [check for check in CHECKS if check.ranks == "job" and (not names or check.name in names)]
    return [check for check in CHECKS if not names or check.name in names]


def make_setting(options: argparse.Namespace) -> Setting:
    from megatron_rl.doctor.setting import CPU_RANKS, Setting, planned
    from megatron_rl.process.devices import default_device

    if options.job and not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise InputError("--job: start it under torchrun or slurm/lib/rank.sh; RANK, WORLD_SIZE, MASTER_… are not set")
    device = default_device()
    if options.ranks is None:
        import torch

        options.ranks = torch.cuda.device_count() if device == "cuda" else CPU_RANKS
    setting = Setting(device, options.ranks, "", options.recipe, options.overrides, in_job=options.job)
    recipe = planned(setting)  # a bad recipe ends this before a check begins
    shared = Path(options.shared or (recipe.run_root if recipe else "runs"))
    return replace(setting, shared=str(shared.absolute()))
